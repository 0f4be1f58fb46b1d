"""All machines at once: a thread and a line for each, and nobody waits for one that is slow."""

import getpass
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from fleet.machines import Machine
from fleet.plain import plain
from fleet.remote.agent_link import Link, Trouble
from fleet.remote.ssh import Locked, Unreachable
from fleet.run_config import UserError

T = TypeVar("T")


class NoAnswer(str):
    """Why a machine has no answer."""

    given_up = False  # it did not answer in time, and may still do something


def on_all(
    machines: Sequence[Machine], call: Callable[[Machine], T], seconds: float, doing: str, console: Console
) -> tuple[dict[str, T], dict[str, NoAnswer]]:
    """Call it for each machine in a thread of its own: the answers, and why others gave none. What takes longer is
    given up: its thread may hang for ever."""
    results: dict[str, T | NoAnswer] = {}
    threads = [threading.Thread(target=_one, args=(m, call, results), daemon=True) for m in machines]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        lines = {m.name: progress.add_task(f"{plain(m.name)}: {doing}") for m in machines}
        while lines and time.monotonic() < end:
            for name in [name for name in lines if name in results]:
                progress.update(lines.pop(name), visible=False)
            time.sleep(0.02)
    late = NoAnswer(f"no answer within {seconds:.0f} s ({doing})")
    late.given_up = True
    found = {m.name: results.get(m.name, late) for m in machines}
    bad = {name: got for name, got in found.items() if isinstance(got, NoAnswer)}
    return {name: got for name, got in found.items() if not isinstance(got, NoAnswer)}, bad


def _one(machine: Machine, call: Callable[[Machine], T], results: dict[str, T | NoAnswer]) -> None:
    try:
        results[machine.name] = call(machine)
    except (Unreachable, Trouble, UserError) as error:
        results[machine.name] = NoAnswer(str(error))
    except Exception as error:  # whatever a network and a library can come up with is one machine's trouble
        results[machine.name] = NoAnswer(f"{type(error).__name__}: {plain(error)}")


class Links:
    """A conversation with each machine that can be reached."""

    def __init__(self, machines: Sequence[Machine], seconds: float, ssh_config: Path | None, console: Console) -> None:
        self.machines, self.seconds, self.console = machines, seconds, console
        self._ssh_config = ssh_config
        self._open: dict[str, Link] = {}
        self.bad: dict[str, str] = {}  # why a machine has not answered what it was asked last
        self._passphrases: dict[Path, bytes] = {}
        self._connect(machines)

    def __enter__(self) -> "Links":
        return self

    def __exit__(self, *_: object) -> None:
        for link in self._open.values():
            link.close()

    def __getitem__(self, name: str) -> Link:
        return self._open[name]

    @property
    def there(self) -> list[Machine]:
        return [machine for machine in self.machines if machine.name in self._open]

    def fresh(self, machine: Machine) -> Link:
        """One more conversation with a machine."""
        return Link(machine, self.seconds, self._passphrases, self._ssh_config)

    def ask(
        self, verb: str, doing: str, words: Callable[[Machine], Mapping[str, Any]],
        only: Sequence[Machine] | None = None, wait: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        """The same question to all, and the answers; a machine that does not answer at all is not asked again."""
        asked = [m for m in (self.there if only is None else only) if m.name in self._open]
        answers, bad = on_all(
            asked,
            lambda machine: self._open[machine.name].ask(verb, wait=wait, **words(machine)),
            self.seconds + wait + 1,
            doing,
            self.console,
        )
        for name, why in bad.items():
            if why.given_up or self._open[name].closed:
                self._open.pop(name).close()
        self.bad = {name: why for name, why in self.bad.items() if name not in answers} | bad
        return answers

    def _connect(self, machines: Sequence[Machine]) -> None:
        def connect(machine: Machine) -> Link | Path:
            try:
                return self.fresh(machine)
            except Locked as error:
                if not sys.stdin.isatty():
                    raise
                return error.key

        # several steps may each take their time: the way there, logging in, Python
        found, bad = on_all(machines, connect, 3 * self.seconds, "connecting", self.console)
        locked = {name: got for name, got in found.items() if isinstance(got, Path)}
        self._open |= {name: got for name, got in found.items() if isinstance(got, Link)}
        self.bad |= bad
        if locked and (asked := [key for key in dict.fromkeys(locked.values()) if key not in self._passphrases]):
            for key in asked:
                try:
                    self._passphrases[key] = getpass.getpass(f"Passphrase of {key}: ").encode()
                except EOFError:
                    raise UserError(f"no passphrase of {key} was given") from None
            self._connect([machine for machine in machines if machine.name in locked])
        elif locked:
            self.bad |= {name: f"the passphrase of {key} is wrong" for name, key in locked.items()}

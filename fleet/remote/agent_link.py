"""A conversation with agent.py on one machine: it is sent along, asked line by line, and leaves nothing there."""

import contextlib
import json
import shlex
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import paramiko

from fleet.machines import Machine
from fleet.plain import plain
from fleet.remote.route import route_to
from fleet.remote.ssh import Connection, Unreachable

AGENT = Path(__file__).with_name("agent.py")
_ENOUGH = 64 << 20  # bytes of an answer, and of what a setup line says before it
_BOOT = (  # any Python can read it, and an old one says which it is
    "import sys; del sys.path[0]; given = getattr(sys.stdin, 'buffer', sys.stdin); "
    "agent = given.read(int(given.readline())); old = sys.version_info < (3, 11); "
    "old and sys.stdout.write('\\n' + sys.argv[1] + '{\"old\": \"%s\"}\\n' % sys.version.split()[0]); "
    "exec(compile(old and 'main = str' or agent, 'agent', 'exec')); main(sys.argv[1])"
)


class Trouble(Exception):
    """The machine answers, and says what is wrong there."""


def command(machine: Machine, prefix: str) -> str:
    """What the machine's shell is given. Only `setup` is shell, by design; all other words are quoted."""
    python = f"exec {shlex.join([machine.python, '-u', '-c', _BOOT, prefix])}"
    if not machine.setup:
        return python
    inner = f"{{ {machine.setup}\n}} </dev/null && {python}"  # what comes on the standard input is not for it
    return f"exec {shlex.join(['bash', '-lc', inner])}"


class Link:
    def __init__(
        self, machine: Machine, seconds: float, passphrases: Mapping[Path, bytes], ssh_config: Path | None
    ) -> None:
        self.machine, self.seconds, self.closed = machine, seconds, False
        self.prefix = f"@{uuid.uuid4().hex} "  # a setup's own words may stand between the answers
        self._connection = Connection(route_to(machine, ssh_config), seconds, passphrases, ssh_config)
        self.notes = self._connection.notes
        try:
            self._channel = self._connection.execute(command(machine, self.prefix))
            source = AGENT.read_bytes()
            self.clock = self._begun(self._talk(f"{len(source)}\n".encode() + source, seconds)) - time.time()
        except BaseException:
            self.close()
            raise

    def ask(self, verb: str, wait: float = 0.0, **words: Any) -> dict[str, Any]:
        """One question, one answer, which may take `wait` seconds longer than answers usually may."""
        asked = json.dumps({"verb": verb, "with": words}).encode() + b"\n"
        return self._talk(asked, self.seconds + wait, answered=verb != "become")

    def close(self) -> None:
        self.closed = True
        self._connection.close()

    def _begun(self, answer: dict[str, Any]) -> float:
        """What time it is there."""
        if "old" in answer:
            raise Trouble(
                f"it has Python {plain(answer['old'], 40)} as {self.machine.python!r}; 3.11 or newer is needed: "
                "name one as `python` in machines.json"
            )
        return float(answer["clock"])

    def _talk(self, data: bytes, seconds: float, answered: bool = True) -> dict[str, Any]:
        """An answer that comes too late would be taken for the next one: then there is no next one."""
        end = time.monotonic() + seconds
        try:
            while data and self._in_time(end):
                data = data[self._channel.send(data) :]
            return self._answer(end) if answered else {}
        except TimeoutError:
            why: Exception = Unreachable(f"no answer within {seconds:g} s")
        except Unreachable as error:
            why = error
        except (OSError, EOFError, ValueError, paramiko.SSHException):
            why = self._ended()
        if isinstance(why, Unreachable):
            self.close()
        raise why

    def _answer(self, end: float) -> dict[str, Any]:
        for line in self._lines(end):
            if line.startswith(self.prefix.encode()):
                answer = json.loads(line[len(self.prefix) :].decode(errors="replace"))
                if "problem" in answer:
                    raise Trouble(plain(answer["problem"], 1000))
                return dict(answer)
        raise self._ended()

    def _lines(self, end: float) -> Iterator[bytes]:
        """What comes from there, whoever says it: within bounds of time and size."""
        parts, read = list[bytes](), 0
        while self._in_time(end) and (part := self._channel.recv(1 << 16)):
            if (read := read + len(part)) > _ENOUGH:
                raise Unreachable(f"it says more than {_ENOUGH >> 20} MB, and no answer among them")
            parts.append(part)
            if b"\n" in part:
                *whole, rest = b"".join(parts).split(b"\n")
                yield from whole
                parts = [rest]

    def _in_time(self, end: float) -> bool:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError
        self._channel.settimeout(left)
        return True

    def _ended(self) -> Exception:
        """Why agent.py is not there (any more), from what the shell said last."""
        ended = self._channel.status_event.wait(2.0)  # it comes after the end of the stream
        if not ended or (code := self._channel.recv_exit_status()) == -1:
            return Unreachable("the connection was lost")
        said = self._last_words(time.monotonic() + 1.0).decode(errors="replace").strip().splitlines()
        last = plain(said[-1], 300) if said else ""
        if code in (126, 127):
            where = " after its setup line" if self.machine.setup else ""
            return Trouble(f"its python {self.machine.python!r} does not run there{where}: {last}")
        return Trouble(f"its shell ended with code {code}: {last or 'it said nothing'}")

    def _last_words(self, end: float, most: int = 20_000) -> bytes:
        said = b""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while len(said) < most and self._in_time(end) and (part := self._channel.recv_stderr(most)):
                said += part
        return said

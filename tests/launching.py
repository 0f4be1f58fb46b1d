"""Toy runs on the machines of a lab, started by the launcher as a person would."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.host import Host
from fleet.remote import agent
from fleet.run import open_run
from tests.helpers import LONG, Started, Toys, until
from tests.lab.machines import Lab

LAUNCHER = [sys.executable, "-m", "tests.toy.launch"]


def old_pythons() -> dict[str, str]:
    """Those that this machine happens to have, with their versions."""
    found = {str(file): file.parents[1].name for file in Path.home().glob(".pyenv/versions/*/bin/python")}
    return {file: name for file, name in found.items() if re.fullmatch(r"(2\.\d+|3\.([0-9]|10))\.\d+", name)}


@dataclass
class Launched(Toys):
    """A run on the lab's shared folder."""

    lab: Lab | None = None
    machines: Any = None  # entries of machines.json; all of the lab's by default
    launcher: Sequence[str] = tuple(LAUNCHER)

    def entry(self, host: str, **keys: Any) -> dict[str, Any]:
        return {"host": host, "python": sys.executable, **keys}

    def command(self, *words: str, base: str = "", **changed: Any) -> list[str]:
        """The command line, with its two files as they are now."""
        assert self.lab
        self.keys |= changed
        known = {"project_name": "toy", "base_dir": base or str(self.place / "runs"), **self.keys}
        (self.place / "evolution.json").write_text(json.dumps(known))
        entries = [self.entry(each.name) for each in self.lab] if self.machines is None else self.machines
        (self.place / "machines.json").write_text(json.dumps(entries))
        options = [f"--config={self.place / 'evolution.json'}", f"--machines={self.place / 'machines.json'}"]
        return [*self.launcher, *words, *options, f"--ssh-config={self.lab.ssh_config}"]

    def ask(self, *words: str, before: tuple[str, ...] = (), **changed: Any) -> Started:
        """A command that goes on by itself."""
        return self.run([*before, *self.command(*words, **changed)])

    def says(self, *words: str, code: int = 0, **changed: Any) -> str:
        """A command that ends, and what it said; never a traceback."""
        asked = self.ask(*words, **changed)
        asked.ends(code)
        assert "Traceback" not in asked.said, asked.said
        return asked.said

    def kill_all(self) -> None:
        """Supervisors first, or they would start workers again."""
        launchers = [each.process for each in self.started if each.process.poll() is None]
        for process in launchers:
            process.kill()
        if (self.folder / "run.json").exists():
            agent.kill(open_run(self.folder, Host(), "test")[0].run_id, 10.0)
        super().kill_all()

    def wait_over(self) -> None:
        until(lambda: self.folder.exists() and self.is_over(), "the run is over", LONG, pause=0.1)

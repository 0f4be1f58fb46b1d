"""The misfortunes of a shared disk, as a file called CONTROL tells them.

It is JSON, and is read again whenever it changes. For `absent`, `stale` and `listing` seconds the machine goes on
believing that a name is not there, what a file is and holds, and which names a folder has (-1: for ever). What it
changes itself it knows at once, and a fresh listing corrects what it believes to be absent, as on NFS. `rules` is a
list of Rule, and `seed` is for their chances. CONTROL.struck gets a line for each call that meets one.
"""

import fnmatch
import json
import random
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Rule:
    """Of the calls that fit `op` and `path`, `skip` go well; then at most `count` meet it, each with some `chance`."""

    op: str = "*"  # a method of FaultFS
    path: str = "*"  # a pattern, such as "/rounds/*"
    skip: int = 0
    count: int = sys.maxsize
    chance: float = 1.0
    delay: float = 0.0  # seconds
    short: int = 0  # so many bytes are written, and no more
    error: str = ""  # such as "EIO"
    done: bool = False  # the error is but the answer to a call that went well

    def strikes(self, op: str, path: str, rng: random.Random) -> bool:
        if not (fnmatch.fnmatchcase(op, self.op) and fnmatch.fnmatchcase(path, self.path)):
            return False
        self.skip -= 1
        if self.skip >= 0 or self.count <= 0 or rng.random() >= self.chance:
            return False
        self.count -= 1
        return True


class Luck:
    """What CONTROL says just now."""

    def __init__(self, control: Path) -> None:
        self._control, self._seen, self._lock = control, 0, threading.Lock()
        self._struck = control.with_name(f"{control.name}.struck")
        self._set({})

    def look(self) -> "Luck":
        with self._lock:
            if (changed := self._control.stat().st_mtime_ns) != self._seen:
                self._set(json.loads(self._control.read_text()))
                self._seen = changed
        return self

    def _set(self, said: dict[str, Any]) -> None:
        self.absent, self.stale, self.listing = (float(said.get(key, 0)) for key in ("absent", "stale", "listing"))
        self._rules, self._rng = [Rule(**rule) for rule in said.get("rules", ())], random.Random(said.get("seed", 0))

    def strikes(self, op: str, path: str) -> list[Rule]:
        with self._lock:
            struck = [rule for rule in self._rules if rule.strikes(op, path, self._rng)]
            if struck:
                with self._struck.open("a") as file:
                    file.write(f"{op} {path}\n")
        return struck

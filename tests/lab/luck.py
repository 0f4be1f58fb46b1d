"""The misfortunes of a shared disk, as a file called CONTROL tells them.

It is JSON, and is read again whenever it changes. For `absent`, `stale` and `listing` seconds this machine
goes on believing that a name is not there, what a file is and holds, and which names a folder has (-1: for ever); what
it changes itself it knows at once, and a fresh listing corrects what it believes to be absent, as on NFS.

`rules` is a list of objects. `op` and `path` (a pattern, such as "/rounds/*") say which calls are meant, or all.
Of these, `skip` go well, then at most `count` are struck, each with the probability `chance` (by `seed`): it takes
`delay` seconds more, writes only `short` bytes, or fails with `error` ("EIO"), which with `done` is but what is said
of a call that went well. CONTROL.struck gets a line for each.
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
    op: str = "*"
    path: str = "*"
    skip: int = 0
    count: int = sys.maxsize
    chance: float = 1.0
    delay: float = 0.0
    short: int = 0
    error: str = ""
    done: bool = False

    def strikes(self, op: str, path: str, dice: random.Random) -> bool:
        if not (fnmatch.fnmatchcase(op, self.op) and fnmatch.fnmatchcase(path, self.path)):
            return False
        self.skip -= 1
        if self.skip >= 0 or self.count <= 0 or dice.random() >= self.chance:
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
        self._rules, self._dice = [Rule(**rule) for rule in said.get("rules", ())], random.Random(said.get("seed", 0))

    def strikes(self, op: str, path: str) -> list[Rule]:
        with self._lock:
            struck = [rule for rule in self._rules if rule.strikes(op, path, self._dice)]
            if struck:
                with self._struck.open("a") as file:
                    file.write(f"{op} {path}\n")
        return struck

"""What workers noted, from the first line to the last: read on where the last look ended."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from fleet.attic import ENDED
from fleet.diary import END, ahead, number, plain_file
from fleet.report.facts import Session
from fleet.store import Store

_MOST = 1 << 26  # bytes of one worker's notes; of longer ones the last
_EARLIEST = 1e9  # seconds: a moment of 2001
_LINE = 1 << 20  # bytes of one line; nobody writes longer ones
_DULL = b'"what":"published"'  # every other line says this, and nothing that is not known
_TROUBLE = {"waits": "waited for the disk", "failed": "failed", "stopped": "stopped", "suspects": "suspects",
            "voided": "found damaged", "leaves to others": "left to others", "benched": "benched"}  # fmt: skip


@dataclass
class Notes:
    """One process."""

    name: str
    machine: str = ""
    offset: int = 0
    ahead: float = 0.0  # seconds, of its clock before the disk's
    rest: bytes = b""  # a line that was not whole yet
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # 0: not ended
    last: float = 0.0
    made: list[tuple[float, float, str, float]] = field(default_factory=list)  # when, seconds, whom, bytes moved
    waited: list[tuple[float, float]] = field(default_factory=list)
    late: set[str] = field(default_factory=set)
    troubles: list[tuple[float, str, str, str]] = field(default_factory=list)  # when, what, whom, why
    written: float = 0.0
    read: float = 0.0
    hidden: bool = False  # it may not be read

    def take(self, event: dict[str, Any], now: float) -> None:
        """A clock that was never set says nothing; one that runs ahead says that it was just now."""
        what, at, id = str(event.get("what", "")), number(event, "at"), str(event.get("id", ""))
        if at < _EARLIEST:
            return
        at = min(at - self.ahead, now)
        self.last = max(self.last, at)
        if what == "started" or not self.begins:
            self.begins.append(at)
            self.ends.append(0.0)
            self.machine = str(event.get("machine", self.machine))
        if what == "ended":
            self.ends[-1] = at
        elif what == "made":
            written, read = number(event, "written"), number(event, "read")
            self.written, self.read = self.written + written, self.read + read
            self.made.append((at, max(0.0, number(event, "seconds")), id, written + read))
        elif what == "waited":
            self.waited.append((at, max(0.0, number(event, "seconds"))))
        elif what == "late":
            self.late.add(id)
        elif what in _TROUBLE:
            self.troubles.append((at, _TROUBLE[what], id, str(event.get("why", ""))))

    def sessions(self, alive: bool, seen: float) -> list[Session]:
        """Several if a name was used again; only the last can be at work."""
        found = []
        for n, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            if end:
                found.append(Session(begin, end, "ended"))
            elif n + 1 < len(self.begins):
                found.append(Session(begin, max(begin, min(self.last, self.begins[n + 1])), "lost"))
            else:
                found.append(Session(begin, max(begin, self.last, seen), "works" if alive else "lost"))
        return found


def read_on(store: Store, known: dict[str, Notes], now: float, told: Callable[[], None] = lambda: None) -> None:
    """Take in what was noted since the last look."""
    for file in sorted(store.names("workers")):
        if file.endswith(END):
            _take_new(store, known.setdefault(file, Notes(file.removesuffix(END))), file, now)
            told()
    for file in sorted(store.names(ENDED)):  # each once: whoever wrote it is gone
        if file.endswith(END) and file not in known:
            name = file.partition(".")[0]
            known[file] = known.pop(f"{name}{END}") if f"{name}{END}" in known else Notes(name)
            _take_new(store, known[file], f"{PurePath(ENDED).name}/{file}", now)
            told()


def _take_new(store: Store, notes: Notes, file: str, now: float) -> None:
    data, written, path = b"", 0.0, store.disk.root / "workers" / file
    try:
        with plain_file(path) as handle:
            size, written = (seen := os.fstat(handle)).st_size, seen.st_mtime
            notes.offset = max(notes.offset, size - _MOST)
            while notes.offset < size and (part := os.pread(handle, size - notes.offset, notes.offset)):
                data, notes.offset = data + part, notes.offset + len(part)
        notes.hidden = False
    except PermissionError:
        notes.hidden = True
    except OSError:  # gone, or not to be had just now
        pass
    *lines, rest = (notes.rest + data).split(b"\n")
    notes.rest = rest if len(rest) < _LINE else b""
    moments = [at for line in (*lines[:1], *lines[-1:]) if (at := number(_event(line), "at"))]
    if moments:
        notes.ahead = ahead(store.disk.root, moments[0], moments[-1], written)
    for line in lines:
        if _DULL not in line and (event := _event(line)):
            notes.take(event, now)


def _event(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(event := json.loads(line.decode(errors="replace")), dict):
            return event
    return {}

"""What workers noted in their event files, for the status. Anybody may have written there: every line is doubted."""

import contextlib
import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.store import Store

_TAIL = 1 << 18  # so much of the end of a file is read
_BAD = ("failed", "waits", "stopped", "suspects", "voided", "leaves to others")

Error = tuple[float, str, str]  # when, what and where, why


@dataclass
class Diary:
    """One worker's recent past."""

    name: str
    machine: str = ""
    launch: int = 0
    made: int = 0
    rate: float = 0.0  # members a minute
    written: float = 0.0
    read: float = 0.0
    first: float = 0.0
    last: float = 0.0
    doing: str = ""
    ended: bool = False
    errors: list[Error] = field(default_factory=list)


def read_all(store: Store) -> list[Diary]:
    names = [file.removesuffix(".events") for file in store.names("workers") if file.endswith(".events")]
    return [read(name, recent_events(store.disk.root / "workers" / f"{name}.events")) for name in names]


def read(name: str, events: list[dict[str, Any]]) -> Diary:
    diary = Diary(name)
    for event in events:
        what, id = str(event.get("what", "")), str(event.get("id", ""))
        diary.last = number(event, "at")
        diary.first = diary.first or diary.last
        diary.doing, diary.ended = f"{what} {id}".strip(), what == "ended"
        if what == "started":
            diary.machine, diary.launch = str(event.get("machine", "")), int(number(event, "launch"))
        if what == "made":
            diary.made += 1
            diary.written += number(event, "written")
            diary.read += number(event, "read")
        if what in _BAD:
            diary.errors.append((diary.last, diary.doing, str(event.get("why", ""))))
    diary.rate = 60 * diary.made / max(1.0, diary.last - diary.first)
    return diary


def recent_events(path: Path) -> list[dict[str, Any]]:
    """The last events of a worker; lines that are not whole are passed over."""
    found = []
    for line in _tail(path).splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and number(event, "at"):
                found.append(event)
    return found


def number(event: dict[str, Any], key: str) -> float:
    value = event.get(key)
    known = isinstance(value, (int, float)) and abs(value) < 1e15 and math.isfinite(value)
    return float(value) if known and value is not None else 0.0


def _tail(path: Path) -> bytes:
    with contextlib.suppress(OSError), plain_file(path) as handle:
        size = os.fstat(handle).st_size
        return os.pread(handle, _TAIL, max(0, size - _TAIL))
    return b""


@contextlib.contextmanager
def plain_file(path: Path) -> Iterator[int]:
    """Never a link, and never a pipe that would keep us waiting."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path}: not a plain file")
        yield handle
    finally:
        os.close(handle)


def plain(text: object, most: int = 200) -> str:
    """Text from the disk, which anybody may have written: nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:most])

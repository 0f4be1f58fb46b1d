"""What workers noted in their event files, for whoever looks at the run. Anybody may have written there: every line is
doubted.

A worker's clock may be a year off. Its notes tell how much later one came than another; when the last one was written,
the disk tells, whose clock is the same for all.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from fleet import faults
from fleet.store import Store

END = ".events"  # of the names of such files
TAIL = 1 << 18  # so much of the end of a file is read
SO_FAR = "so far"  # an event that sums up all before it
_ERRORS = 8  # of one worker
_SKEW = 30.0  # seconds that a clock may differ from the disk's before its moments are moved
_BAD = ("failed", "waits", "stopped", "suspects", "voided", "leaves to others", "benched")

_SUMS = ("made", "written", "read", "busy", "disk", "waited")

Error = tuple[float, str, str]  # when, what and where, why


@dataclass
class WorkerNotes:
    """One worker: its past in sums, and what it did last."""

    name: str
    machine: str = ""
    launch: int = 0
    made: int = 0
    written: float = 0.0
    read: float = 0.0
    busy: float = 0.0  # seconds: at recipes; of these, for the disk; and for what others make
    disk: float = 0.0
    waited: float = 0.0
    first: float = 0.0
    last: float = 0.0
    doing: str = ""
    ended: bool = False
    benched: str = ""  # why it leaves all work to others for a while
    errors: list[Error] = field(default_factory=list)  # the last ones
    hidden: bool = False  # it may not be read
    dull: ClassVar[bytes] = b"\n"  # what stands in lines that say nothing new

    @property
    def rate(self) -> float:
        """Members a minute."""
        return 60 * self.made / max(1.0, self.last - self.first)

    def take(self, event: dict[str, Any]) -> None:
        """The next event."""
        what, id = str(event.get("what", "")), str(event.get("id", ""))
        if what == SO_FAR:
            return self._begin_at(event)
        self.last = number(event, "at")
        self.first = self.first or self.last
        self.doing, self.ended = f"{what} {id}".strip(), what == "ended"
        if what == "started":
            self.machine, self.launch = str(event.get("machine", "")), int(number(event, "launch"))
        if what == "made":
            self.made += 1
            self.written += number(event, "written")
            self.read += number(event, "read")
            self.busy += number(event, "seconds")
            self.disk += number(event, "disk")
        if what == "waited":
            self.waited += number(event, "seconds")
        if what in ("benched", "back", "started"):
            self.benched = str(event.get("why", "")) if what == "benched" else ""
        if what in _BAD:
            self.errors = [*self.errors, (self.last, self.doing, str(event.get("why", "")))][-_ERRORS:]

    def add(self, other: "WorkerNotes") -> None:
        """Of a worker that is gone, whose sums are found here from now on."""
        for sum in _SUMS:
            setattr(self, sum, getattr(self, sum) + getattr(other, sum))

    def so_far(self) -> dict[str, Any]:
        """What stands in the middle of a long file, so that nobody has to read what comes before."""
        known = ("machine", "launch", "first", *_SUMS)
        return {"what": SO_FAR, **{key: getattr(self, key) for key in known}}

    def _begin_at(self, event: dict[str, Any]) -> None:
        self.machine, self.launch = str(event.get("machine", "")), int(number(event, "launch"))
        self.made, self.first = int(number(event, "made")), number(event, "first")
        for sum in _SUMS[1:]:
            setattr(self, sum, number(event, sum))


def shares(notes: Sequence[WorkerNotes]) -> tuple[float, float, float] | None:
    """Of the workers' time, as far as they have noted it: at work, for the disk, for what others make."""
    busy, disk, waited = (math.fsum(getattr(d, sum) for d in notes) for sum in ("busy", "disk", "waited"))
    return ((busy - disk) / whole, disk / whole, waited / whole) if (whole := busy + waited) > 0 else None


D = TypeVar("D", bound=WorkerNotes)


@dataclass
class _FileRead(Generic[D]):
    """How far a file was read."""

    notes: D
    offset: int = 0
    rest: bytes = b""  # a line that was not whole yet


class NotesReader(Generic[D]):
    """Of all workers whose notes lie in some folders. A look reads what is new, the first one the end of each file: so
    much of it."""

    def __init__(
        self, store: Store, make: Callable[[str], D], most: int = TAIL, folders: Sequence[str] = ("workers",)
    ) -> None:
        self.store, self.bytes_read = store, 0
        self._make, self._most, self._folders = make, most, folders
        self._pages: dict[str, _FileRead[D]] = {}

    def look(self, told: Callable[[int, int], None] = lambda done, of: None) -> list[D]:
        listed = [f"{folder}/{file}" for folder in self._folders for file in sorted(self.store.names(folder))]
        files, moment = [file for file in listed if file.endswith(END)], now(self.store)
        old, self._pages, there = self._pages, {}, {*files}
        for done, file in enumerate(files, 1):
            name = file.rpartition("/")[2].partition(".")[0]
            moved = "" if (its := f"workers/{name}{END}") in there else its  # its worker may have begun another one
            page = self._pages[file] = old.get(file) or old.pop(moved, None) or _FileRead(self._make(name))
            if file == its or file not in old:  # else whoever wrote it is gone
                self._read_on(page, file, moment)
            told(done, len(files))
        return [page.notes for page in self._pages.values()]

    def _read_on(self, page: _FileRead[D], file: str, moment: float) -> None:
        data, written = b"", 0.0
        try:
            new, begin, size, written = self.store.tail(file, page.offset, self._most)
            if size < page.offset:  # another file of that name
                page.notes, page.offset, page.rest = self._make(page.notes.name), 0, b""
            data = (page.rest if begin == page.offset else b"") + new
            self.bytes_read, page.offset = self.bytes_read + len(new), size
            page.notes.hidden = False
        except faults.Denied:
            page.notes.hidden = True
        except faults.Fault:  # gone, or not to be had just now
            pass
        whole, _, page.rest = data.rpartition(b"\n") if data else (b"", b"", page.rest)
        page.rest = page.rest[-self._most :]
        events = [*events_in(whole, page.notes.dull)]
        if events:
            off = ahead(self.store, number(events[0], "at"), number(events[-1], "at"), written)
        for event in events:
            by_disk: dict[str, Any] = {
                key: min(number(event, key) - off, moment) for key in ("at", "first") if key in event
            }
            page.notes.take({**event, **by_disk})


def read(store: Store, file: str) -> WorkerNotes:
    """One worker's, from the end of its file."""
    notes, data = WorkerNotes(file.rpartition("/")[2].partition(".")[0]), b""
    with contextlib.suppress(faults.Fault):
        data = store.tail(file, most=TAIL).data
    for event in events_in(data):
        notes.take(event)
    return notes


def events_in(data: bytes, dull: bytes = b"\n") -> Iterator[dict[str, Any]]:
    """Lines that are not whole are passed over; so are those with dull words."""
    for line in data.split(b"\n"):
        if dull in line:
            continue
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if isinstance(event, dict) and number(event, "at"):
                yield event


def ahead(store: Store, first: float, last: float, written: float) -> float:
    """By how much a worker's clock is ahead of the disk's, if that is worth a thought and can be known: where files are
    copies that have another time, the run lasted longer by its notes than by its files."""
    off = last - written
    if abs(off) <= _SKEW:
        return 0.0
    with contextlib.suppress(faults.Fault, IndexError):
        began = store.stamp("run.json")[2] / 1e9
        return off if last - first <= written - began + _SKEW else 0.0
    return 0.0


def now(store: Store) -> float:
    """The wall's time, or the disk's when this machine's clock is behind it."""
    with contextlib.suppress(faults.Fault):
        return max([store.host.stamp(), *(ns / 1e9 for ns in store.stamp("bell")[2:3])])
    return store.host.stamp()


def number(event: dict[str, Any], key: str) -> float:
    value = event.get(key)
    known = isinstance(value, (int, float)) and abs(value) < 1e15 and math.isfinite(value)
    return float(value) if known and value is not None else 0.0

"""What a run is kept in, through a handful of verbs. Knows nothing of recipes or models.

A *register* is a name that gets a value once and keeps it for ever; *news* is a file of which only the latest text
matters and by which nothing is decided. Payloads, which are large, are in `payload.py`. A run lies on a disk
(`disk_store.py`) or in a bucket (`bucket.py`), and nobody above them asks which.
"""

import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

from fleet import faults, strictjson
from fleet.at_hand import AtHand
from fleet.checksum import checksum
from fleet.host import Host

FOLDERS = ("tmp", "rounds", "files", "workers", "launches")
REGISTER_LIMIT = 1 << 24
AGAIN = (0.01, 0.05, 0.2, 1.0)  # a passing fault of one call: NFS answers ESTALE once and then the truth
SETTLE = (*AGAIN, 2.0, 5.0, 10.0, 20.0, 30.0, 30.0)  # seeing one's own name: name caches live up to a minute

_VERIFIED = 4096  # files that a process remembers to be right

Value = dict[str, Any]
T = TypeVar("T")


class Unreadable(ValueError):
    """A value that could not be read back from a register: not the disk's fault, and the same whoever offers it."""


class FileEnd(NamedTuple):
    """The end of a file that grows: its bytes from one place on, how long all of it is, and when it last grew."""

    data: bytes
    begin: int
    size: int
    written: float


class ReadableFile(Protocol):
    """A file that is read from its beginning, piece by piece."""

    def readinto(self, room: memoryview) -> int: ...
    def close(self) -> None: ...


class WritableFile(Protocol):
    """A private file while it is being written. It can be told to get on with what it has; and it is there for good
    once `sync` has returned."""

    def write(self, data: bytes | memoryview, /) -> object: ...
    def flush(self) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Appender(Protocol):
    """The end of a file that only this process writes."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class Log(NamedTuple):
    """What processes of this machine write into, and where people find it."""

    file: IO[bytes]
    where: str
    close: Callable[[], None]


class Store(ABC):
    """Registers, news and files of one run, for one process. Names are relative to the run, written with '/'."""

    lists_late = True  # listings, and what looks at a name show, may be those of a while ago
    breath = 0.0  # seconds between two looks of whoever waits long, where a look costs more than time

    def __init__(self, root: Path, host: Host, name: str) -> None:
        self.root, self.host, self.name = root, host, name
        self._last: tuple[str, bytes, Value] = ("", b"", {})
        self._verified = dict[str, bool]()  # payload files that this process has read whole and found right
        self.at_hand = AtHand()
        self.bytes_at_hand = 0  # that somebody else has read for this one
        self.run_id = ""  # of the run that this store was opened for

    # -- registers --------------------------------------------------------------------------------------------------

    @abstractmethod
    def settle(self, name: str, value: Value, durable: bool = True) -> Value:
        """Offer a value for a name and return the one that stands, which may be another's."""

    def read(self, name: str) -> Value:
        """What stands in a register. Whoever acts on it uses `confirmed`."""
        damaged = faults.Damaged(name)
        for pause in (*AGAIN, 0.0):
            try:
                data = self.patiently(lambda: self.load(name, REGISTER_LIMIT))
                if (name, data) != self._last[:2]:  # what is read again to be sure need not be understood again
                    self._last = (name, data, _opened(data, name))
                return self._last[2]
            except faults.Damaged as error:  # perhaps a copy that arrived in part: look afresh
                damaged = error
                with contextlib.suppress(faults.Fault):
                    self.forget(name)
                self.host.sleep(pause)
        raise damaged

    @abstractmethod
    def confirmed(self, name: str) -> Value:
        """What stands in a register, once no crash of a server can take it back any more."""

    def standing(self, name: str) -> Value:
        """The same, where the folder was synced after the name had been seen in it."""
        return self.read(name)

    def names(self, folder: str) -> list[str]:
        """A listing: what it shows is there; what it does not show may be there all the same."""
        try:
            return self.patiently(lambda: self.listing(folder))
        except faults.Missing:
            return []

    @abstractmethod
    def sync(self, folder: str) -> None:
        """What the folder shows stays, whatever crashes."""

    @abstractmethod
    def folder(self, name: str) -> None:
        """Make a folder, so that it survives a crash."""

    @abstractmethod
    def expect(self, folder: str) -> None:
        """It is there, and is a folder: a link would lead the run's files to somewhere else."""

    @abstractmethod
    def prove(self) -> None:
        """A process that begins shows that it may write here at all. What is refused later is an outage."""

    # -- news -------------------------------------------------------------------------------------------------------

    def post(self, name: str, text: str) -> None:
        self.replace(name, text.encode(), sync=False)

    @abstractmethod
    def replace(self, name: str, data: bytes, sync: bool = True) -> None:
        """A file for people, or news: whoever reads it sees it whole, as it was or as it is."""

    def news(self, name: str) -> str:
        try:
            return self.patiently(lambda: self.load(name, 1 << 16)).decode(errors="replace")
        except (faults.Missing, faults.Refused):
            return ""

    def stamp(self, name: str) -> tuple[int, ...]:
        """Differs when the news was replaced; the third number is when, in nanoseconds. It may be that of a while
        ago."""
        try:
            return self.patiently(lambda: self.state(name))
        except faults.Missing:
            return ()

    # -- files that grow ----------------------------------------------------------------------------------------------

    @abstractmethod
    def append(self, name: str) -> Appender: ...

    @abstractmethod
    def log(self, name: str) -> Log:
        """A new one, or one that goes on."""

    @abstractmethod
    def home(self) -> Path:
        """A folder of this machine where programs write files for people by themselves; `share` shows them to all."""

    @abstractmethod
    def share(self) -> None: ...

    @abstractmethod
    def copy_of(self, name: str) -> Path:
        """Where on this machine a file for people is, if there is one."""

    @abstractmethod
    def tail(self, name: str, after: int = 0, most: int = 1 << 30) -> FileEnd:
        """What a file has beyond so many bytes, but no more than its last ones; of one that has become shorter, all."""

    @abstractmethod
    def put_away(self, old: str, new: str) -> None:
        """Move such a file. Of several who do one succeeds; to the others it is missing."""

    # -- files --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, name: str, limit: int) -> bytes:
        """A whole small file; one byte more than the limit shows that there is more."""

    @abstractmethod
    def listing(self, folder: str) -> list[str]: ...

    @abstractmethod
    def everything(self) -> list[tuple[str, int]]:
        """All files, and how long they are; one that grows once."""

    @abstractmethod
    def state(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def open(self, name: str) -> ReadableFile: ...

    @abstractmethod
    def blocks(self, name: str) -> Iterator[bytes]:
        """A large file, block by block."""

    @abstractmethod
    def create(self, name: str, again: bool = False) -> WritableFile:
        """A new file; of one that is to be read `again`, by `written_so_far`, a copy is kept where that is needed."""

    @abstractmethod
    def written_so_far(self, name: str) -> Iterator[bytes]:
        """Of a file that this process is writing."""

    @abstractmethod
    def local(self, name: str, size: int, known: str) -> Path:
        """Where a library that wants a path finds it, whole: looked at on a process's first use of it."""

    @abstractmethod
    def begin(self, folder: str) -> None:
        """The folder of an attempt, which nobody else writes in."""

    @abstractmethod
    def local_folder(self, folder: str) -> Path:
        """Where libraries may write the attempt's files themselves."""

    @abstractmethod
    def local_files(self, folder: str) -> list[str]:
        """What they have written."""

    @abstractmethod
    def adopt(self, name: str) -> tuple[int, str]:
        """Such a file becomes one like those that `create` makes: its size and its checksum."""

    def hash_of(self, name: str, like: str = "") -> tuple[int, str]:
        """Of a whole file as it is read now: its size and its checksum, of the kind to be compared with this."""

        def once() -> tuple[int, str]:
            seen, size = checksum(like), 0
            for block in self.blocks(name):
                seen.update(block)
                size += len(block)
            return size, seen.hexdigest()

        return self.patiently(once)

    @abstractmethod
    def holds(self, path: object) -> bool:
        """Whether a path that a library was given, and names in its error, is one of the run's."""

    @abstractmethod
    def forget(self, name: str) -> None:
        """Let the next read come from where the file really is."""

    @abstractmethod
    def remove(self, name: str) -> None: ...

    @abstractmethod
    def clear(self, folder: str) -> None:
        """Remove an attempt's folder with all that is in it."""

    def borrow(self, other: "Store", name: str) -> bool:
        """Have what another run has under that name, too, where that takes no room: neither ever changes it."""
        return False

    @abstractmethod
    def dissolve(self) -> None:
        """Remove the run with all that is in it."""

    # -- what it has cost ---------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def ops(self) -> int:
        """Calls, or requests, so far."""

    @property
    @abstractmethod
    def bytes_read(self) -> int: ...

    @property
    @abstractmethod
    def seconds(self) -> float:
        """That this process's first thread has waited; what others do beside the work delays nobody."""

    # -- inside -------------------------------------------------------------------------------------------------------

    def verify(self, name: str, check: Callable[[], None]) -> None:
        """On the first use of a file in this process, and of those that were used last not again."""
        if name not in self._verified:
            check()
        self._verified.pop(name, None)
        self._verified[name] = True
        if len(self._verified) > _VERIFIED:
            del self._verified[next(iter(self._verified))]

    def patiently(self, call: Callable[[], T]) -> T:
        """A call that may be answered wrongly once or twice, as NFS does with ESTALE; or through a mount that died."""
        for pause in AGAIN:
            try:
                return call()
            except faults.Passing:
                self.host.sleep(pause)
        self.reopen()
        return call()

    def reopen(self) -> None:  # noqa: B027
        """Where nothing answers any more, and another way to this very run is to be had, take it."""


def compare(name: str, seen: tuple[int, str], wanted: tuple[int, str]) -> None:
    """Size and checksum of a file."""
    if seen[0] < wanted[0]:
        raise faults.Missing(f"{name}: {seen[0]} of {wanted[0]} bytes are there so far")
    if seen != wanted:
        raise faults.Damaged(f"{name}: its bytes do not match their checksum")


def proven(value: Value, name: str) -> tuple[bytes, Value]:
    """What stands in a register, and as everybody will read it; nothing is written that could not be read again."""
    try:
        if len(data := _sealed(value)) > REGISTER_LIMIT:
            raise ValueError(f"{len(data):,} bytes, and at most {REGISTER_LIMIT:,} are possible")
        return data, _opened(data, name)
    except (faults.Damaged, TypeError, ValueError, RecursionError) as error:
        why = str(error).removeprefix(f"{name}: ")
        raise Unreadable(f"{name}: what was to be written there could not be read back: {why}") from None


def _sealed(value: Value) -> bytes:
    line = strictjson.text(value).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest()[:16].encode() + b"\n"


def _opened(data: bytes, name: str) -> Value:
    line, _, check = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest()[:16].encode() != check.strip():
        raise faults.Damaged(f"{name}: its bytes do not match their checksum")
    try:
        value = strictjson.parse(line, REGISTER_LIMIT)
    except strictjson.BadJson as error:
        raise faults.Damaged(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise faults.Damaged(f"{name}: not an object")
    return value

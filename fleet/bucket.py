"""A run in a bucket: a register is made by a put that fails where its name is taken, and everybody sees it at once.

What a disk needs drafts, links and syncs for, a bucket does by itself: an object is there whole and for good, or not at
all. What it cannot do is grow: files that grow are written as numbered pieces, of which the last is replaced.
"""

import contextlib
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

from fleet import faults
from fleet.checksum import checksum
from fleet.hashed_files import HashedFile, HashedReader
from fleet.host import Host
from fleet.local_copies import LocalCopies
from fleet.objects import Objects
from fleet.store import SETTLE, Appender, FileEnd, Log, ReadableFile, Store, Value, WritableFile, compare, proven

_FULL = 1 << 16  # bytes of a piece; then the next one begins
_BLOCK = 1 << 22
_SHIPPED = 30.0  # seconds between two looks at a log


class Bucket(Store):
    """Registers, news and files of one run, for one process."""

    lists_late, breath = False, 10.0

    def __init__(self, objects: Objects, root: Path, host: Host, name: str) -> None:
        super().__init__(root, host, name)
        self.objects, self.copies = objects, LocalCopies(objects.address)
        self._shared = dict[Path, tuple[int, int]]()

    # -- registers --------------------------------------------------------------------------------------------------

    def settle(self, name: str, value: Value, durable: bool = True) -> Value:
        data = proven(value, name)[0]
        for pause in SETTLE:
            try:
                if self._offer(name, data) and not durable:
                    return value
                return self.read(name)  # whatever the reply was, what stands there is the outcome
            except faults.Denied:  # may last for minutes: whoever called says so, and asks again
                raise
            except (faults.Missing, faults.Passing):
                self.host.sleep(pause)
        raise faults.Passing(f"{name}: the bucket does not show what stands there")

    def confirmed(self, name: str) -> Value:
        return self.read(name)

    def sync(self, folder: str) -> None:
        """What is seen stays."""

    def folder(self, name: str) -> None:
        """There are only names."""

    def expect(self, folder: str) -> None:
        """There are only names."""

    def prove(self) -> None:
        """Where a taken name is given again, two would win, each of them sure of it: such a bucket is refused."""
        name = f"tmp/{self.name}.{self.host.token()}"
        try:
            self.objects.put(name, b"", new=True)
            with contextlib.suppress(faults.Exists):
                self.objects.put(name, b"", new=True)
                why = "this store knows no conditional puts (If-None-Match), so that no register has one winner there"
                raise faults.Unfit(f"{self.objects.address}: {why}; use another one")
        except faults.Denied as fault:
            raise faults.Unfit(f"{fault} (this process may not write there)") from None
        except (faults.Full, faults.Passing):  # the loop waits for these
            pass
        finally:
            with contextlib.suppress(faults.Fault):
                self.objects.remove(name)

    def replace(self, name: str, data: bytes, sync: bool = True) -> None:
        self.objects.put(name, data)

    # -- files that grow ----------------------------------------------------------------------------------------------

    def append(self, name: str) -> Appender:
        return Pieces(self, name)

    def log(self, name: str) -> Log:
        """On this machine's own disk; what is new there goes to the bucket now and then."""
        path = self.copies.place / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shipped = ShippedLog(path, Pieces(self, name), _SHIPPED)
        return Log(shipped.file, f"{path}, and {self.objects.address}/{name}", shipped.close)

    def home(self) -> Path:
        """Of this process alone: others may write the same files."""
        place = self.copies.place / "home" / self.name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place

    def share(self) -> None:
        home = self.home()
        for file in sorted(home.rglob("[!.]*")):
            if file.is_file() and self._shared.get(file) != (now := (file.stat().st_size, file.stat().st_mtime_ns)):
                self.objects.put(str(file.relative_to(home)), file.read_bytes())
                self._shared[file] = now

    def copy_of(self, name: str) -> Path:
        file = self.home() / name
        with contextlib.suppress(faults.Missing):
            file.write_bytes(self.load(name, 1 << 30))
        return file

    def tail(self, name: str, after: int = 0, most: int = 1 << 30) -> FileEnd:
        pieces = self.patiently(lambda: self.objects.below(name))
        if not pieces:
            raise faults.Missing(name)
        size = sum(each for _, each, _ in pieces)
        begin, at, data = max(after if after <= size else 0, size - most), 0, b""
        for piece, its, _ in pieces:
            if at + its > begin:
                data += self.load(piece, 1 << 30)[max(0, begin - at) :]
            at += its
        return FileEnd(data, begin, begin + len(data), max(when for *_, when in pieces))

    def put_away(self, old: str, new: str) -> None:
        """Who may do it, one conditional put decides; who dies meanwhile leaves it to whoever tidies up."""
        mark = f"tmp/moves.{zlib.crc32(old.encode()):08x}"
        try:
            self.objects.put(mark, b"", new=True)
        except faults.Exists:
            raise faults.Missing(old) from None
        if not (pieces := [piece for piece, *_ in self.objects.below(old)]):
            self.objects.remove(mark)
            raise faults.Missing(old)
        for piece in pieces:
            self.objects.put(new + piece.removeprefix(old), self.load(piece, 1 << 30))
        self.objects.remove(*pieces, mark)

    # -- files --------------------------------------------------------------------------------------------------------

    def load(self, name: str, limit: int) -> bytes:
        return self.objects.get(name, limit)

    def listing(self, folder: str) -> list[str]:
        return self.objects.list(folder)

    def everything(self) -> list[tuple[str, int]]:
        sizes = dict[str, int]()
        for name, size, _ in self.objects.below(""):
            folder, _, last = name.rpartition("/")
            grows = last.isdigit() and folder.startswith("workers/")
            whole = folder if grows else name
            sizes[whole] = sizes.get(whole, 0) + size
        return sorted(sizes.items())

    def state(self, name: str) -> tuple[int, ...]:
        about = self.objects.about(name)
        return zlib.crc32(about.tag.encode()), about.size, int(about.written * 1e9)

    def open(self, name: str) -> ReadableFile:
        return ObjectReader(self.objects.pieces(name))

    def blocks(self, name: str) -> Iterator[bytes]:
        return self.objects.pieces(name)

    def create(self, name: str, again: bool = False) -> WritableFile:
        if again:
            return Doubled(self.objects.writer(name), self.copies.path(name))
        return self.objects.writer(name)

    def written_so_far(self, name: str) -> Iterator[bytes]:
        with self.copies.path(name).open("rb") as file:
            while block := file.read(_BLOCK):
                yield block

    def local(self, name: str, size: int, known: str) -> Path:
        """Checked when it is fetched and when another process finds it; a copy that is wrong is fetched once more."""
        path = self.copies.path(name)

        def check() -> None:
            if _of(path, known) != (size, known):
                self._fetch(name, size, known)

        self.verify(name, check)
        if not path.exists():
            self._fetch(name, size, known)
        return path

    def begin(self, folder: str) -> None:
        """There are only names."""

    def local_folder(self, folder: str) -> Path:
        return self.copies.hold(folder)

    def local_files(self, folder: str) -> list[str]:
        return [each.name for each in self.copies.hold(folder).iterdir() if not each.name.startswith(".")]

    def adopt(self, name: str) -> tuple[int, str]:
        """It goes to the bucket, and its file here is one of the copies."""
        writer = HashedFile(self.objects.writer(name))
        with self.copies.path(name).open("rb") as file, contextlib.closing(writer) as out:
            while block := file.read(_BLOCK):
                out.write(block)
            out.sync()
            return out.seal()

    def holds(self, path: object) -> bool:
        return isinstance(path, str) and Path(path).is_relative_to(self.copies.place)

    def forget(self, name: str) -> None:
        (self.copies.place / name).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        self.objects.remove(name)

    def clear(self, folder: str) -> None:
        self.copies.drop(folder)
        self.objects.remove(*(name for name, *_ in self.objects.below(folder)))

    def dissolve(self) -> None:
        self.clear("")

    @property
    def ops(self) -> int:
        return self.objects.ops

    @property
    def bytes_read(self) -> int:
        return self.objects.bytes_read

    @property
    def seconds(self) -> float:
        return self.objects.seconds

    # -- inside -----------------------------------------------------------------------------------------------------

    def _offer(self, name: str, data: bytes) -> bool:
        try:
            self.objects.put(name, data, new=True)
            return True
        except faults.Denied:
            raise
        except (faults.Exists, faults.Passing):  # it may have been done all the same, by another or by this very put
            return False

    def _fetch(self, name: str, size: int, known: str) -> None:
        def blocks() -> Iterator[bytes]:
            reader = HashedReader(self.open(name), size, known)
            while block := reader.read(_BLOCK):
                yield block
            compare(name, reader.finish(), (size, known))

        self.copies.keep(name, blocks(), size)


class Pieces:
    """A file that grows, in a bucket: NAME/000001 and so on; the last piece is replaced until it is full."""

    def __init__(self, store: Bucket, name: str) -> None:
        self._store, self._name, self._last = store, name, b""
        there = [int(each) for each in store.names(name) if each.isdigit()]
        self._number = max(there, default=0) + 1

    def write(self, data: bytes) -> None:
        piece = self._last + data
        self._store.objects.put(f"{self._name}/{self._number:06d}", piece)
        self._last = piece
        if len(piece) >= _FULL:
            self._number, self._last = self._number + 1, b""

    def close(self) -> None:
        """All of it is there."""


class ShippedLog:
    """A file of this machine of which the bucket has a copy, some seconds later."""

    def __init__(self, path: Path, pieces: Pieces, every: float) -> None:
        self.file, self._pieces, self._every = path.open("a+b", 0), pieces, every
        self._at, self._ending = self.file.tell(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(self._every)
        self.file.close()

    def _run(self) -> None:
        while not self._ending.wait(self._every):
            self._ship()
        self._ship()

    def _ship(self) -> None:
        with contextlib.suppress(faults.Fault, OSError):
            while new := os.pread(self.file.fileno(), _FULL, self._at):
                self._pieces.write(new)
                self._at += len(new)


class ObjectReader:
    """An object that is read from its beginning, piece by piece."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._piece, self._at = pieces, memoryview(next(pieces, b"")), 0

    def readinto(self, room: memoryview) -> int:
        """Fills it, but at the end of the object."""
        done = 0
        while done < len(room):
            if self._at == len(self._piece):
                self._piece, self._at = memoryview(next(self._pieces, b"")), 0
                if not self._piece:
                    break
            part = self._piece[self._at : self._at + len(room) - done]
            room[done : done + len(part)] = part
            self._at, done = self._at + len(part), done + len(part)
        return done

    def close(self) -> None:
        self._piece = memoryview(b"")
        if close := getattr(self._pieces, "close", None):
            close()


class Doubled:
    """Written to the bucket and to this machine's own disk, where it can be read before it is complete."""

    def __init__(self, writer: WritableFile, copy: Path) -> None:
        self._writer, self._copy = writer, copy.open("wb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        self._copy.write(data)
        self._writer.write(data)

    def flush(self) -> None:
        self._writer.flush()

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._copy.close()
        self._writer.close()


def _of(path: Path, like: str) -> tuple[int, str]:
    """Of a copy, if there is one: its size and its checksum."""
    seen = checksum(like)
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                seen.update(block)
            return path.stat().st_size, seen.hexdigest()
    except OSError:
        return -1, ""

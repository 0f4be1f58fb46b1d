"""A run on a shared disk: registers are made by `link()`, news by `rename()`, and what must stay is synced."""

import builtins
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from posixpath import basename, dirname

from fleet import faults
from fleet.disk import Disk, FileReader, FileWriter
from fleet.host import Host
from fleet.store import REGISTER_LIMIT, SETTLE, FileEnd, Log, Store, Value, compare, proven


class DiskStore(Store):
    """Registers and news in one run's folder, for one process."""

    def __init__(self, disk: Disk, host: Host, name: str) -> None:
        super().__init__(disk.root, host, name)
        self.disk = disk

    # -- registers --------------------------------------------------------------------------------------------------

    def settle(self, name: str, value: Value, durable: bool = True) -> Value:
        with self._draft(proven(value, name)[0], durable) as draft:
            for pause in SETTLE:
                try:
                    won = self._offer(draft, name)
                    if won and not durable:
                        return value
                    if durable:
                        self.disk.sync(dirname(name))
                    return self.read(name)  # whatever the link's reply was, what stands there is the outcome
                except faults.Denied:  # may last for minutes: whoever called says so, and asks again
                    raise
                except (faults.Missing, faults.Passing):
                    self.host.sleep(pause)
                    with contextlib.suppress(faults.Passing):
                        self.names(dirname(name))  # wakes a name cache that still says "not there"
                        if basename(draft) not in self.names("tmp"):
                            break  # lost in a crash of the server, or swept while this process was paused
        raise faults.Passing(f"{name}: the disk does not show what stands there")

    def confirmed(self, name: str) -> Value:
        value = self.read(name)
        while True:
            self.patiently(lambda: self.disk.sync(dirname(name)))
            if (again := self.read(name)) == value:
                return value
            value = again

    def sync(self, folder: str) -> None:
        self.patiently(lambda: self.disk.sync(folder))

    def folder(self, name: str) -> None:
        with contextlib.suppress(faults.Exists):
            self.disk.mkdir(name)
        self.sync(dirname(name))
        self.sync(name)  # refuses a link in its place, through which we would write elsewhere

    def expect(self, folder: str) -> None:
        self.patiently(lambda: self.disk.list(folder))

    def prove(self) -> None:
        second = self._private()
        try:
            with self._draft(b"", sync=False) as first:
                self.disk.link(first, second)
            self.replace(second, b"", sync=False)
        except (faults.Denied, faults.Exists) as fault:
            why = "this process may not write there, or the disk knows no hard links, or no renames that replace"
            raise faults.Unfit(f"{fault}: {why}") from None
        except (faults.Full, faults.Passing, faults.Missing):  # the loop waits for these
            pass
        finally:
            self._remove(second)

    def replace(self, name: str, data: bytes, sync: bool = True) -> None:
        draft = self._private()
        try:
            self.disk.write(draft, data, sync)
            self.disk.rename(draft, name)
        except faults.Fault:
            self._remove(draft)
            raise

    # -- files ------------------------------------------------------------------------------------------------------

    def append(self, name: str) -> "DiskAppender":
        return DiskAppender(self, name)

    def log(self, name: str) -> Log:
        path = self.root / name
        file = builtins.open(path, "a+b", 0, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o640))
        return Log(file, str(path), file.close)

    def home(self) -> Path:
        return self.root

    def share(self) -> None:
        """They lie there."""

    def copy_of(self, name: str) -> Path:
        return self.root / name

    def tail(self, name: str, after: int = 0, most: int = 1 << 30) -> FileEnd:
        return self.disk.tail(name, after, most)

    def put_away(self, old: str, new: str) -> None:
        self.disk.rename(old, new)

    def load(self, name: str, limit: int) -> bytes:
        return self.disk.read(name, limit)

    def listing(self, folder: str) -> list[str]:
        return self.disk.list(folder)

    def everything(self) -> list[tuple[str, int]]:
        found = []
        for folder, _, files in os.walk(self.root):
            for path in (Path(folder, file) for file in files):
                if path.is_file() and not path.is_symlink():
                    found.append((str(path.relative_to(self.root)), path.stat().st_size))
        return sorted(found)

    def state(self, name: str) -> tuple[int, ...]:
        return self.disk.stamp(name)

    def open(self, name: str) -> FileReader:
        return self.disk.open(name)

    def blocks(self, name: str) -> Iterator[bytes]:
        return self.disk.blocks(name)

    def create(self, name: str, again: bool = False) -> FileWriter:
        return self.disk.create(name)

    def written_so_far(self, name: str) -> Iterator[bytes]:
        return self.disk.blocks(name)

    def local(self, name: str, size: int, known: str) -> Path:
        self.verify(name, lambda: compare(name, self.hash_of(name, known), (size, known)))
        return self.disk.path(name)

    def begin(self, folder: str) -> None:
        self.disk.mkdir(folder)

    def local_folder(self, folder: str) -> Path:
        return self.disk.path(folder)

    def local_files(self, folder: str) -> list[str]:
        return self.names(folder)

    def adopt(self, name: str) -> tuple[int, str]:
        with contextlib.closing(self.disk.append(name)) as file:
            file.sync()
        return self.hash_of(name)

    def holds(self, path: object) -> bool:
        return self.disk.holds(path)

    def forget(self, name: str) -> None:
        self.patiently(lambda: self.disk.forget(name))

    def remove(self, name: str) -> None:
        self.disk.remove(name)

    def clear(self, folder: str) -> None:
        for name in self.disk.list(folder):
            with contextlib.suppress(faults.Missing):
                self.disk.remove(f"{folder}/{name}")
        self.disk.rmdir(folder)

    def borrow(self, other: Store, name: str) -> bool:
        if not isinstance(other, DiskStore):
            return False
        try:
            os.link(other.root / name, self.root / name, follow_symlinks=False)
            return True
        except FileNotFoundError:
            raise faults.Missing(name) from None
        except OSError:  # another disk, or one that links no file of somebody else
            return False

    def dissolve(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def ops(self) -> int:
        return self.disk.ops

    @property
    def bytes_read(self) -> int:
        return self.disk.bytes_read

    @property
    def seconds(self) -> float:
        return self.disk.seconds

    # -- inside -----------------------------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Where the root's handle does not answer, and another is to be had at its path that holds this very run, go on
        there: the disk was mounted anew."""
        with contextlib.suppress(faults.Fault):
            if self.run_id and not self._answers():
                anew = DiskStore(self.disk.reopen(), self.host, self.name)
                if anew.read("run.json").get("id") == self.run_id:
                    self.disk = anew.disk

    def _answers(self) -> bool:
        with contextlib.suppress(faults.Fault):
            return bool(self.disk.read("run.json", REGISTER_LIMIT))  # what a file is may be known without asking
        return False

    def _offer(self, draft: str, name: str) -> bool:
        """link() never replaces a name, and has one winner on every shared disk that was measured."""
        try:
            self.disk.link(draft, name)
            return True
        except faults.Denied:  # some disks say so to the loser of a race
            if not self._stands(name):
                raise
        except (faults.Exists, faults.Passing):
            pass
        except faults.Missing:
            self.folder(dirname(name))
            raise
        return False

    def _stands(self, name: str) -> bool:
        with contextlib.suppress(faults.Missing):
            return bool(self.read(name))
        return False

    @contextlib.contextmanager
    def _draft(self, data: bytes, sync: bool) -> Iterator[str]:
        name = self._private()
        try:
            self.disk.write(name, data, sync)
            yield name
        finally:
            self._remove(name)

    def _private(self) -> str:
        return f"tmp/{self.name}.{self.host.token()}"

    def _remove(self, name: str) -> None:
        with contextlib.suppress(faults.Fault):
            self.disk.remove(name)


class DiskAppender:
    """Opened anew where the store has found the disk mounted anew: a dead mount may take what is written, and lose
    it."""

    def __init__(self, store: DiskStore, name: str) -> None:
        self._store, self._name, self._disk = store, name, store.disk
        self._file = store.disk.append(name)

    def write(self, data: bytes) -> None:
        if self._disk is not self._store.disk:
            with contextlib.suppress(faults.Fault):
                self.close()
            self._disk = self._store.disk
            self._file = self._disk.append(self._name)
        self._file.write(data)

    def close(self) -> None:
        self._file.close()

"""One folder of the shared disk through the few system calls that the protocol needs, each failing by name.

Everything goes through a handle of the root folder that is opened once: when the mount goes away, the handle
still means the old disk, so nothing can ever be written into the empty mount point that is left behind.
"""

import contextlib
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fleet import faults
from fleet.store import FileEnd

T = TypeVar("T")

_FILE, _FOLDER = 0o640, 0o750  # at most: the process's mask decides whether the group may read
_SMALL, _BLOCK = 1 << 12, 1 << 22
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not hold us up


class Disk:
    """The verbs; names are relative to the root, written with '/'."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops = self.bytes_read = 0  # calls and bytes on the shared disk, for the event log and the benchmarks
        self.seconds = 0.0  # that its first user has waited for it; what others do beside the work delays nobody
        self._user = threading.get_ident()
        self._handle = self.call(str(root), os.open, root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _closing(self, self._handle)

    def reopen(self) -> "Disk":
        """A second look at the root's path: another disk may be mounted there by now."""
        return Disk(self.root)

    def read(self, name: str, limit: int) -> bytes:
        """A whole small file; one byte more than the limit shows that there is more."""
        with self._file(name) as handle:
            parts, room = list[bytes](), limit + 1
            while room and (part := self.call(name, os.read, handle, min(_BLOCK, room))):
                parts.append(part)
                self.bytes_read += len(part)
                room -= len(part)
                if len(part) < _SMALL:  # most registers are smaller than this: no call just to see the end
                    break
            return b"".join(parts)

    def open(self, name: str) -> "FileReader":
        return FileReader(self._opened(name, _LOOK), name, self)

    def blocks(self, name: str) -> Iterator[bytes]:
        """A large file, block by block."""
        with self._file(name) as handle:
            while part := self.call(name, os.read, handle, _BLOCK):
                self.bytes_read += len(part)
                yield part

    def path(self, name: str) -> Path:
        """For libraries that want a path. It leads through the handle, and so never into a bare mount point."""
        here = Path(f"/proc/{os.getpid()}/fd/{self._handle}")
        return (here if here.exists() else self.root) / name

    def holds(self, path: object) -> bool:
        """Whether a path that a library was given, and names in its error, is one of this folder's."""
        return isinstance(path, str) and Path(path).is_relative_to(self.path(""))

    def forget(self, name: str) -> None:
        """Ask the kernel to drop its cached pages of a file, so that the next read comes from the disk."""
        with self._file(name) as handle:
            self.call(name, os.posix_fadvise, handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def stamp(self, name: str) -> tuple[int, ...]:
        """Which file a name means, and its state: only to be compared with an earlier answer to the same process."""
        found = self.call(name, os.stat, name, dir_fd=self._handle, follow_symlinks=False)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def list(self, folder: str) -> list[str]:
        """In no order. Always through a fresh handle: on NFS that is what shows new names."""
        with self._file(folder or ".", os.O_DIRECTORY) as handle:
            return self.call(folder, os.listdir, handle)

    def create(self, name: str) -> "FileWriter":
        return FileWriter(self._opened(name, _NEW), name, self)

    def write(self, name: str, data: bytes, sync: bool) -> None:
        """A new private file, whole."""
        with contextlib.closing(self.create(name)) as file:
            file.write(data)
            if sync:
                file.sync()

    def append(self, name: str) -> "FileWriter":
        """A file that only this process writes, at its end."""
        return FileWriter(self._opened(name, _MORE), name, self)

    def tail(self, name: str, after: int, most: int) -> FileEnd:
        """Of a plain file, what comes after so many bytes, but no more than the last ones."""
        with self._file(name) as handle:
            seen = self.call(name, os.fstat, handle)
            if not stat.S_ISREG(seen.st_mode):
                raise faults.Refused(f"{name}: not a plain file")
            begin = max(after if after <= seen.st_size else 0, seen.st_size - most)
            data = self.call(name, os.pread, handle, seen.st_size - begin, begin)
            return FileEnd(data, begin, seen.st_size, seen.st_mtime)

    def link(self, old: str, new: str) -> None:
        self.call(new, os.link, old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle, follow_symlinks=False)

    def rename(self, old: str, new: str) -> None:
        self.call(new, os.rename, old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        self.call(name, os.unlink, name, dir_fd=self._handle)

    def mkdir(self, folder: str) -> None:
        self.call(folder, os.mkdir, folder, _FOLDER, dir_fd=self._handle)

    def rmdir(self, folder: str) -> None:
        self.call(folder, os.rmdir, folder, dir_fd=self._handle)

    def sync(self, folder: str) -> None:
        """Make the names in a folder survive a crash of whoever serves the disk."""
        with self._file(folder or ".", os.O_DIRECTORY) as handle:
            self.call(folder, os.fsync, handle)

    def _opened(self, name: str, flags: int) -> int:
        return self.call(name, os.open, name, flags, _FILE, dir_fd=self._handle)

    @contextlib.contextmanager
    def _file(self, name: str, more: int = 0) -> Iterator[int]:
        handle = self._opened(name, _LOOK | more)
        try:
            yield handle
        finally:
            self.call(name, os.close, handle)

    def call(self, name: str, call: Callable[..., T], *args: Any, **settings: Any) -> T:
        """Counted; what the system refuses becomes a fault that says where."""
        self.ops += 1
        began = time.perf_counter()
        try:
            return call(*args, **settings)
        except OSError as error:
            raise faults.named(error, name) from error
        finally:
            if threading.get_ident() == self._user:
                self.seconds += time.perf_counter() - began


def _closing(owner: object, handle: int) -> "weakref.finalize[..., Any]":
    """Closes a handle, at the latest when nobody has its owner any more; when the process ends, the system does."""
    release = weakref.finalize(owner, os.close, handle)
    release.atexit = False  # a thread may still write
    return release


class FileWriter:
    """A private file while it is being written: all of what is given, however little the disk takes at a time."""

    def __init__(self, handle: int, name: str, disk: Disk) -> None:
        self._handle, self._name, self._disk = handle, name, disk
        self._release = _closing(self, handle)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._disk.call(self._name, os.write, self._handle, rest) :]

    def sync(self) -> None:
        self._disk.call(self._name, os.fsync, self._handle)

    flush = sync  # on the side

    def close(self) -> None:
        if self._release.detach():
            handle, self._handle = self._handle, -1
            self._disk.call(self._name, os.close, handle)  # a network disk may report here what it could not write


class FileReader:
    """A file that is read from its beginning, piece by piece."""

    def __init__(self, handle: int, name: str, disk: Disk) -> None:
        self._handle, self._name, self._disk = handle, name, disk

    def readinto(self, room: memoryview) -> int:
        """Fills it, but at the end of the file."""
        done = 0
        while done < len(room) and (count := self._disk.call(self._name, os.readv, self._handle, [room[done:]])):
            done += count
        self._disk.bytes_read += done
        return done

    def close(self) -> None:
        os.close(self._handle)

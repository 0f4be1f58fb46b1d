"""One folder of the shared disk through the few system calls that the protocol needs, each failing by name.

Everything goes through a handle of the root folder that is opened once: when the mount goes away, the handle
still means the old disk, so nothing can ever be written into the empty mount point that is left behind.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fleet import faults

T = TypeVar("T")

_FILE, _FOLDER = 0o640, 0o750  # at most: the process's mask decides whether the group may read
_SMALL, _BLOCK = 1 << 12, 1 << 22
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not hold us up


class Writer(Protocol):
    """A private file while it is being written."""

    def write(self, data: bytes | memoryview) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Reader(Protocol):
    """A file that is read from its beginning, piece by piece."""

    def readinto(self, room: memoryview) -> int: ...
    def close(self) -> None: ...


class Disk:
    """The verbs; names are relative to the root, written with '/'."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops = self.bytes_read = 0  # calls and bytes on the shared disk, for the event log and the benchmarks
        self._handle = self._open_root()
        _closing(self, self._handle)

    def reopen(self) -> "Disk":
        """A second look at the root's path: another disk may be mounted there by now."""
        return Disk(self.root)

    def read(self, name: str, limit: int) -> bytes:
        """A whole small file; one byte more than the limit shows that there is more."""
        with _Naming(name):  # not _file(): a long run has a hundred thousand registers
            handle = self._counted(os.open, name, _LOOK, dir_fd=self._handle)
            try:
                parts, room = list[bytes](), limit + 1
                while room and (part := self._counted(os.read, handle, min(_BLOCK, room))):
                    parts.append(part)
                    self.bytes_read += len(part)
                    room -= len(part)
                    if len(part) < _SMALL:  # most registers are smaller than this: no call just to see the end
                        break
                return b"".join(parts)
            finally:
                self._counted(os.close, handle)

    def open(self, name: str) -> "FileReader":
        with _Naming(name):
            return FileReader(self._counted(os.open, name, _LOOK, dir_fd=self._handle), name, self)

    def blocks(self, name: str) -> Iterator[bytes]:
        """A large file, block by block."""
        with self._file(name) as handle:
            while part := self._counted(os.read, handle, _BLOCK):
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
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def stamp(self, name: str) -> tuple[int, ...]:
        """Which file a name means, and its state: only to be compared with an earlier answer to the same process."""
        with _Naming(name):
            found = self._counted(os.stat, name, dir_fd=self._handle, follow_symlinks=False)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def list(self, folder: str) -> list[str]:
        """In no order. Always through a fresh handle: on NFS that is what shows new names."""
        with self._folder(folder) as handle, _Naming(folder):
            return self._counted(os.listdir, handle)

    def create(self, name: str) -> "FileWriter":
        with _Naming(name):
            return FileWriter(self._counted(os.open, name, _NEW, _FILE, dir_fd=self._handle), name, self)

    def write(self, name: str, data: bytes, sync: bool) -> None:
        """A new private file, whole."""
        with contextlib.closing(self.create(name)) as file:
            file.write(data)
            if sync:
                file.sync()

    def append(self, name: str) -> "FileWriter":
        """A file that only this process writes, at its end."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with _Naming(name):
            return FileWriter(self._counted(os.open, name, flags, _FILE, dir_fd=self._handle), name, self)

    def link(self, old: str, new: str) -> None:
        with _Naming(new):
            self._counted(os.link, old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle, follow_symlinks=False)

    def rename(self, old: str, new: str) -> None:
        with _Naming(new):
            self._counted(os.rename, old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        with _Naming(name):
            self._counted(os.unlink, name, dir_fd=self._handle)

    def mkdir(self, folder: str) -> None:
        with _Naming(folder):
            self._counted(os.mkdir, folder, _FOLDER, dir_fd=self._handle)

    def rmdir(self, folder: str) -> None:
        with _Naming(folder):
            self._counted(os.rmdir, folder, dir_fd=self._handle)

    def sync(self, folder: str) -> None:
        """Make the names in a folder survive a crash of whoever serves the disk."""
        with self._folder(folder) as handle, _Naming(folder):
            self._counted(os.fsync, handle)

    def _open_root(self) -> int:
        with _Naming(str(self.root)):
            return os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[int]:
        with _Naming(name):
            handle = self._counted(os.open, name, _LOOK, dir_fd=self._handle)
            try:
                yield handle
            finally:
                self._counted(os.close, handle)

    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        with _Naming(name):
            handle = self._counted(os.open, name or ".", _LOOK | os.O_DIRECTORY, dir_fd=self._handle)
        try:
            yield handle
        finally:
            self._counted(os.close, handle)

    def _counted(self, call: Callable[..., T], *args: Any, **settings: Any) -> T:
        self.ops += 1
        return call(*args, **settings)


def _closing(owner: object, handle: int) -> "weakref.finalize[..., Any]":
    """Closes a handle, at the latest when nobody has its owner any more; when the process ends, the system does."""
    release = weakref.finalize(owner, os.close, handle)
    release.atexit = False  # a thread may still write
    return release


class _Naming:
    """What the system refuses becomes a fault that says where."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise faults.named(error, self._name) from error


class FileWriter:
    """Writes all of what it is given, however little the disk takes at a time."""

    def __init__(self, handle: int, name: str, disk: Disk) -> None:
        self._handle, self._name, self._disk = handle, name, disk
        self._release = _closing(self, handle)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self._do(os.write, rest) :]

    def sync(self) -> None:
        self._do(os.fsync)

    def close(self) -> None:
        if self._release.detach():
            handle, self._handle = self._handle, -1
            self._disk.ops += 1
            with _Naming(self._name):
                os.close(handle)  # a network disk may report here what it could not write

    def _do(self, call: Callable[..., T], *args: Any) -> T:
        self._disk.ops += 1
        with _Naming(self._name):
            return call(self._handle, *args)


class FileReader:
    def __init__(self, handle: int, name: str, disk: Disk) -> None:
        self._handle, self._name, self._disk = handle, name, disk

    def readinto(self, room: memoryview) -> int:
        """Fills it, but at the end of the file."""
        done = 0
        while done < len(room) and (count := self._some(room[done:])):
            done += count
        self._disk.bytes_read += done
        return done

    def close(self) -> None:
        os.close(self._handle)

    def _some(self, room: memoryview) -> int:
        self._disk.ops += 1
        with _Naming(self._name):
            return os.readv(self._handle, [room])

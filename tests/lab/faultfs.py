"""A shared disk as one machine sees it, with misfortunes: `python -m tests.lab.faultfs BACKING MOUNT CONTROL`."""

import contextlib
import errno
import fnmatch
import functools
import os
import resource
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mfusepy

from tests.lab.luck import Luck

WRITTEN_ONCE = "*/files/*"  # only these can be mapped into memory, which needs the kernel's cache
STAT = "mode nlink uid gid size ino blocks".split()
TIMES = "atime mtime ctime".split()
ROOM = "bavail bfree blocks bsize favail ffree files frsize namemax".split()

Entry = tuple[str, dict[str, int], int]


def unlucky(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that the rules may meet."""

    @functools.wraps(call)
    def met(self: "FaultFS", path: str, *arguments: Any) -> Any:
        struck = self.luck.look().strikes(call.__name__, path)
        time.sleep(sum(rule.delay for rule in struck))
        if early := [rule.error for rule in struck if rule.error and not rule.done]:
            raise OSError(getattr(errno, early[0]), early[0])
        if short := [rule.short for rule in struck if rule.short and call.__name__ == "write"]:
            arguments = (arguments[0][: min(short)], *arguments[1:])
        result = call(self, path, *arguments)
        if late := [rule.error for rule in struck if rule.error and rule.done]:
            raise OSError(getattr(errno, late[0]), late[0])
        return result

    return met


@dataclass
class Known:
    """What this machine believes of a name or of a folder's names."""

    since: float
    what: Any  # attributes, an OSError, or names
    handle: int = -1  # of the file as it was

    def holds(self, seconds: float) -> bool:
        return seconds < 0 or time.monotonic() - self.since < seconds

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


class FaultFS(mfusepy.Operations):
    use_ns = True

    def __init__(self, backing: Path, luck: Luck) -> None:
        self._backing, self.luck = str(backing), luck
        self._files: dict[str, Known] = {}
        self._lists: dict[str, Known] = {}
        self._lock = threading.RLock()

    def _at(self, path: str) -> str:
        return self._backing + path

    # -- what it believes ---------------------------------------------------------------------------------------------

    def _look(self, path: str) -> Known:
        with self._lock:
            known = self._files.pop(path, None)
            if not (known and known.holds(self._patience(known))):
                known = self._seen(path)
            if self._patience(known):
                self._files[path] = known
            return known

    def _patience(self, known: Known) -> float:
        return self.luck.absent if isinstance(known.what, OSError) else self.luck.stale

    def _seen(self, path: str) -> Known:
        handle = -1
        try:
            found = _attributes(os.lstat(self._at(path)))
            if self.luck.stale and stat.S_ISREG(found["st_mode"]):
                handle = os.open(self._at(path), os.O_RDONLY)
        except OSError as error:
            return Known(time.monotonic(), error)
        return Known(time.monotonic(), found, handle)

    def _list(self, path: str) -> list[Entry]:
        with self._lock:
            known = self._lists.pop(path, None)
            if not (known and known.holds(self.luck.listing)):
                with os.scandir(self._at(path)) as found:
                    known = Known(time.monotonic(), [(each.name, {"st_ino": each.inode()}, 0) for each in found])
                for each in (f"{path.rstrip('/')}/{name}" for name, _, _ in known.what):
                    if each in self._files and isinstance(self._files[each].what, OSError):
                        del self._files[each]
            if self.luck.listing:
                self._lists[path] = known
            return known.what

    @contextlib.contextmanager
    def _changing(self, *paths: str, names: bool = True) -> Iterator[None]:
        """What it changes itself it knows afterwards."""
        try:
            yield
        finally:
            with self._lock:
                for path in paths:
                    for known in [each for each in self._files if each == path or each.startswith(f"{path}/")]:
                        del self._files[known]
                    if names:
                        self._files.pop(os.path.dirname(path), None)
                        self._lists.pop(os.path.dirname(path), None)

    # -- names --------------------------------------------------------------------------------------------------------

    @unlucky
    def getattr(self, path: str, fi: Any = None) -> dict[str, int]:
        found = _attributes(os.fstat(fi.fh)) if fi else self._look(path).what
        if isinstance(found, OSError):
            raise OSError(found.errno, found.strerror)
        return found

    @unlucky
    def opendir(self, path: str) -> int:
        return os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)

    @unlucky
    def readdir(self, path: str, handle: int) -> list[Entry]:
        return self._list(path)

    @unlucky
    def fsyncdir(self, path: str, datasync: int, handle: int) -> None:
        os.fsync(handle)

    def releasedir(self, path: str, handle: int) -> None:
        os.close(handle)

    @unlucky
    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    @unlucky
    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {f"f_{name}": getattr(found, f"f_{name}") for name in ROOM}

    @unlucky
    def link(self, new: str, old: str) -> None:
        with self._changing(new, old):
            os.link(self._at(old), self._at(new), follow_symlinks=False)

    @unlucky
    def rename(self, old: str, new: str) -> None:
        with self._changing(old, new):
            os.rename(self._at(old), self._at(new))

    # -- files --------------------------------------------------------------------------------------------------------

    @unlucky
    def open(self, path: str, fi: Any) -> None:
        known = self._look(path)
        if isinstance(known.what, OSError):
            raise OSError(known.what.errno, known.what.strerror)
        reads = not fi.flags & (os.O_WRONLY | os.O_RDWR)
        old = f"/proc/self/fd/{known.handle}" if reads and known.handle >= 0 else ""
        self._open(path, old or self._at(path), fi)
        fi.direct_io = not (reads and fnmatch.fnmatchcase(path, WRITTEN_ONCE))

    @unlucky
    def create(self, path: str, mode: int, fi: Any) -> None:
        self._open(path, self._at(path), fi, mode)

    def _open(self, path: str, place: str, fi: Any, mode: int = 0) -> None:
        new, emptied = fi.flags & os.O_CREAT, fi.flags & os.O_TRUNC
        with self._changing(*([path] if new or emptied else []), names=bool(new)):
            fi.fh = os.open(place, fi.flags & ~os.O_NOFOLLOW, mode)
            fi.direct_io = True

    @unlucky
    def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
        return os.pread(fi.fh, size, offset)

    @unlucky
    def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
        with self._changing(path, names=False):
            return os.pwrite(fi.fh, data, offset)

    @unlucky
    def truncate(self, path: str, length: int, fi: Any = None) -> None:
        with self._changing(path, names=False):
            os.truncate(fi.fh if fi else self._at(path), length)

    @unlucky
    def flush(self, path: str, fi: Any) -> None:
        """A process closes it."""

    @unlucky
    def fsync(self, path: str, datasync: int, fi: Any) -> None:
        os.fsync(fi.fh)

    def release(self, path: str, fi: Any) -> None:
        os.close(fi.fh)


def _change(name: str, call: Callable[..., None]) -> Callable[..., Any]:
    def change(self: FaultFS, path: str, *arguments: Any) -> None:
        with self._changing(path):
            call(self._at(path), *arguments)

    change.__name__ = name
    return unlucky(change)


CHANGES: dict[str, Callable[..., None]] = {
    "unlink": os.unlink,
    "mkdir": os.mkdir,
    "rmdir": os.rmdir,
    "chmod": lambda path, mode, fi=None: os.chmod(path, mode),
    "chown": lambda path, user, group, fi=None: os.lchown(path, user, group),
    "utimens": lambda path, times=None: os.utime(path, ns=times, follow_symlinks=False),
    "symlink": lambda path, goal: os.symlink(goal, path),
}
for each in CHANGES:
    setattr(FaultFS, each, _change(each, CHANGES[each]))


def _attributes(found: os.stat_result) -> dict[str, int]:
    fields = {f"st_{name}": getattr(found, f"st_{name}") for name in STAT}
    return fields | {f"st_{name}": getattr(found, f"st_{name}_ns") for name in TIMES}


if __name__ == "__main__":
    backing, mount, control = (Path(argument).absolute() for argument in sys.argv[1:])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    mfusepy.FUSE(
        FaultFS(backing, Luck(control)), str(mount), raw_fi=True, fsname="faultfs", allow_other=True, use_ino=True,
        attr_timeout=0, entry_timeout=0, negative_timeout=0,
    )  # fmt: skip

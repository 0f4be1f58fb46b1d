"""A folder for what is large and passing, outside of any run. Whoever makes one holds it, and the system lets go of it
when the process ends, however it ends: so the next who needs one knows whose maker is dead, and removes that."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fleet import faults
from fleet.errors import Lacking, cause_chain

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def scratch(kind: str, where: Path | None = None) -> Iterator[Path]:
    """A fresh folder, by default where temporary files go; of its kind, those that nobody holds are removed."""
    base, prefix = where or Path(tempfile.gettempdir()), f"{kind}-{os.uname().nodename}-{os.getuid()}-"
    sweep(base, prefix)
    place, handle = _made(base, prefix)
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(handle)


@contextlib.contextmanager
def passing(kind: str, where: Path | None = None) -> Iterator[Path]:
    """One for a moment in the making of a member: where its disk is full, another machine may have room."""
    try:
        with scratch(kind, where) as place:
            yield place
    except faults.Fault:
        raise  # of the shared disk
    except Exception as error:
        full = (errno.ENOSPC, errno.EDQUOT)
        if not any(isinstance(each, OSError) and each.errno in full for each in cause_chain(error)):
            raise
        raise Lacking(f"{where or tempfile.gettempdir()}: no room for files that are needed for a moment") from error


def sweep(base: Path, prefix: str) -> None:
    """What cannot be held, or on a disk that knows no locks, is left alone."""
    for left in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), alone(left):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def alone(place: Path) -> Iterator[None]:
    """Only where nobody holds it."""
    handle = os.open(place, FOLDER)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _made(base: Path, prefix: str) -> tuple[Path, int]:
    """Made and held; once more where another has swept it away in between."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(place, FOLDER)
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place.exists():
                return place, handle
            os.close(handle)

"""Copies of a bucket's files on this machine's own disk, for whoever needs a path; shared by all its workers.

Each copy lies whole under its name or not at all, since it is made under another one. Who uses an attempt's copies
holds its folder, and the system lets go of it when the process ends; what nobody holds goes when room is needed, the
longest unused first. FLEET_CACHE says where they lie, FLEET_CACHE_GB how much they may take.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from fleet.errors import Lacking, UserError, from_home
from fleet.scratch import FOLDER, alone

_GB, _DEFAULT = 1 << 30, "50"
_HELD = 64  # attempts whose copies a process holds


class LocalCopies:
    def __init__(self, run: str) -> None:
        """Of one run, by its address: others' copies lie beside them, and count."""
        self.base = _base()
        self.place = self.base / hashlib.sha256(run.encode()).hexdigest()[:16]
        self._held = dict[str, int]()  # folders, and their handles

    def path(self, name: str) -> Path:
        """Where the copy of a file of a folder is, or would be. The folder is held from now on."""
        folder, _, file = name.rpartition("/")
        return self.hold(folder) / file

    def hold(self, folder: str) -> Path:
        place = self.place / folder
        if folder not in self._held:
            self._held[folder] = self._taken(place)
            while len(self._held) > _HELD:
                os.close(self._held.pop(next(iter(self._held))))
        os.utime(place)  # used just now
        return place

    def keep(self, name: str, blocks: Iterable[bytes], size: int) -> None:
        """A new copy, once all of it is there; whoever made it at the same time made the same."""
        there = self.path(name)
        self.make_room(size)
        handle, draft = tempfile.mkstemp(prefix=f".{there.name}.", dir=there.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.writelines(blocks)
            os.replace(draft, there)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            if isinstance(error, OSError):
                raise Lacking(
                    f"{self.base}: no room for a copy of {name}: {error.strerror}; see FLEET_CACHE"
                ) from error
            raise

    def drop(self, folder: str) -> None:
        if (handle := self._held.pop(folder, None)) is not None:
            os.close(handle)
        shutil.rmtree(self.place / folder, ignore_errors=True)

    def make_room(self, size: int) -> None:
        """For so many bytes more, as far as that is possible without taking from anybody what is used."""
        limit, found = _limit(), [*self._folders()]
        taken = size + sum(each for _, each, _ in found)
        for _, its, place in sorted(found):
            if taken <= limit:
                return
            with contextlib.suppress(OSError), alone(place):
                shutil.rmtree(place, ignore_errors=True)
                taken -= its

    def _folders(self) -> Iterator[tuple[float, int, Path]]:
        """Of all attempts, whoever's: when one was used last, and how much it takes."""
        for place in self.base.glob("*/files/*"):
            with contextlib.suppress(OSError):
                yield place.stat().st_mtime, sum(file.stat().st_size for file in place.iterdir()), place

    def _taken(self, place: Path) -> int:
        """Held beside others; made anew where somebody has just removed it."""
        while True:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(place, FOLDER)
                fcntl.flock(handle, fcntl.LOCK_SH)
                if place.is_dir():
                    return handle
                os.close(handle)


def _base() -> Path:
    if named := os.environ.get("FLEET_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or from_home("~/.cache"), "fleet")


def _limit() -> int:
    try:
        return int(float(os.environ.get("FLEET_CACHE_GB") or _DEFAULT) * _GB)
    except ValueError:
        raise UserError(f"FLEET_CACHE_GB={os.environ['FLEET_CACHE_GB']!r}: a number of GB is expected") from None

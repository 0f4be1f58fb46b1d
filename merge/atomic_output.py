"""Results: a folder or one file, there as a whole or not at all."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fleet.errors import absolute
from fleet.fsync import sync
from fleet.plain import readable_bytes
from fleet.scratch import scratch
from merge.tensor_files import UserError


class Busy(UserError):
    """Somebody else is writing just this."""


class Taken(UserError):
    """Something is there, which nobody said is to be replaced."""


RECIPE = "mergekit_config.yml"  # the name by which others look for it


def free_for(out: Path, overwrite: bool, needed: Iterable[Path] = ()) -> Path:
    """Where the result goes, links followed; or why it may not: only a model's folder is ever replaced."""
    out = absolute(out)
    try:
        if out.exists():
            _check_replaceable(out, overwrite, (Path.cwd(), *needed))
    except OSError as error:
        raise UserError(f"{out}: cannot be used: {error.strerror}") from None
    return out


def _check_replaceable(out: Path, overwrite: bool, needed: Iterable[Path]) -> None:
    if not overwrite:
        raise Taken(f"{out} exists; --overwrite replaces it")
    known = any((out / name).is_file() for name in ("config.json", "adapter_config.json", RECIPE))
    if not out.is_dir() or (any(out.iterdir()) and not known):
        raise UserError(f"{out} is not the folder of a model; it is not replaced")
    if inside := next((path for path in needed if path.resolve().is_relative_to(out)), None):
        raise UserError(f"{out} is not replaced: {inside} is in it")


@contextmanager
def atomic_folder(out: Path, size: int, overwrite: bool, needed: Iterable[Path] = ()) -> Iterator[Path]:
    """A folder to fill, which becomes `out` at the end, and leaves nothing where it does not come to that."""
    out = free_for(out, overwrite, needed)
    parents = [each for each in out.parents if not each.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _drafted(out, size) as draft:
            yield draft
    except BaseException:
        with suppress(OSError):
            for each in parents:  # the innermost first
                each.rmdir()
        raise


@contextmanager
def _drafted(out: Path, size: int) -> Iterator[Path]:
    _check_room(out, size + (1 << 20))
    draft = out.parent / f".{out.name}.unfinished"
    with held(draft.with_suffix(".lock"), out):
        shutil.rmtree(draft, ignore_errors=True)  # of a merge that was killed
        draft.mkdir()
        try:
            yield draft
            for path in (*draft.rglob("*"), draft):
                sync(path)
            _replace(draft, out)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise


@contextmanager
def held(lock: Path, out: Path) -> Iterator[None]:
    """While this file is locked, nobody else writes there."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
                raise OSError  # the one who held it has removed it, and somebody else has a new one
        except OSError:
            raise Busy(f"another merge is writing {out} at this moment") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _replace(draft: Path, out: Path) -> None:
    old = out.parent / f".{out.name}.replaced"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    draft.rename(out)
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check_room(out: Path, size: int) -> None:
    if (free := shutil.disk_usage(out.parent).free) < size:
        room = f"{out.parent} has {readable_bytes(free)} of free space; the result needs {readable_bytes(size)}"
        raise UserError(room) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- one file ----------------------------------------------------------------------------------------------------------


def file_free_for(out: Path, overwrite: bool) -> Path:
    if out.is_dir():
        raise UserError(f"{out} is a folder; name the file to write, as {out / 'model.gguf'}")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} does not exist; make the folder first")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; --overwrite (overwrite=True) replaces it")
    return out


@contextmanager
def atomic_file(out: Path, size: int, overwrite: bool) -> Iterator[Path]:
    """A file to fill and sync, which becomes `out` at the end, and leaves nothing where it does not come to that."""
    try:
        with scratch(".unfinished", out.parent) as folder:
            _check_room(out, size)  # without what killed ones have left, which is gone now
            yield folder / out.name
            (folder / out.name).replace(file_free_for(out, overwrite))
        sync(out.parent)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from None

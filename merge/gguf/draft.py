"""A file that is there as a whole or not at all."""

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fleet.fsync import sync
from merge.files import UserError

_DRAFT = ".unfinished"


def free_for(out: Path, overwrite: bool) -> Path:
    if out.is_dir():
        raise UserError(f"{out} is a folder; name the file to write, as {out / 'model.gguf'}")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} does not exist; make the folder first")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; --overwrite (overwrite=True) replaces it")
    return out


@contextmanager
def whole(out: Path, size: int, overwrite: bool) -> Iterator[Path]:
    """A file to fill, which becomes `out` at the end, and leaves nothing where it does not come to that."""
    _remove_drafts(out)
    if (free := shutil.disk_usage(out.parent).free) < size:
        raise UserError(f"{out.parent} has {free / 1e9:.2f} GB of free space; the file needs {size / 1e9:.2f} GB")
    draft = None
    try:
        number, name = tempfile.mkstemp(_DRAFT, f".{out.name}.", out.parent)
        draft = Path(name)
        with os.fdopen(number) as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # while somebody writes it, nobody removes it
            yield draft
            draft.chmod(0o666 & ~_umask())
            free_for(out, overwrite)
            draft.replace(out)
        sync(out.parent)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from None
    finally:
        if draft:
            draft.unlink(missing_ok=True)


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _remove_drafts(out: Path) -> None:
    """Of exports that were killed."""
    for draft in out.parent.glob(f".{glob.escape(out.name)}.*{_DRAFT}"):
        with suppress(OSError), draft.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()

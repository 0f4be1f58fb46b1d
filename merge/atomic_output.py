"""Results: a folder of files that are laid out beforehand, or one file; there as a whole or not at all."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fleet.errors import absolute
from fleet.fsync import sync
from fleet.plain import bytes_of
from fleet.scratch import scratch
from merge.merge_planning import Job
from merge.tensor_files import Header, TensorEntry, UserError, write_header, write_json


class Busy(UserError):
    """Somebody else is writing just this."""


class Taken(UserError):
    """Something is there, which nobody said is to be replaced."""


RECIPE = "mergekit_config.yml"  # the name by which others look for it
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def size_of(text: str) -> int:
    """Bytes, as people write them: 5GB, 512MiB."""
    found = re.fullmatch(r"\s*([0-9]{0,15}\.?[0-9]{1,15})\s*([KMG]?I?)B?\s*", text.upper())
    if not found or found[2] not in _UNITS or (size := int(float(found[1]) * _UNITS[found[2]])) < 1:
        raise UserError(f"{text!r} is not a size; write 5GB or 512MiB")
    return size


TensorPlace = tuple[int, int]  # where a tensor's bytes go: the file's descriptor, and the first byte


@dataclass(frozen=True)
class WeightFile:
    """A file to write: its tensors by the names that they have in it."""

    name: str
    jobs: Mapping[str, Job]
    about: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})


def shards(jobs: Sequence[Job], most: int) -> list[WeightFile]:
    """Tensors in their order, in files of at most so many bytes; a larger tensor has a file to itself."""
    found: list[dict[str, Job]] = [{}]
    size = 0
    for job in jobs:
        if found[-1] and size + job.bytes > most:
            found.append({})
            size = 0
        found[-1][job.name] = job
        size += job.bytes
    return [WeightFile(name, part) for name, part in zip(_names(len(found)), found, strict=True)]


@contextmanager
def laid_out(folder: Path, files: Sequence[WeightFile]) -> Iterator[dict[str, TensorPlace]]:
    """The weight files, all headers written, all room reserved: each job's place; at the end they are synced."""
    places = dict[str, TensorPlace]()
    with ExitStack() as stack:
        for each in files:
            (folder / each.name).parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / each.name).open("w+b", buffering=0))
            entries = {name: TensorEntry(job.dtype, job.shape) for name, job in each.jobs.items()}
            write_header(file, Header(entries, each.about))
            begin = file.tell()
            for job in each.jobs.values():
                places[job.name] = (file.fileno(), begin)
                begin += job.bytes
            os.posix_fallocate(file.fileno(), 0, begin)
        yield places
        for descriptor in {file for file, _ in places.values()}:
            os.fsync(descriptor)


def write_index(folder: Path, files: Sequence[WeightFile]) -> None:
    """Where a model is in several files, which tensor is in which."""
    if len(files) > 1:
        weights = {name: each.name for each in files for name in each.jobs}
        about = {"total_size": sum(job.bytes for each in files for job in each.jobs.values())}
        write_json(folder / "model.safetensors.index.json", {"metadata": about, "weight_map": weights})


def _names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]


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
        room = f"{out.parent} has {bytes_of(free)} of free space; the result needs {bytes_of(size)}"
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

"""Weight files that are laid out before anything is computed: which tensors are in which file, and where in it."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from merge.json_files import write_json
from merge.merge_planning import TensorJob
from merge.tensor_files import Header, TensorEntry, UserError, write_header

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
    jobs: Mapping[str, TensorJob]
    about: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})


def shards(jobs: Sequence[TensorJob], most: int) -> list[WeightFile]:
    """Tensors in their order, in files of at most so many bytes; a larger tensor has a file to itself."""
    found: list[dict[str, TensorJob]] = [{}]
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

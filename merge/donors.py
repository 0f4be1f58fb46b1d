"""Models to merge: wherever they lie, as named tensors that are read row by row, and their configuration."""

import fnmatch
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merge import files
from merge.files import Wrong, read_json
from merge.group import Rows, in_memory

_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
_WEIGHTS = (("model*.safetensors", "adapter_model*.safetensors"), ("pytorch_model*.bin", "adapter_model*.bin"))


@dataclass(frozen=True)
class Stored:
    """A tensor that lies somewhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Rows

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        return self.rows(0, math.prod(self.shape[:-1])).reshape(self.shape)


@dataclass(frozen=True)
class Donor:
    """A model: its folder, its config.json, its weights."""

    reference: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @property
    def vocabulary_size(self) -> int:
        return int(self.config.get("vocab_size") or self.config.get("text_config", {}).get("vocab_size") or 0)


class Donors:
    """Opens models by their references; closes their files at the end."""

    def __init__(self) -> None:
        self.stack, self._open = ExitStack(), dict[str, Donor]()

    def __enter__(self) -> "Donors":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __getitem__(self, reference: str) -> Donor:
        if reference not in self._open:
            self._open[reference] = self._opened(reference)
        return self._open[reference]

    def _opened(self, reference: str) -> Donor:
        model, _, adapter = (reference, "", "") if Path(reference).exists() else reference.partition("+")
        if model.endswith(".gguf"):
            from merge.gguf import open_gguf

            donor = open_gguf(Path(model), self.stack)
        else:
            folder = located(model)
            donor = Donor(model, folder, read_config(folder), dict(self._tensors(folder)))
        if adapter:
            from merge.lora import adapted

            where = located(adapter)
            donor = adapted(donor, where, dict(self._tensors(where, "adapter_model")))
        return replace(donor, reference=reference)

    def _tensors(self, folder: Path, stem: str = "") -> Iterator[tuple[str, Stored]]:
        for path in weight_files(folder, stem):
            try:
                yield from self._safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
            except (files.Wrong, OSError) as error:
                raise Wrong(f"{path}: {error}") from None

    def _safetensors(self, path: Path) -> Iterator[tuple[str, Stored]]:
        file = self.stack.enter_context(path.open("rb", buffering=0))
        header = files.read_header(file, os.fstat(file.fileno()).st_size)
        begin = file.tell()
        for name, entry in header.tensors.items():
            yield name, Stored(entry.shape, entry.dtype, _reader(file.fileno(), path, begin, entry))
            begin += entry.bytes


def located(reference: str) -> Path:
    """The folder of a model: a local one, or one of the hub, which is fetched."""
    if (folder := Path(reference).expanduser()).is_dir():
        return folder
    if reference.startswith(("/", ".", "~")) or reference.count("/") > 1 or folder.exists():
        raise Wrong(f"{reference}: not a folder with a model, a .gguf file, or a hub id")
    from huggingface_hub import list_repo_files, snapshot_download

    name, _, at = reference.partition("@")
    try:
        there = list_repo_files(name, revision=at or None)
        safe = any(fnmatch.fnmatch(file, pattern) for file in there for pattern in _WEIGHTS[0])
        wanted = [*_BESIDE, *_WEIGHTS[0 if safe else 1]]
        return Path(snapshot_download(name, revision=at or None, allow_patterns=wanted))
    except Exception as error:  # whatever a hub and a network can come up with
        why = str(error).splitlines()[0][:200]
        raise Wrong(f"{reference}: no such folder here, and the hub does not give it: {why}") from None


def read_config(folder: Path) -> dict[str, Any]:
    value = read_json(folder / "config.json")
    if "quantization_config" in value:
        raise Wrong(f"{folder}: its weights are quantized; merge the model that they were made of")
    return value


def weight_files(folder: Path, stem: str = "") -> list[Path]:
    """The shards that an index names, or the one file that there is."""
    for base, suffix in ((stem or "model", "safetensors"), (stem or "pytorch_model", "bin")):
        if (index := folder / f"{base}.{suffix}.index.json").is_file():
            there = read_json(index).get("weight_map")
            if not isinstance(there, dict) or not all(isinstance(name, str) for name in there.values()):
                raise Wrong(f"{index}: a weight_map of files is expected")
            names = sorted(set(there.values()))
            if any(name != Path(name).name for name in names):
                raise Wrong(f"{index}: it names files of other folders")
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise Wrong(f"{folder}: shards are missing: {', '.join(missing)}")
            return [folder / name for name in names]
        if (one := folder / f"{base}.{suffix}").is_file():
            return [one]
    raise Wrong(f"{folder}: no {stem or 'model'}.safetensors in it, and no index of shards")


def _reader(fd: int, path: Path, begin: int, entry: files.Entry) -> Rows:
    columns = entry.shape[-1] if entry.shape else 1
    width = columns * entry.dtype.itemsize

    def rows(first: int, last: int) -> Tensor:
        room = torch.empty((last - first, columns), dtype=entry.dtype)
        left, place = files.bytes_of(room), begin + first * width
        while left:
            if not (count := os.preadv(fd, [left], place)):
                raise Wrong(f"{path}: it ends too early; did it change while it was read?")
            left, place = left[count:], place + count
        return room

    return rows


def _pickled(path: Path) -> Iterator[tuple[str, Stored]]:
    """A .bin file: tensors only, nothing in it is run."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch's errors about such files have no common class
        raise Wrong(f"{path}: not a file of tensors alone: {str(error).splitlines()[0][:200]}") from None
    for name, tensor in found.items():
        if isinstance(tensor, Tensor):
            yield name, Stored(tuple(tensor.shape), tensor.dtype, in_memory(tensor))


def changed(stored: Stored, change: Callable[[int, int, Tensor], Tensor]) -> Stored:
    """The same tensor, seen through a function of its rows."""
    return Stored(stored.shape, stored.dtype, lambda begin, end: change(begin, end, stored.rows(begin, end)))

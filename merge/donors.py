"""Models to merge: wherever they lie, as named tensors that are read row by row, and their configuration."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merge import files
from merge.files import Wrong
from merge.group import Rows, in_memory

BUFFERS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attention.masked_bias", ".attention.bias")  # not weights
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")


@dataclass(frozen=True)
class Stored:
    """A tensor that lies somewhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Rows = field(compare=False)

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

    @cached_property
    def vocabulary(self) -> int:
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

            return open_gguf(Path(model), self.stack)
        folder = located(model)
        donor = Donor(reference, folder, read_config(folder), dict(self._tensors(folder)))
        if not adapter:
            return donor
        from merge.lora import adapted

        where = located(adapter)
        return adapted(donor, where, dict(self._tensors(where, "adapter_model")))

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
    from huggingface_hub import snapshot_download

    name, _, revision = reference.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_WANTED)))
    except Exception as error:  # whatever a hub and a network can come up with
        why = str(error).splitlines()[0][:200]
        raise Wrong(f"{reference}: no such folder here, and the hub does not give it: {why}") from None


def read_config(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Wrong(f"{folder}: it has no config.json that can be read: {error}") from None
    if not isinstance(value, dict):
        raise Wrong(f"{folder}/config.json: an object is expected")
    if "quantization_config" in value:
        raise Wrong(f"{folder}: its weights are quantized; merge the model that they were made of")
    return value


def weight_files(folder: Path, stem: str = "") -> list[Path]:
    """The shards that an index names, or the one file that there is."""
    for base, suffix in ((stem or "model", "safetensors"), (stem or "pytorch_model", "bin")):
        if (index := folder / f"{base}.{suffix}.index.json").is_file():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise Wrong(f"{index}: cannot be read: {error!r}") from None
            if any(not isinstance(name, str) or name != Path(name).name for name in names):
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

"""A model to merge: its configuration, and named tensors that are read row by row from its weight files; whatever these
say is looked at before it counts."""

import math
import os
import shlex
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fleet.untrusted_model import check_config
from merge.json_files import read_json
from merge.tensor_files import DTYPES, TensorEntry, UserError, bytes_of, read_header
from merge.tensor_group import RowReader, in_memory
from merge.tensor_names import is_buffer, is_embedding, is_head, named_alike

C = TypeVar("C", bound=Mapping[str, Any])
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that lies somewhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read_rows: RowReader
    done: Callable[[], None] = lambda: None  # said by whoever has read all that he needs

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        return self.read_rows(0, math.prod(self.shape[:-1])).reshape(self.shape)


def changed(stored: LazyTensor, change: Callable[[int, int, Tensor], Tensor]) -> LazyTensor:
    """The same tensor, seen through a function of its rows."""
    return replace(stored, read_rows=lambda begin, end: change(begin, end, stored.read_rows(begin, end)))


@dataclass(frozen=True)
class Donor:
    """A model: its folder, its config.json, its weights."""

    reference: str
    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    adapter: Path | None = None  # the folder of the one that is merged into it

    @property
    def folders(self) -> list[Path]:
        """Where it lies: nothing may take their place."""
        return [self.folder, *([self.adapter] if self.adapter else [])]

    @property
    def vocabulary_size(self) -> int:
        size = self.config.get("vocab_size") or self.of_text.get("vocab_size") or 0
        if type(size) is not int:
            raise UserError(f"{self.folder}/config.json: vocab_size is {str(size)[:60]!r}; a whole number is expected")
        return size

    @property
    def of_text(self) -> Mapping[str, Any]:
        """What its configuration says of the layers that words go through; a part of it, where there are others."""
        return text_part(self.config)

    @property
    def layers(self) -> int | None:
        """How many its configuration promises."""
        count = next((self.of_text[key] for key in LAYER_COUNTS if key in self.of_text), None)
        return count if type(count) is int else None


def text_part(config: C) -> C:
    part: Any = config.get("text_config")
    inside = isinstance(part, dict) and not any(key in config for key in LAYER_COUNTS)
    return part if inside else config


def refuse_adapter(folder: Path) -> None:
    """An adapter by itself is no model; the command that makes one of it."""
    if (folder / "config.json").is_file() or not (folder / "adapter_config.json").is_file():
        return
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    base = base[:300] if isinstance(base, str) and base else "BASE"
    words = shlex.join(["python", "-m", "merge", f"{base}+{folder}", f"{folder}-merged"])
    raise UserError(f"{folder}: this is an adapter of {base}; merge it with: {words}")


def read_config(folder: Path) -> dict[str, Any]:
    refuse_adapter(folder)
    value = read_json(folder / "config.json")
    check_config(value, f"{folder}/config.json")
    if value.get("quantization_config") is not None:
        raise UserError(f"{folder}: its weights are quantized; merge the model that they were made of")
    return value


View = Mapping[str, LazyTensor]  # a model's tensors, its output head among them only where it is one of its own


def views_of(models: Sequence[Donor]) -> list[View]:
    """Output heads that are the embeddings are left out, unless another model has one of its own."""
    heads = {name for donor in models if not tied(donor) for name in donor.tensors if is_head(name)}
    views: list[View] = []
    for donor in models:
        view = {name: each for name, each in donor.tensors.items() if not is_buffer(name, len(each.shape))}
        if tied(donor):
            embedding = next((each for name, each in view.items() if is_embedding(name)), None)
            view = {name: each for name, each in view.items() if not is_head(name)}
            view |= {name: embedding for name in heads if embedding}
        views.append(named_alike(view, views[0]) if views else view)
    return views


def tied(donor: Donor) -> bool:
    """Whether its output head is its embeddings."""
    said = donor.config.get("tie_word_embeddings")
    return bool(said) if said is not None else not any(map(is_head, donor.tensors))


# -- weight files ------------------------------------------------------------------------------------------------------


def tensors_in(folder: Path, stack: ExitStack, stem: str = "") -> dict[str, LazyTensor]:
    """All tensors of a model's folder; of an adapter's with its STEM. The stack closes the files."""
    paths, promised = weight_files(folder, stem)
    found: dict[str, LazyTensor] = {}
    for path in paths:
        try:
            found |= safetensors_in(path, stack) if path.suffix == ".safetensors" else _pickled(path)
        except (UserError, OSError) as error:
            raise UserError(f"{path}: {error}") from None
    if missing := promised.keys() - found.keys():
        raise UserError(
            f"{folder}: its index has {min(missing)}, its files do not ({len(missing)} tensors are missing)"
        )
    if not found:
        raise UserError(f"{folder}: there is no tensor in {', '.join(path.name for path in paths)}")
    return found


def weight_files(folder: Path, stem: str = "") -> tuple[list[Path], Mapping[str, str]]:
    """The one file that there is, or the shards that an index names, and the tensors that it promises."""
    for base, suffix in ((stem or "model", "safetensors"), (stem or "pytorch_model", "bin")):
        if (one := folder / f"{base}.{suffix}").is_file():
            return [one], {}
        if (index := folder / f"{base}.{suffix}.index.json").is_file():
            return _shards(folder, index)
    raise UserError(f"{folder}: no {stem or 'model'}.safetensors in it, and no index of shards")


def _shards(folder: Path, index: Path) -> tuple[list[Path], Mapping[str, str]]:
    there = read_json(index).get("weight_map")
    if not isinstance(there, dict) or not all(isinstance(name, str) for name in there.values()):
        raise UserError(f"{index}: a weight_map of files is expected")
    names = sorted(set(there.values()))
    if any(name != Path(name).name for name in names):
        raise UserError(f"{index}: it names files of other folders")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"{folder}: shards are missing: {', '.join(missing)}")
    return [folder / name for name in names], there


def safetensors_in(path: Path, stack: ExitStack) -> dict[str, LazyTensor]:
    file = stack.enter_context(path.open("rb", buffering=0))
    header = read_header(file, os.fstat(file.fileno()).st_size)
    begin, found = file.tell(), {}
    for name, entry in header.tensors.items():
        found[name] = LazyTensor(entry.shape, entry.dtype, _reader(file.fileno(), path, begin, entry))
        begin += entry.bytes
    return found


def _reader(fd: int, path: Path, begin: int, entry: TensorEntry) -> RowReader:
    columns = entry.shape[-1] if entry.shape else 1
    width, count = columns * entry.dtype.itemsize, math.prod(entry.shape[:-1])

    def rows(first: int, last: int) -> Tensor:
        if not 0 <= first <= last <= count:
            raise UserError(f"{path}: rows {first} to {last} of a tensor that has {count}")
        room = torch.empty((last - first, columns), dtype=entry.dtype)
        left, place = bytes_of(room), begin + first * width
        while left:
            if not (got := os.preadv(fd, [left], place)):
                raise UserError(f"{path}: it ends too early; did it change while it was read?")
            left, place = left[got:], place + got
        return room

    return rows


def _pickled(path: Path) -> dict[str, LazyTensor]:
    """A .bin file: plain tensors only, nothing in it is run. Old ones are no archives, and are read as a whole."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch's errors about such files have no common class
        raise UserError(f"not a file of tensors alone: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(found, dict):
        raise UserError(f"a dictionary of tensors is expected, not a {type(found).__name__}")
    return dict(_plain(found))


def _plain(found: Mapping[Any, Any]) -> Iterator[tuple[str, LazyTensor]]:
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            continue  # versions and the like
        if not isinstance(name, str) or not _is_plain(tensor):
            raise UserError(f"{str(name)[:60]}: a {tensor.layout} tensor of {tensor.dtype} that cannot be merged")
        yield name, LazyTensor(tuple(tensor.shape), tensor.dtype, in_memory(tensor.detach()))


def _is_plain(tensor: Tensor) -> bool:
    """Of numbers that are really there: a view may pretend to be larger than all that the file has."""
    usual = tensor.layout == torch.strided and not tensor.is_quantized and tensor.dtype in DTYPES.values()
    return usual and tensor.device.type == "cpu" and tensor.nbytes <= tensor.untyped_storage().nbytes()

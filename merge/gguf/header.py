"""What a GGUF file says of itself, read in bounds: whatever it promises is looked at before it counts."""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES

from fleet.errors import from_home
from merge.tensor_files import UserError

VERSIONS = (2, 3)
_LIMIT = 100_000_000  # bytes of a header
_MOST = 1 << 22  # values of all arrays together; no vocabulary is larger
_MOST_TENSORS, _MOST_SETTINGS = 1 << 16, 1 << 12
_MOST_DIMENSIONS, _MOST_NUMBERS = 4, 1 << 50  # of a tensor
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _UINT32 = 8, 9, 4


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in the file; its shape as torch has it, the longest step first."""

    shape: tuple[int, ...]
    type: int
    begin: int
    bytes: int


@dataclass(frozen=True)
class Gguf:
    """A file's metadata, and where its tensors are."""

    path: Path
    version: int
    size: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A setting of the model's architecture, as `context_length`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def stored(self, name: str) -> np.ndarray:
        """A tensor's blocks, row by row, as gguf.dequantize takes them; nothing is read before it is looked at."""
        tensor, dtypes = self.tensors[name], {0: "<f4", 1: "<f2"}
        dtype = np.dtype(dtypes.get(tensor.type, "u1"))
        shape = (math.prod(tensor.shape[:-1]), tensor.bytes // dtype.itemsize // math.prod(tensor.shape[:-1]))
        return np.memmap(self.path, dtype, "r", tensor.begin, shape)


def read_gguf(path: Path | str) -> Gguf:
    """
    >>> read_gguf("model.gguf").metadata["general.architecture"]
    'llama'
    """
    path = from_home(path)
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    size = path.stat().st_size
    if size < 24:
        raise UserError(f"{path}: not a GGUF file: it has {size} bytes")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parsed(path, _Cursor(data, min(size, _LIMIT)), size)
    except UserError as error:
        raise UserError(f"{path}: not a GGUF file that can be read: {error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a GGUF file that can be read: a text in it is not UTF-8") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


class _Cursor:
    """Goes through the header, and never beyond its end."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self.data, self.end, self.place, self.left = data, end, 0, _MOST

    def take(self, form: str, count: int = 1) -> tuple[Any, ...]:
        begin = self.forward(count * struct.calcsize("<" + form))
        return struct.unpack_from(f"<{count}{form}", self.data, begin)

    def one(self, form: str) -> Any:
        return self.take(form)[0]

    def text(self) -> str:
        length = self.one("Q")
        begin = self.forward(length)
        return self.data[begin : begin + length].decode()

    def forward(self, count: int) -> int:
        if count > self.end - self.place:
            raise UserError(f"{count} bytes are promised at byte {self.place}, where its header may have {self.end}")
        self.place += count
        return self.place - count

    def value(self) -> Any:
        match self.one("I"):
            case kind if kind in _NUMBERS:
                return self.one(_NUMBERS[kind])
            case 8:
                return self.text()
            case 9:
                return self._array()
            case kind:
                raise UserError(f"a value of the unknown kind {kind}")

    def _array(self) -> tuple[Any, ...]:
        kind, count = self.one("I"), self.one("Q")
        if count > self.left:
            raise UserError(f"an array of {count} values; at most {_MOST} are expected in all")
        self.left -= count
        if kind == _STRING:
            return tuple(self.text() for _ in range(count))
        if kind not in _NUMBERS:
            raise UserError("an array of arrays" if kind == _ARRAY else f"an array of the unknown kind {kind}")
        return self.take(_NUMBERS[kind], count)


def _parsed(path: Path, cursor: _Cursor, size: int) -> Gguf:
    if (magic := cursor.data[cursor.forward(4) : 4]) != b"GGUF":
        raise UserError(f"it begins with {magic!r}")
    version, tensors, values = cursor.one("I"), cursor.one("Q"), cursor.one("Q")
    if version not in VERSIONS:
        kind = "made for big-endian machines" if version & 0xFFFF == 0 else f"of version {version}"
        raise UserError(f"it is {kind}; versions {VERSIONS[0]} and {VERSIONS[1]} are expected, little-endian")
    for what, count, least, most in (("tensors", tensors, 24, _MOST_TENSORS), ("settings", values, 13, _MOST_SETTINGS)):
        if count * least > cursor.end or count > most:
            raise UserError(f"it promises {count} {what}, more than it has room for, or than any model has")
    metadata: dict[str, Any] = {}
    for _ in range(values):
        if (key := cursor.text()) in metadata:
            raise UserError(f"the setting {key[:60]} is there twice")
        metadata[key] = cursor.value()
    places = [_place(cursor) for _ in range(tensors)]
    align = metadata.get("general.alignment", 32)
    if type(align) is not int or not 0 < align <= 1 << 20 or align & (align - 1):
        raise UserError(f"its alignment is {str(align)[:60]}; a power of two is expected")
    return Gguf(path, version, size, metadata, _laid(places, -(-cursor.place // align) * align, align, size))


def _place(cursor: _Cursor) -> tuple[str, Tensor]:
    """A tensor, its place still counted from the first one's."""
    name, dimensions = cursor.text(), cursor.one("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise UserError(f"the tensor {name[:60]} has {dimensions} dimensions")
    shape, kind, begin = cursor.take("Q", dimensions)[::-1], cursor.one("I"), cursor.one("Q")
    if min(shape) < 1 or math.prod(shape) > _MOST_NUMBERS:
        raise UserError(f"the tensor {name[:60]} has the shape {list(shape)}")
    if kind not in GGML_QUANT_SIZES:
        raise UserError(f"the tensor {name[:60]} is of the unknown type {kind}")
    block, width = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise UserError(f"the tensor {name[:60]} has rows of {shape[-1]} numbers, in blocks of {block}")
    return name, Tensor(shape, kind, begin, math.prod(shape) // block * width)


def _laid(places: list[tuple[str, Tensor]], first: int, align: int, size: int) -> dict[str, Tensor]:
    """All tensors, each in a place of its own within the file."""
    found: dict[str, Tensor] = {}
    for name, tensor in places:
        begin = first + tensor.begin
        if name in found:
            raise UserError(f"the tensor {name[:60]} is there twice")
        if tensor.begin % align or begin + tensor.bytes > size:
            where = f"bytes {begin} to {begin + tensor.bytes} of {size}"
            raise UserError(f"the tensor {name[:60]} would lie in {where}: cut off, or damaged")
        found[name] = Tensor(tensor.shape, tensor.type, begin, tensor.bytes)
    end = 0
    for name, tensor in sorted(found.items(), key=lambda each: each[1].begin):
        if tensor.begin < end:
            raise UserError(f"the tensor {name[:60]} lies within another one")
        end = tensor.begin + tensor.bytes
    return found

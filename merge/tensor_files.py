"""Weights as safetensors files, written and read from front to back in pieces, so that their size does not matter."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fleet.errors import UserError as UserError  # weights that cannot be used together, files that hold something else

CHUNK = 1 << 19  # numbers that are in memory at a time; a multiple of every block that a wire format has
_LIMIT = 100_000_000  # bytes of a header, as safetensors has it
_MOST_DIMENSIONS, _MOST_NUMBERS = 16, 1 << 50  # of a tensor

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ByteSink(Protocol):
    def write(self, data: bytes | memoryview) -> Any: ...


class ByteSource(Protocol):
    def readinto(self, room: memoryview) -> int: ...


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """What a file holds, in the order of its bytes."""

    tensors: Mapping[str, TensorEntry]
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.tensors.values())


def write_header(sink: ByteSink, header: Header, room: int = 0) -> None:
    """The tensors' bytes are to follow in this order. It takes this room, if it needs no more."""
    sink.write(packed(header, room))


def packed(header: Header, room: int = 0) -> bytes:
    fields: dict[str, Any] = {"__metadata__": dict(header.about)} if header.about else {}
    begin = 0
    for name, entry in header.tensors.items():
        place = [begin, begin + entry.bytes]
        fields[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        begin += entry.bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, room - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def read_header(source: ByteSource, size: int | None = None) -> Header:
    """Leaves the source at the first tensor's bytes. Where the file's size is known, all must fit in it."""
    length = int.from_bytes(_exactly(source, 8), "little")
    if length > (_LIMIT if size is None else min(_LIMIT, size - 8)):
        raise UserError(f"not a safetensors file: its header would have {length} bytes")
    try:
        fields = json.loads(_exactly(source, length))
        about = _texts(fields.pop("__metadata__", None) or {})
        places = {name: (_entry(f), _offsets(f)) for name, f in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"not a safetensors file that this project reads: {error!r}") from None
    tensors, begin = {}, 0
    for name, (entry, place) in sorted(places.items(), key=lambda item: item[1][1]):
        if place != [begin, begin + entry.bytes]:
            raise UserError(f"tensor {name}: bytes {place} where {[begin, begin + entry.bytes]} were expected")
        tensors[name], begin = entry, place[1]
    if size is not None and 8 + length + begin != size:
        raise UserError(f"it has {size} bytes where its header says {8 + length + begin}: cut off, or not whole yet")
    return Header(tensors, about)


def _entry(field: Any) -> TensorEntry:
    shape = field["shape"]
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise ValueError(f"a shape of {shape}")
    if len(shape) > _MOST_DIMENSIONS or math.prod(each or 1 for each in shape) > _MOST_NUMBERS:
        raise ValueError("a shape of more numbers than any disk holds")
    return TensorEntry(DTYPES[field["dtype"]], tuple(shape))


def _texts(about: Any) -> dict[str, str]:
    if not isinstance(about, dict) or not all(isinstance(each, str) for each in about.values()):
        raise ValueError("__metadata__ is text by text")
    return about


def _offsets(field: Any) -> list[int]:
    place = field["data_offsets"]
    if not isinstance(place, list) or not all(type(each) is int for each in place):
        raise ValueError("data_offsets are two whole numbers")
    return place


def chunks(source: ByteSource, dtype: torch.dtype, count: int, size: int = CHUNK) -> Iterator[Tensor]:
    """So many numbers from a source, a chunk at a time; a chunk is good until the next one is asked for."""
    room = torch.empty(min(size, count), dtype=dtype)
    for begin in range(0, count, size):
        piece = room[: min(size, count - begin)]
        fill(source, piece)
        yield piece


def fill(source: ByteSource, tensor: Tensor) -> None:
    view = bytes_of(tensor)
    if (count := source.readinto(view)) != len(view):
        raise UserError(f"the file ends {len(view) - count} bytes too early")


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in this machine's memory."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b"").cast("B")  # type: ignore[arg-type]


def _exactly(source: ByteSource, count: int) -> bytes:
    data = bytearray(count)
    if source.readinto(memoryview(data)) != count:
        raise UserError("not a safetensors file: it ends within its header")
    return bytes(data)

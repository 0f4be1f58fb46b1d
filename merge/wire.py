"""How numbers travel between machines: exact, halved, or scaled block by block to 8 or 4 bits.

A vector is one tensor of a safetensors file. The scaled forms are rows of a block each: its scale (bfloat16), then its
codes; whoever reads front to back needs no more than a row at a time.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from merge.files import (
    CHUNK,
    ByteSink,
    ByteSource,
    Header,
    TensorEntry,
    UserError,
    bytes_of,
    chunks,
    fill,
    read_header,
    write_header,
)

BLOCK = 64  # numbers that share a scale


class Wire(Protocol):
    def entry(self, count: int) -> TensorEntry: ...
    def encode(self, numbers: Tensor) -> Tensor: ...
    def decode(self, coded: Tensor, count: int) -> Tensor: ...


class Plain:
    """Every number by itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def entry(self, count: int) -> TensorEntry:
        return TensorEntry(self.dtype, (count,))

    def encode(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.dtype)

    def decode(self, coded: Tensor, count: int) -> Tensor:
        return coded.to(torch.float32)


class Scaled:
    """Blocks of whole numbers from -top to top, times a scale."""

    def __init__(self, top: int, per_byte: int) -> None:
        self.top, self.per_byte = top, per_byte

    def entry(self, count: int) -> TensorEntry:
        return TensorEntry(torch.uint8, (-(-count // BLOCK), 2 + BLOCK // self.per_byte))

    def encode(self, numbers: Tensor) -> Tensor:
        rows = _rows(numbers)
        scale = (rows.abs().amax(1) / self.top).to(torch.bfloat16)
        wide = scale.float()
        codes = (rows / torch.where(wide == 0, 1.0, wide)[:, None]).round_().clamp_(-self.top, self.top).to(torch.int8)
        return torch.cat([scale.view(torch.uint8).view(-1, 2), self._packed(codes.view(torch.uint8))], 1)

    def decode(self, coded: Tensor, count: int) -> Tensor:
        scale = coded[:, :2].contiguous().view(torch.bfloat16).float()
        return (self._unpacked(coded[:, 2:]).float() * scale).flatten()[:count]

    def _packed(self, codes: Tensor) -> Tensor:
        return codes if self.per_byte == 1 else (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)

    def _unpacked(self, codes: Tensor) -> Tensor:
        if self.per_byte == 1:
            return codes.contiguous().view(torch.int8)
        low, high = (codes & 15).to(torch.int8), (codes >> 4).to(torch.int8)
        both = torch.stack([low, high], 2).flatten(1)
        return both - 16 * (both > 7).to(torch.int8)


WIRES: dict[str, Wire] = {
    "fp32": Plain(torch.float32),
    "bf16": Plain(torch.bfloat16),
    "int8": Scaled(127, 1),
    "int4": Scaled(7, 2),
}


def send(sink: ByteSink, count: int, pieces: Iterable[Tensor], wire: str = "fp32") -> None:
    """A vector of so many fp32 numbers that come in pieces, each but the last a multiple of a block."""
    one_more = sender(sink, count, wire)
    for piece in pieces:
        one_more(piece)


def sender(sink: ByteSink, count: int, wire: str = "fp32") -> Callable[[Tensor], None]:
    """The same, for whoever has the pieces one at a time."""
    write_header(sink, Header({"vector": WIRES[wire].entry(count)}, {"wire": wire, "count": str(count)}))
    return lambda piece: sink.write(bytes_of(WIRES[wire].encode(piece).contiguous()))


def received(source: ByteSource, count: int) -> Iterator[Tensor]:
    """The vector again, in pieces of fp32; a piece is good until the next one is asked for."""
    wire, entry = _announced(read_header(source), count)
    if isinstance(wire, Plain):
        for coded in chunks(source, entry.dtype, count):
            yield wire.decode(coded, len(coded))
        return
    room = torch.empty((min(CHUNK // BLOCK, entry.shape[0]), entry.shape[1]), dtype=torch.uint8)
    for begin in range(0, entry.shape[0], CHUNK // BLOCK):
        rows = room[: min(CHUNK // BLOCK, entry.shape[0] - begin)]
        fill(source, rows)
        yield wire.decode(rows, min(CHUNK, count - begin * BLOCK))


def pieces(vector: Tensor) -> Iterator[Tensor]:
    """A vector in memory, chunk by chunk."""
    return iter(vector.split(CHUNK))


def _announced(header: Header, count: int) -> tuple[Wire, TensorEntry]:
    wire = WIRES.get(header.about.get("wire", ""))
    if wire is None or {**header.tensors} != {"vector": wire.entry(count)}:
        raise UserError(f"not a vector of {count} numbers: {dict(header.about)}, {dict(header.tensors)}")
    return wire, header.tensors["vector"]


def _rows(numbers: Tensor) -> Tensor:
    short = -len(numbers) % BLOCK
    return (torch.nn.functional.pad(numbers, (0, short)) if short else numbers).view(-1, BLOCK)

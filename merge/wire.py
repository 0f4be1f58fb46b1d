"""How numbers travel between machines: exact, halved, or scaled block by block to 8, 4 or 2 bits.

A vector is one tensor of a safetensors file. The scaled forms are rows of a block each: its scale (bfloat16), then its
codes; whoever reads front to back needs no more than a row at a time.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from merge.tensor_files import (
    CHUNK,
    ByteSink,
    ByteSource,
    Header,
    TensorEntry,
    UserError,
    bytes_of,
    chunks,
    read_header,
    write_header,
)

BLOCK = 64  # numbers that share a scale


@dataclass(frozen=True)
class Plain:
    """Every number by itself."""

    dtype: torch.dtype

    def entry(self, count: int) -> TensorEntry:
        return TensorEntry(self.dtype, (count,))

    def encode(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.dtype)

    def decode(self, coded: Tensor, count: int) -> Tensor:
        return coded.to(torch.float32)


@dataclass(frozen=True)
class Scaled:
    """Blocks of whole numbers from -top to top, times a scale."""

    top: int
    per_byte: int

    def entry(self, count: int) -> TensorEntry:
        return TensorEntry(torch.uint8, (-(-count // BLOCK), 2 + BLOCK // self.per_byte))

    def encode(self, numbers: Tensor) -> Tensor:
        scale, codes = _in_blocks(numbers, self.top)
        codes = codes.round_().clamp_(-self.top, self.top).to(torch.int8)
        return torch.cat([scale, self._packed(codes.view(torch.uint8))], 1)

    def decode(self, coded: Tensor, count: int) -> Tensor:
        """So many numbers; the last block may have been filled up."""
        return (self._unpacked(coded[:, 2:]).float() * _scale(coded)).flatten()[:count]

    def _packed(self, codes: Tensor) -> Tensor:
        """Several to a byte, the first in its lowest bits."""
        bits, packed = 8 // self.per_byte, codes[:, :: self.per_byte] & self._mask
        for n in range(1, self.per_byte):
            packed = packed | (codes[:, n :: self.per_byte] & self._mask) << n * bits
        return packed

    def _unpacked(self, codes: Tensor) -> Tensor:
        if self.per_byte == 1:
            return codes.contiguous().view(torch.int8)
        bits = 8 // self.per_byte
        found = torch.stack([codes >> n * bits & self._mask for n in range(self.per_byte)], 2).flatten(1)
        return found.to(torch.int8) - (self._mask + 1) * (found > self.top).to(torch.int8)

    @property
    def _mask(self) -> int:
        return (1 << 8 // self.per_byte) - 1


@dataclass(frozen=True)
class Roots:
    """Of numbers that are not negative: blocks of 8 bits for each one's root. What is small beside its neighbours may
    be divided by, and so never becomes nothing."""

    top: int = 255

    def entry(self, count: int) -> TensorEntry:
        return TensorEntry(torch.uint8, (-(-count // BLOCK), 2 + BLOCK))

    def encode(self, numbers: Tensor) -> Tensor:
        scale, codes = _in_blocks(numbers.sqrt(), self.top)
        codes = torch.where(codes > 0, codes.round().clamp_(1, self.top), 0.0)
        return torch.cat([scale, codes.to(torch.uint8)], 1)

    def decode(self, coded: Tensor, count: int) -> Tensor:
        return (coded[:, 2:].float() * _scale(coded)).square_().flatten()[:count]


def _in_blocks(numbers: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The scale of each block, as bytes, and its numbers in units of it; the last block is filled up."""
    short = -len(numbers) % BLOCK
    rows = (torch.nn.functional.pad(numbers, (0, short)) if short else numbers).view(-1, BLOCK)
    scale = (rows.abs().amax(1) / top).to(torch.bfloat16)
    wide = scale.float()
    return scale.view(torch.uint8).view(-1, 2), rows / torch.where(wide == 0, 1.0, wide)[:, None]


def _scale(coded: Tensor) -> Tensor:
    return coded[:, :2].contiguous().view(torch.bfloat16).float()


Wire = Plain | Scaled | Roots
WIRES: dict[str, Wire] = {
    "fp32": Plain(torch.float32),
    "bf16": Plain(torch.bfloat16),
    "int8": Scaled(127, 1),
    "int4": Scaled(7, 2),
    "int2": Scaled(1, 4),
    "root8": Roots(),
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
    most = math.prod(wire.entry(CHUNK).shape)
    for n, coded in enumerate(chunks(source, entry.dtype, math.prod(entry.shape), most)):
        yield wire.decode(coded.view(-1, *entry.shape[1:]), count - n * CHUNK)


def pieces(vector: Tensor) -> Iterator[Tensor]:
    """A vector in memory, chunk by chunk."""
    return iter(vector.split(CHUNK))


def _announced(header: Header, count: int) -> tuple[Wire, TensorEntry]:
    wire = WIRES.get(header.about.get("wire", ""))
    if wire is None or {**header.tensors} != {"vector": wire.entry(count)}:
        raise UserError(f"not a vector of {count} numbers: {dict(header.about)}, {dict(header.tensors)}")
    return wire, header.tensors["vector"]

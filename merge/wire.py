"""How numbers travel between machines: exact, halved, or scaled block by block to 12, 8, 4 or 2 bits.

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
    """Blocks of whole numbers, of so many bits each, times a scale. What has more than 8 bits is its low byte, and the
    rest is packed behind the block's bytes."""

    bits: int

    @property
    def top(self) -> int:
        return (1 << self.bits - 1) - 1

    def entry(self, count: int) -> TensorEntry:
        return TensorEntry(torch.uint8, (-(-count // BLOCK), 2 + BLOCK * self.bits // 8))

    def encode(self, numbers: Tensor) -> Tensor:
        # the scale is rounded too, and the largest number is still to have a code
        scale, codes = _in_blocks(numbers, self.top - self.top // 128)
        codes = codes.round_().clamp_(-self.top, self.top).to(torch.int16)
        if self.bits <= 8:
            return torch.cat([scale, _packed(codes, self.bits)], 1)
        return torch.cat([scale, codes.to(torch.uint8), _packed(codes >> 8, self.bits - 8)], 1)

    def decode(self, coded: Tensor, count: int) -> Tensor:
        """So many numbers; the last block may have been filled up."""
        if self.bits <= 8:
            codes = _unpacked(coded[:, 2:], self.bits)
        else:
            codes = _unpacked(coded[:, 2 + BLOCK :], self.bits - 8).short() * 256 + coded[:, 2 : 2 + BLOCK]
        return (codes.float() * _scale(coded)).flatten()[:count]


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Several whole numbers to a byte, the first in its lowest bits."""
    codes, mask, per_byte = codes.to(torch.int8).view(torch.uint8), (1 << bits) - 1, 8 // bits
    packed = codes[:, ::per_byte] & mask
    for n in range(1, per_byte):
        packed = packed | (codes[:, n::per_byte] & mask) << n * bits
    return packed


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes.contiguous().view(torch.int8)
    codes, up = codes.contiguous(), 8 - bits  # to the top of a byte and down again, so that the sign comes along
    parts = [(codes << 8 - bits * (n + 1)).view(torch.int8) >> up for n in range(8 // bits)]
    return torch.stack(parts, 2).flatten(1)


@dataclass(frozen=True)
class Normal:
    """Blocks of 2 bits, for one of the four numbers that are nearest to what is normally distributed (Lloyd, Max),
    times the block's deviation."""

    near: float = 0.4528
    far: float = 1.5104

    def entry(self, count: int) -> TensorEntry:
        return TensorEntry(torch.uint8, (-(-count // BLOCK), 2 + BLOCK // 4))

    def encode(self, numbers: Tensor) -> Tensor:
        rows = _rows(numbers)
        scale = rows.square().mean(1).sqrt().to(torch.bfloat16)
        between = torch.tensor([-1.0, 0.0, 1.0]) * ((self.near + self.far) / 2)
        codes = torch.bucketize(rows / _divisor(scale), between).to(torch.uint8)
        packed = sum((codes[:, n::4] << 2 * n for n in range(1, 4)), codes[:, ::4])
        return torch.cat([scale.view(torch.uint8).view(-1, 2), packed], 1)

    def decode(self, coded: Tensor, count: int) -> Tensor:
        codes = torch.stack([coded[:, 2:] >> 2 * n & 3 for n in range(4)], 2).flatten(1)
        levels = torch.tensor([-self.far, -self.near, self.near, self.far])
        return (levels[codes.int()] * _scale(coded)).flatten()[:count]


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
    rows = _rows(numbers)
    scale = (rows.abs().amax(1) / top).to(torch.bfloat16)
    return scale.view(torch.uint8).view(-1, 2), rows / _divisor(scale)


def _rows(numbers: Tensor) -> Tensor:
    short = -len(numbers) % BLOCK
    return (torch.nn.functional.pad(numbers, (0, short)) if short else numbers).view(-1, BLOCK)


def _divisor(scale: Tensor) -> Tensor:
    wide = scale.float()
    return torch.where(wide == 0, 1.0, wide)[:, None]


def _scale(coded: Tensor) -> Tensor:
    return coded[:, :2].contiguous().view(torch.bfloat16).float()


Wire = Plain | Scaled | Normal | Roots
WIRES: dict[str, Wire] = {
    "fp32": Plain(torch.float32),
    "bf16": Plain(torch.bfloat16),
    "int12": Scaled(12),
    "int8": Scaled(8),
    "int4": Scaled(4),
    "normal2": Normal(),
    "root8": Roots(),
}


def send(sink: ByteSink, count: int, pieces: Iterable[Tensor], wire: str = "fp32") -> None:
    """A vector of so many fp32 numbers that come in pieces, each but the last a multiple of a block."""
    one_more = sender(sink, count, wire)
    for piece in pieces:
        one_more(piece)


def sender(sink: ByteSink, count: int, wire: str = "fp32") -> Callable[[Tensor], None]:
    """The same, for whoever has the pieces one at a time."""
    write = sender_of_codes(sink, count, wire)
    return lambda piece: write(WIRES[wire].encode(piece))


def sender_of_codes(sink: ByteSink, count: int, wire: str) -> Callable[[Tensor], None]:
    """The same, for whoever has encoded them."""
    write_header(sink, Header({"vector": WIRES[wire].entry(count)}, {"wire": wire, "count": str(count)}))
    return lambda coded: sink.write(bytes_of(coded.contiguous()))


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

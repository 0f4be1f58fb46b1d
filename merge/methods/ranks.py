"""Which numbers of a tensor are its largest, exactly, without sorting: by counting, in two passes over its blocks.

The bits of a float that is not negative are ordered as it is. The first pass counts how often the upper 16 bits occur,
the second how often the lower 16 bits do among the numbers that share the upper ones of the number looked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALL, _NONE = -1, 0x7FFFFFFF


@dataclass(frozen=True)
class Cut:
    """Where the k largest end: all above `bits` are among them, and of those that equal it the first `ties`."""

    bits: int
    ties: int
    equal: int  # how many equal it


def cuts(
    blocks: Callable[[], Iterator[Sequence[Tensor]]], size: int, wanted: Sequence[Sequence[int]]
) -> list[list[Cut]]:
    """A block has one piece of each tensor, nothing negative; of each tensor, the cuts of so many largest."""
    places = sorted({(n, k) for n, each in enumerate(wanted) for k in each if 0 < k <= size})
    upper = _counted(blocks, {(n, None) for n, _ in places})
    found = {place: _falling(upper[place[0], None], place[1]) for place in places}  # the bucket, and which in it
    lower = _counted(blocks, {(n, found[n, k][0]) for n, k in places})
    made = {}
    for n, k in places:
        bucket, rest = found[n, k]
        low, ties = _falling(lower[n, bucket], rest)
        made[n, k] = Cut(bucket << 16 | low, ties, int(lower[n, bucket][low]))
    ends = {True: Cut(_ALL, 0, 0), False: Cut(_NONE, 0, 0)}
    return [[made.get((n, k)) or ends[k > 0] for k in each] for n, each in enumerate(wanted)]


def _counted(
    blocks: Callable[[], Iterator[Sequence[Tensor]]], wanted: set[tuple[int, int | None]]
) -> dict[tuple[int, int | None], Tensor]:
    """How often each value of 16 bits occurs: of the upper ones, or of the lower ones in a bucket."""
    counts: dict[tuple[int, int | None], Tensor] = {}
    for pieces in blocks() if wanted else ():
        for n, bucket in sorted(wanted, key=str):
            bits = pieces[n].reshape(-1).view(torch.int32)
            high = bits >> 16
            values = high if bucket is None else bits[high == bucket] & 0xFFFF
            count = torch.bincount(values, minlength=1 << 16)
            counts[n, bucket] = counts[n, bucket].add_(count) if (n, bucket) in counts else count
    return counts


def _falling(counts: Tensor, k: int) -> tuple[int, int]:
    """The value that the k-th largest has, and its place among those that have it."""
    from_top = counts.flip(0).cumsum(0)
    n = int(torch.searchsorted(from_top, torch.tensor(k, device=counts.device)))
    value = len(counts) - 1 - n
    return value, k - int(from_top[n] - counts[value])


class Largest:
    """Says of block after block, from the first, which numbers are among the largest."""

    def __init__(self, cut: Cut) -> None:
        self.cut, self.ties = cut, cut.ties

    def __call__(self, magnitudes: Tensor) -> Tensor:
        bits = magnitudes.view(torch.int32)
        if self.cut.ties == self.cut.equal:
            return bits >= self.cut.bits
        mask = bits > self.cut.bits
        if self.ties:
            same = bits == self.cut.bits
            first = same & (same.flatten().cumsum(0) <= self.ties).view_as(same)
            self.ties -= int(first.sum())
            mask |= first
        return mask

    def kept(self, changes: Tensor) -> Tensor:
        """The same block with everything else set to 0."""
        if self.cut.bits == _ALL:
            return changes
        if self.cut.bits == _NONE:
            return torch.zeros_like(changes)
        if self.cut.bits and self.cut.ties == self.cut.equal:  # the usual case, in one vectorized operation
            below = torch.tensor(self.cut.bits - 1, dtype=torch.int32).view(torch.float32)
            return torch.nn.functional.hardshrink(changes, float(below))
        return changes * self(changes.abs())

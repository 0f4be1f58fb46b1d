"""Which numbers of a tensor are its largest, exactly, without sorting: by counting, in two passes over its blocks.

The bits of a float that is not negative are ordered as it is. The first pass counts how often the upper 16 bits occur,
the second how often the lower 16 bits do among the numbers that share the upper ones of the number looked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
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
    places = {(n, k) for n, each in enumerate(wanted) for k in each if 0 < k <= size}
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
    counters = {place: _Counter() for place in wanted}
    for pieces in blocks() if wanted else ():
        for (n, bucket), counter in counters.items():
            bits = pieces[n].reshape(-1).view(torch.int32)
            high = bits >> 16
            counter.add(high if bucket is None else selected(bits, equal(high, bucket)) & 0xFFFF)
    return {place: counter.counts() for place, counter in counters.items()}


class _Counter:
    """Counts values of 16 bits; a few at a time would cost more than the counting."""

    def __init__(self) -> None:
        self._waiting: list[Tensor] = []
        self._total: Tensor | None = None

    def add(self, values: Tensor) -> None:
        self._waiting.append(values)
        if sum(map(len, self._waiting)) >= 1 << 16:
            self._total = self.counts()
            self._waiting = []

    def counts(self) -> Tensor:
        count = torch.bincount(torch.cat(self._waiting) if self._waiting else torch.zeros(0).int(), minlength=1 << 16)
        return count if self._total is None else self._total.to(count.device).add_(count)


def _falling(counts: Tensor, k: int) -> tuple[int, int]:
    """The value that the k-th largest has, and its place among those that have it."""
    from_top = counts.flip(0).cumsum(0)
    n = int(torch.searchsorted(from_top, torch.tensor(k, device=counts.device)))
    value = len(counts) - 1 - n
    return value, k - int(from_top[n] - counts[value])


class Largest:
    """Says of block after block, from the first, which numbers are among the largest."""

    def __init__(self, cut: Cut) -> None:
        self.bits, self.ties = cut.bits, cut.ties
        self.all_ties = cut.ties == cut.equal

    def __call__(self, magnitudes: Tensor) -> Tensor:
        least, late = self._next(magnitudes)
        mask = magnitudes.view(torch.int32) >= least
        return mask if late is None else mask & ~late

    def kept(self, changes: Tensor) -> Tensor:
        """The same block with everything else set to 0."""
        least, late = self._next(changes)
        if least == _NONE:
            return torch.zeros_like(changes)
        if least <= 0:
            found = changes
        else:  # one vectorized operation: all up to this number becomes 0
            below = torch.tensor(least - 1, dtype=torch.int32).view(torch.float32)
            found = torch.nn.functional.hardshrink(changes, float(below))
        return found if late is None else found.masked_fill(late, 0)

    def _next(self, numbers: Tensor) -> tuple[int, Tensor | None]:
        """From which bits on this block's numbers stay; where the ties end, which of them come too late."""
        if self.all_ties:
            return self.bits, None
        if not self.ties:
            return self.bits + 1, None
        same = equal(numbers.abs().view(torch.int32), self.bits)
        found = int(np.count_nonzero(same.numpy()) if same.device.type == "cpu" else same.sum())
        if found <= self.ties:
            self.ties -= found
            return self.bits, None
        late = same & (same.flatten().cumsum(0) > self.ties).view_as(same)
        self.ties = 0
        return self.bits, late


# -- NumPy compares and selects ten times as fast as torch does on a processor -----------------------------------------


def equal(numbers: Tensor, value: float) -> Tensor:
    return torch.from_numpy(numbers.numpy() == value) if numbers.device.type == "cpu" else numbers == value


def selected(numbers: Tensor, mask: Tensor) -> Tensor:
    return torch.from_numpy(numbers.numpy()[mask.numpy()]) if numbers.device.type == "cpu" else numbers[mask]


def masked_(numbers: Tensor, mask: Tensor) -> Tensor:
    """0 where the mask says no; in place."""
    if numbers.device.type != "cpu":
        return numbers.mul_(mask)
    np.multiply(numbers.numpy(), mask.numpy(), out=numbers.numpy())
    return numbers

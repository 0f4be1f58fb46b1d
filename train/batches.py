"""Which tokens a slot sees at a step: a pure function of seed, slot, round and step, so nothing has to be remembered.

Every sequence of the run has a number, and a slot owns the numbers of its own batches. A number says which source it
takes from, and which window there: the source's windows in an order that is shuffled anew for every pass over them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from train.token_budget import held_count
from train.training_config import TrainConfig

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # splitmix64's constants


@dataclass(frozen=True)
class TokenFile:
    """One token file of a source, not read but mapped."""

    values: Any
    window: int
    first: int = 0  # the number from which on it is learned from
    earlier: Sequence[tuple[int, int]] = ()  # of each run before: numbers used up from there, windows that there were

    @classmethod
    def open(
        cls, path: Path, dtype: str, window: int, first: int = 0, earlier: Sequence[tuple[int, int]] = ()
    ) -> "TokenFile":
        values = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
        return cls(values, window, first, earlier)

    @property
    def windows(self) -> int:
        """They overlap by one token, which is the last to be said in one and the first to be heard in the next."""
        return (len(self.values) - 1) // (self.window - 1)

    def get(self, number: int) -> Any:
        begin = number * (self.window - 1)
        return self.values[begin : begin + self.window]

    def drawn(self, number: int, key: tuple[int, ...]) -> Any:
        """The window of a sequence's number. What a run that goes on from another has more of the text comes after the
        first pass over what that one had, and is all new; only then are there passes over everything."""
        number, there, end = number - self.first, *(2 * [self.earlier[0][1] if self.earlier else self.windows])
        more = [*(count for _, count in self.earlier[1:]), self.windows]
        for (used, before), count in zip(self.earlier, more, strict=False):
            if number < (begin := max(end, used)):
                break
            there, end = count, begin + count - before
            if number < end:
                return self.get(before + shuffled(number - begin, count - before, (*key, 0, before)))
        turn, place = divmod(number, there)
        return self.get(shuffled(place, there, (*key, turn)))


def held_windows(sources: Sequence[TokenFile], config: TrainConfig, on: str) -> list[list[int]]:
    """Each source's share of EVAL_SEQUENCES or of TEST_SEQUENCES, from the beginning of what it has of them."""
    return [window for number, source in enumerate(sources) for window in held_of(source, config, number, on)]


def held_of(source: TokenFile, config: TrainConfig, number: int, on: str) -> list[list[int]]:
    """One source's share."""
    return [source.get(window).astype("int64").tolist() for window in range(held_count(config, number, on))]


def owned(config: TrainConfig, slot: int, round: int, step: int, part: int) -> Numbers:
    """The numbers of a slot's batch."""
    first = config.first_number(config.steps_before(round) + step, slot, part)
    return np.arange(first, first + config.batch_size, dtype=np.uint64)


def batch(sources: Sequence[TokenFile], weights: Sequence[float], numbers: Numbers, seed: int) -> Tensor:
    """The sequences with these numbers."""
    chosen = _choices(weights, numbers, seed)
    rows = np.empty((len(numbers), sources[0].window), dtype=np.int64)
    for row, (number, choice) in enumerate(zip(numbers, chosen, strict=True)):
        rows[row] = sources[int(choice)].drawn(int(number), (seed, int(choice)))
    return torch.from_numpy(rows)


def shuffled(place: int, count: int, key: tuple[int, ...]) -> int:
    """Where a place goes in a shuffle of so many, without writing the shuffle down: a small cipher, walked until it
    falls within the count."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, keys = (1 << half) - 1, [_mixed((*key, i)) for i in range(4)]
    while True:
        left, right = place >> half, place & mask
        for each in keys:
            left, right = right, left ^ (_mixed((each, right)) & mask)
        place = left << half | right
        if place < count:
            return place


def _choices(weights: Sequence[float], numbers: Numbers, seed: int) -> Any:
    if len(weights) == 1:
        return np.zeros(len(numbers), dtype=np.int64)
    edges = np.cumsum(np.asarray(weights, dtype=np.float64))
    rolls = np.array([_mixed((seed, int(n))) / 2.0**64 for n in numbers])
    return np.searchsorted(edges, rolls * edges[-1], side="right").clip(max=len(weights) - 1)


def _mixed(key: tuple[int, ...]) -> int:
    """64 well mixed bits of some numbers."""
    state = 0
    for each in key:
        state = (state ^ each) + _MIX[0] & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * _MIX[1] & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * _MIX[2] & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state

"""The matrices of low rank that come nearest to a large one, which is read block by block and never there as a whole: a
randomized singular value decomposition (Halko, Martinsson and Tropp, 2011), in float64."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from merge.tensor_files import UserError

_SPARE = 10  # directions that are looked at beyond those that are asked for
_TURNS = 2  # times that the directions are brought nearer to the best ones
_FIRST = 16  # directions to begin with, where an energy says how many are enough


@dataclass(frozen=True)
class Change:
    """A matrix that can be read any number of times, in blocks of rows."""

    name: str
    shape: tuple[int, int]
    blocks: Callable[[], Iterator[Tensor]]

    @property
    def least(self) -> int:
        return min(self.shape)

    def times(self, right: Tensor) -> Tensor:
        return torch.cat([block.double() @ right for block in self.blocks()])

    def turned_times(self, left: Tensor) -> Tensor:
        """Its transpose, times this."""
        total, begin = torch.zeros(self.shape[1], left.shape[1], dtype=torch.float64), 0
        for block in self.blocks():
            total.addmm_(block.double().T, left[begin : begin + len(block)])
            begin += len(block)
        return total


@dataclass(frozen=True)
class LowRank:
    """left @ right; each holds the roots of the singular values."""

    left: Tensor
    right: Tensor
    energy: float  # of the whole change: the sum of its squares
    kept: float  # of left @ right

    @property
    def rank(self) -> int:
        return self.left.shape[1]


def low_rank(change: Change, most: int, share: float = 1.0) -> LowRank:
    """Of the rank MOST, or of the least one below it that keeps this share of the energy."""
    energy = sum(float(block.double().square().sum()) for block in change.blocks())
    if not math.isfinite(energy):
        raise UserError(f"{change.name} changes by numbers that are not finite: no matrices of low rank are near it")
    most = min(most, change.least)
    width = most if share >= 1 else min(most, _FIRST)
    while True:
        left, values, right = _decomposed(change, width)
        kept = values.square().cumsum(0)
        rank = int((kept < share * energy).sum()) + 1 if share < 1 else most
        if rank <= width or width == most:
            break
        width = min(most, 2 * width)
    rank, roots = min(rank, most), values.sqrt()
    return LowRank(left[:, :rank] * roots[:rank], roots[:rank, None] * right[:rank], energy, float(kept[rank - 1]))


def _decomposed(change: Change, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """So many of the largest singular values, and some more; and their directions."""
    wide = min(width + _SPARE, change.least)
    found = _basis(change.times(_directions(change, wide)))
    for _ in range(_TURNS if wide < change.least else 0):
        found = _basis(change.times(_basis(change.turned_times(found))))
    right, values, mixed = torch.linalg.svd(change.turned_times(found), full_matrices=False)
    return found @ mixed.T, values, right.T


def _basis(columns: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _directions(change: Change, count: int) -> Tensor:
    """At random, but always the same for a name."""
    seed = np.frombuffer(hashlib.sha256(change.name.encode()).digest(), np.uint32).tolist()
    return torch.from_numpy(np.random.Generator(np.random.SFC64(seed)).standard_normal((change.shape[1], count)))


def least_error(change: Change, rank: int) -> float:
    """What the best matrices of this rank leave, as the root of the sum of squares, by a full decomposition."""
    values = torch.linalg.svdvals(torch.cat([block.double() for block in change.blocks()]))
    return math.sqrt(float(values[rank:].square().sum()))

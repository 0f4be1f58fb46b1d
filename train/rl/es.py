"""Evolution strategies: a model goes where those of its random neighbours are whose answers were worth more. Pure."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[str, Tensor]  # of a model, by their names
_DIGITS = 6  # behind the point, of what a pair counts: it travels


@dataclass(frozen=True)
class Step:
    """How far a round goes."""

    lr: float
    decay: float = 0.0  # of the way back to the start, times lr
    rank: int = 0


def noise(key: Sequence[int], name: str, shape: Sequence[int], rank: int = 0) -> Tensor:
    """A pair's, of one tensor: standard normal. That of a matrix may be a product of two narrow ones: each number has
    the same variance and is uncorrelated with the others, so that estimates of the gradient stay unbiased."""
    digest = hashlib.sha256(name.encode()).digest()
    rng = np.random.default_rng([*key, int.from_bytes(digest[:8], "big")])

    def drawn(*size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size, np.float32))

    if len(shape) != 2 or not 0 < rank < min(shape):
        return drawn(*shape)
    left, right, total = drawn(shape[0], rank), drawn(rank, shape[1]), torch.zeros(*shape)
    for n in range(rank):  # in this order, on whatever machine
        total.add_(left[:, n : n + 1] * right[n])
    return total.div_(math.sqrt(rank))


def perturbed(value: Tensor, key: Sequence[int], name: str, sigma: float, rank: int = 0) -> Tensor:
    """Of a tensor; a negative sigma is the opposite side."""
    return value + noise(key, name, value.shape, rank).mul_(sigma).to(value.device)


def differences(plus: Sequence[float], minus: Sequence[float]) -> list[float]:
    """What each pair counts: by how much one side was better, in standard deviations of all rewards."""
    every = [*plus, *minus]
    mean = math.fsum(every) / len(every)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in every) / len(every))
    return [round((a - b) / spread, _DIGITS) if spread else 0.0 for a, b in zip(plus, minus, strict=True)]


def direction(name: str, shape: Sequence[int], key: Sequence[int], counts: Sequence[float], rank: int = 0) -> Tensor:
    """Of one tensor: the mean over all members of reward times perturbation. KEY is the round's; a pair has its own."""
    total = torch.zeros(*shape)
    for pair, count in enumerate(counts):
        if count:
            total.add_(noise((*key, pair), name, shape, rank).mul_(count))
    return total.mul_(1 / (2 * len(counts)))


@torch.no_grad()
def take(step: Step, weights: Weights, start: Weights, key: Sequence[int], counts: Sequence[float]) -> None:
    """One round's, in place. Weights near the start forget less; it is not looked at without decay."""
    for name, value in weights.items():
        change = direction(name, value.shape, key, counts, step.rank).mul_(step.lr).to(value.device)
        if step.decay:
            change.sub_((value - start[name]).mul_(step.lr * step.decay))
        value.add_(change)

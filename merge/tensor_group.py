"""Tensors of one shape, seen together, block by block, so that their size does not matter."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_BLOCK = 1 << 17  # numbers of a tensor that are in memory at a time: its copies stay in a processor's cache
_BLOCK_GPU = 1 << 24


Params = Mapping[str, Any]  # what a method is told: a value, or for each of the others one


class RowReader(Protocol):
    """A tensor wherever it is; a tensor of n dimensions has as many rows as it has vectors along its last one."""

    def __call__(self, begin: int, end: int, /) -> Tensor: ...


@dataclass(frozen=True)
class Group:
    """What a method merges: a base where it has one, and the others; and what sums and drops may depend on."""

    shape: tuple[int, ...]
    others: Sequence[RowReader]
    base: RowReader | None = None
    name: str = ""
    models: tuple[str, ...] = ()  # the others' names
    seed: int = 0
    device: str = "cpu"

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def blocks(self) -> Iterator[list[Tensor]]:
        """Of all tensors, the base first: so many rows in fp32. They are good until the next ones are asked for."""
        tensors = [self.base, *self.others] if self.base else self.others
        step = max(1, (_BLOCK if self.device == "cpu" else _BLOCK_GPU) // max(1, self.columns))
        room = torch.empty((len(tensors), min(step, self.rows), self.columns), device=self.device)
        for begin in range(0, self.rows if self.columns else 0, step):
            end = min(self.rows, begin + step)
            yield [space[: end - begin].copy_(rows(begin, end)) for space, rows in zip(room, tensors, strict=True)]

    def changes(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """The base, and how each of the others differs from it."""
        for base, *others in self.blocks():
            yield base, [each.sub_(base) for each in others]


def in_memory(tensor: Tensor) -> RowReader:
    """A tensor that is there already."""
    whole = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    return lambda begin, end: whole[begin:end]


def weighted(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum, in the order given; what weighs nothing is not looked at."""
    parts = [(tensor, weight) for tensor, weight in zip(tensors, weights, strict=True) if weight]
    if not parts:
        return torch.zeros_like(tensors[0])
    (first, weight), *rest = parts
    total = first * weight
    for tensor, weight in rest:
        total.add_(tensor, alpha=weight)
    return total


def summed(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for each in tensors[1:]:
        total.add_(each)
    return total

"""How the numbers of a model that learn lie in one flat vector."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape that lie side by side."""

    count: int
    rows: int
    columns: int
    whole: int  # rows of a whole matrix, of which one of several ranks has a part

    @property
    def size(self) -> int:
        return self.count * self.rows * self.columns


@dataclass(frozen=True)
class VectorLayout:
    """Where each parameter lies in the flat vector: first the matrices within the model, those of one shape side by
    side; then embeddings and heads, which decay, too; then all others."""

    shapes: Mapping[str, tuple[int, ...]]
    within: int  # parameters at the beginning that are matrices within the model
    stacks: tuple[Stack, ...]  # these matrices
    decaying: int  # numbers at the beginning that weight decay acts on

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    @property
    def hidden(self) -> int:
        """Numbers of the matrices within the model."""
        return sum(each.size for each in self.stacks)

    @property
    def outside(self) -> "VectorLayout":
        """Of a vector that has all numbers but those."""
        return VectorLayout(dict(list(self.shapes.items())[self.within :]), 0, (), self.decaying - self.hidden)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        found, begin = {}, 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape)
            found[name], begin = vector[begin:end].view(shape), end
        return found

    def stacked(self, hidden: Tensor) -> list[Tensor]:
        """The matrices, of the numbers at the beginning."""
        parts = hidden.split([each.size for each in self.stacks])
        return [part.view(each.count, each.rows, each.columns) for part, each in zip(parts, self.stacks, strict=True)]

"""The outer step: what DiLoCo does with everybody's changes, and each EDT member with its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from merge.wire import BLOCK

State = tuple[Tensor, ...]  # weights, and their momentum if there is one


@dataclass(frozen=True)
class OuterOptimizer:
    """Nesterov momentum on changes, as torch.optim.SGD has it on gradients."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(self, state: Sequence[Tensor], change: Tensor) -> State:
        """A change is where training began minus where it ended."""
        start, *remembered = state
        if not remembered:
            return (start.sub(change, alpha=self.lr),)
        momentum = (remembered[0] * self.momentum).add_(change)
        step = change.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        return start.sub(step, alpha=self.lr), momentum

    def without_lookahead(self, state: Sequence[Tensor]) -> Tensor:
        """Where the weights are without the step that they are ahead by, which a next one would correct."""
        weights, *remembered = state
        ahead = self.nesterov and remembered
        return weights.add(remembered[0], alpha=self.lr * self.momentum) if ahead else weights


def means(vectors: list[Iterator[Tensor]]) -> Iterator[Tensor]:
    """The mean of several vectors, piece by piece, summed in their order."""
    for first, *others in zip(*vectors, strict=True):
        total = first.clone()
        for other in others:
            total.add_(other)
        yield total.div_(len(vectors))


def ranges(size: int, shards: int) -> list[range]:
    """Equal parts of a flat vector, but for whole blocks; the last may be shorter, even empty."""
    part = -(-size // (shards * BLOCK)) * BLOCK
    return [range(min(size, s * part), min(size, (s + 1) * part)) for s in range(shards)]

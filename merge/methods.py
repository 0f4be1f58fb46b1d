"""Ways to make one tensor of several. Pure: fp32 in, fp32 out, sums in the order given."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PARALLEL = 1e-6  # sines below this mean that two directions are the same, or opposite


def linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted sum."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """From a to b along the arc between their directions; a straight line where they have the same one."""
    x, y = a.double(), b.double()
    lengths = x.norm() * y.norm()
    cosine = (x * y).sum() / lengths if lengths > 0 else torch.tensor(1.0)
    angle = torch.acos(cosine.clamp(-1, 1))
    sine = torch.sin(angle)
    if sine < _PARALLEL:
        return linear([a, b], [1 - t, t])
    return ((torch.sin((1 - t) * angle) * x + torch.sin(t * angle) * y) / sine).to(a.dtype)


def slerp_all(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """One after the other, each by its share of what has been merged so far; of two it is plain slerp."""
    merged, so_far = tensors[0], weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        so_far += weight
        merged = slerp(merged, tensor, weight / so_far if so_far else 0.5)
    return merged

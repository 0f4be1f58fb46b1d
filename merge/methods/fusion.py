"""Methods that choose numbers by how much they differ."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from merge.methods.magnitude_ranks import Largest, cuts, masked_
from merge.tensor_group import Group, Params, summed, weighted


def sce(group: Group, p: Params) -> Iterator[Tensor]:
    """Select what varies most between the models, weigh models by the energy of that, erase the minority's signs."""
    n = len(group.others)
    selected = _most_varied(group, p["select_topk"])
    energy = torch.zeros(n, dtype=torch.float64)
    for _, changes in selected():
        energy += torch.stack([(change * change).sum(dtype=torch.float64) for change in changes]).cpu()
    total = float(energy.sum())
    weights = [float(each) / total for each in energy] if total > 0 else [1 / n] * n
    for base, changes in selected():
        up = summed(changes) >= 0
        agrees = [torch.where(up, change > 0, change < 0) for change in changes]
        mixed = weighted([change * same for change, same in zip(changes, agrees, strict=True)], weights)
        divisor = weighted([same.float() for same in agrees], weights)
        yield base + mixed.div_(divisor.add_(divisor == 0))


def _most_varied(group: Group, share: float) -> Any:
    """The changes, of which only those numbers are left that vary most between the models."""
    if share >= 1:
        return group.changes

    def variances() -> Iterator[Sequence[Tensor]]:
        return ([variance(changes)] for _, changes in group.changes())

    varied = sum(int(each.count_nonzero()) for (each,) in variances())
    ((cut,),) = cuts(variances, group.size, [[int(varied * share)]])

    def selected() -> Iterator[tuple[Tensor, list[Tensor]]]:
        largest = Largest(cut)
        for base, changes in group.changes():
            mask = largest(variance(changes))
            yield base, [masked_(change, mask) for change in changes]

    return selected


def variance(tensors: Sequence[Tensor]) -> Tensor:
    """Of each number between the tensors."""
    mean = summed(tensors).div_(len(tensors))
    total = torch.zeros_like(mean)
    for each in tensors:
        off = each - mean
        total.add_(off.mul_(off))
    return total.div_(len(tensors)).abs_()  # a NaN may have a sign, which would be counted as bits


def ram(group: Group, p: Params) -> Iterator[Tensor]:
    """What one model alone has changed is taken over as it is; of what several have, their mean."""
    return _shared_out(group, p["epsilon"], [1.0] * len(group.others))


def ramplus_tl(group: Group, p: Params) -> Iterator[Tensor]:
    """The same; and what a model alone has changed counts for more, the more of its changes others have, too."""
    unique, shared = torch.zeros(2, len(group.others), dtype=torch.int64)
    for _, changes in group.changes():
        moved, count = _moved(changes, p["epsilon"])
        for n, each in enumerate(moved):
            unique[n] += int((each & (count == 1)).sum())
            shared[n] += int((each & (count > 1)).sum())
    ratios = [s / max(1, u) for s, u in zip(shared.tolist(), unique.tolist(), strict=True)]
    return _shared_out(group, p["epsilon"], [1 + p["r"] * min(ratio, p["alpha"]) for ratio in ratios])


def _shared_out(group: Group, epsilon: float, factors: Sequence[float]) -> Iterator[Tensor]:
    for base, changes in group.changes():
        moved, count = _moved(changes, epsilon)
        parts = [masked_(change, each).div_(count.clamp(min=1)) for change, each in zip(changes, moved, strict=True)]
        alone = [torch.where(count == 1, part * factor, part) for part, factor in zip(parts, factors, strict=True)]
        yield base + summed(alone)


def _moved(changes: Sequence[Tensor], epsilon: float) -> tuple[list[Tensor], Tensor]:
    """Which numbers each model has changed by more than epsilon, and how many models have."""
    moved = [change.abs() > epsilon for change in changes]
    return moved, summed([each.float() for each in moved])


def nearswap(group: Group, p: Params) -> Iterator[Tensor]:
    """Towards the other by at most t."""
    for base, (change,) in group.changes():
        yield base + change.clamp(-p["t"], p["t"])


def arcee_fusion(group: Group, p: Params) -> Iterator[Tensor]:
    """Take over what is unusually important: above the median by 1.5 times the distance between the quartiles."""

    def importances() -> Iterator[list[Tensor]]:
        return ([importance(base, other)] for base, other in group.blocks())

    quartiles = [int(q * (group.size - 1)) for q in (0.25, 0.5, 0.75)]
    (found,) = cuts(importances, group.size, [[group.size - rank for rank in quartiles]])
    low, middle, high = (torch.tensor(max(0, cut.bits), dtype=torch.int32).view(torch.float32) for cut in found)
    threshold = float(middle + 1.5 * (high - low))
    for base, other in group.blocks():
        yield base + (other - base) * (importance(base, other) >= threshold)


def importance(base: Tensor, other: Tensor) -> Tensor:
    """How far a number has moved, times how differently its row is distributed."""
    p, q = torch.log_softmax(other.double(), -1), torch.log_softmax(base.double(), -1)
    distance = (p.exp() * (p - q)).sum(-1, keepdim=True).clamp_min_(0)
    return (other - base).mul_(distance.float()).abs_()  # of a NaN, too, whose sign would be counted as bits

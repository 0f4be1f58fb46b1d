"""Methods that look at every number by itself."""

from collections.abc import Iterator

from torch import Tensor

from merge.methods.arcs import shares
from merge.names import writes_to_residual
from merge.tensor_group import Group, Params, weighted


def linear(group: Group, p: Params) -> Iterator[Tensor]:
    """The weighted mean."""
    weights = shares(p["weight"]) if p["normalize"] else p["weight"]
    return (weighted(each, weights) for each in group.blocks())


def passthrough(group: Group, p: Params) -> Iterator[Tensor]:
    """One tensor, scaled."""
    (scale,), (residual,) = p["scale"], p["residual"]
    factor = scale * (residual if writes_to_residual(group.name) else 1.0)
    return (weighted(each, [factor]) for each in group.blocks())


def nearswap(group: Group, p: Params) -> Iterator[Tensor]:
    """Towards the other by at most t."""
    for base, (change,) in group.changes():
        yield base + change.clamp(-p["t"], p["t"])

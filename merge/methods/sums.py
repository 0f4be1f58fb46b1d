"""Methods that look at every number by itself."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from merge.group import Group, weighted
from merge.methods.arcs import shares

Params = Mapping[str, Any]


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


_OUTPUTS = ("o_proj", "out_proj", "down_proj", "c_proj", "fc2", "fc_out", "dense", "dense_4h_to_h", "w2", "wo")


def writes_to_residual(name: str) -> bool:
    """Whether a tensor is the last matrix of attention or of the MLP: what it makes is added to the residual stream."""
    return any(part in _OUTPUTS for part in name.split("."))

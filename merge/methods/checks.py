"""Relations between a method's parameters that no limit of a single one says. No torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.errors import UserError


def shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    if abs(total) < 1e-12:
        raise UserError(f"the weights {', '.join(map(str, weights))} sum to 0: they cannot be normalized")
    return [weight / total for weight in weights]


def check_shares(p: Mapping[str, Any]) -> None:
    if p.get("normalize", p.get("normalize_weights", True)):
        shares(p["weight"])


def check_della(p: Mapping[str, Any]) -> None:
    for density, epsilon in zip(p["density"], p["epsilon"], strict=True):
        if 0 < density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            raise UserError(
                f"density {density} with epsilon {epsilon}: density - epsilon and + epsilon must lie in (0, 1)"
            )

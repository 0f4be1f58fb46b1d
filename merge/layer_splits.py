"""Split points along the layers, between which parameters stay what they are: in recipes, and in what is searched."""

from collections.abc import Sequence
from itertools import groupby


def depth_of(layer: int, last: int) -> float:
    """From 0, the first layer, to 1, the last; a layer alone is the last."""
    return layer / last if last else 1.0


def part_at(depth: float, splits: Sequence[float]) -> int:
    """How many split points lie at this depth or before it, in whatever order they are told."""
    return sum(split <= depth for split in splits)


def parts(splits: Sequence[float], layers: int) -> list[tuple[int, int, int]]:
    """Of each part that has layers its number, the first of them, and the one behind the last."""
    found = []
    for part, each in groupby(range(layers), lambda layer: part_at(depth_of(layer, layers - 1), splits)):
        members = [*each]
        found.append((part, members[0], members[-1] + 1))
    return found

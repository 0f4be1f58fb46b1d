"""Who is fitter, and who has children with whom. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rival:
    """A member as selection sees it: more of each objective is better."""

    id: str
    fitness: float
    objectives: Mapping[str, float]


def ordered(rivals: Sequence[Rival], pareto: bool) -> list[Rival]:
    """The best first. Pareto: by the front that they stand in, then by how lonely they are there."""
    if not pareto:
        return sorted(rivals, key=lambda one: (-one.fitness, one.id))
    found: list[Rival] = []
    for front in fronts(rivals):
        lonely = crowding(front)
        found += sorted(front, key=lambda one: (-lonely[one.id], -one.fitness, one.id))
    return found


def fronts(rivals: Sequence[Rival]) -> list[list[Rival]]:
    """Whom nobody beats in everything; whom nobody else does; and so on."""
    left, found = list(rivals), list[list[Rival]]()
    while left:
        front = [one for one in left if not any(dominates(other, one) for other in left)]
        found.append(front)
        left = [one for one in left if one not in front]
    return found


def dominates(one: Rival, other: Rival) -> bool:
    pairs = [(one.objectives[key], other.objectives[key]) for key in other.objectives]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def crowding(front: Sequence[Rival]) -> dict[str, float]:
    """How far a member's neighbours are, summed over the objectives; those at the ends are the loneliest."""
    found = {one.id: 0.0 for one in front}
    for key in front[0].objectives if front else ():
        line = sorted(front, key=lambda one: (one.objectives[key], one.id))
        if not (wide := line[-1].objectives[key] - line[0].objectives[key]):
            continue
        found[line[0].id] = found[line[-1].id] = math.inf
        for before, one, after in zip(line, line[1:], line[2:], strict=False):
            found[one.id] += (after.objectives[key] - before.objectives[key]) / wide
    return found


def matched(ids: Sequence[str], slot: int, dice: np.random.Generator) -> list[str]:
    """Everybody is a parent equally often: two children each, one with either neighbour in a ring made by chance."""
    order = [ids[int(n)] for n in dice.permutation(len(ids))]
    return [order[slot % len(order)], order[(slot + 1) % len(order)]]

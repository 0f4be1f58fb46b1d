"""Who is fitter, and who becomes a parent. Pure."""

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
        wide = line[-1].objectives[key] - line[0].objectives[key]
        found[line[0].id] = found[line[-1].id] = math.inf
        for before, one, after in zip(line, line[1:], line[2:], strict=False):
            found[one.id] += (after.objectives[key] - before.objectives[key]) / wide if wide else 0.0
    return found


def couple(order: Sequence[Rival], rule: str, count: int, size: int, dice: np.random.Generator) -> list[str]:
    """Parents of one child, from the best to the worst of a generation."""
    count = min(count, len(order))
    match rule:
        case "rank":
            chances = np.arange(len(order), 0, -1, dtype=float)
            picked = [int(n) for n in dice.choice(len(order), count, replace=False, p=chances / chances.sum())]
        case "tournament" | "pareto":
            picked, left = [], list(range(len(order)))
            for _ in range(count):
                picked.append(int(min(dice.choice(left, min(size, len(left)), replace=False))))
                left.remove(picked[-1])
        case _:
            picked = [int(n) for n in dice.choice(len(order), count, replace=False)]
    return [order[n].id for n in picked]


def matched(ids: Sequence[str], slot: int, dice: np.random.Generator) -> list[str]:
    """Everybody is a parent equally often: partners by chance, each pair with two children."""
    order = [ids[int(n)] for n in dice.permutation(len(ids))]
    place = slot % len(order)
    partner = place ^ 1 if place ^ 1 < len(order) else 0
    return [order[place], order[partner]]

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
    beats = dominance(rivals)
    above, left, found = beats.sum(0), np.ones(len(rivals), bool), list[list[Rival]]()
    while left.any():
        front = np.flatnonzero(left & (above == 0))
        found.append([rivals[int(n)] for n in front])
        left[front] = False
        above = above - beats[front].sum(0)
    return found


def dominance(rivals: Sequence[Rival]) -> np.ndarray:
    """Who (row) is as good as whom (column) in every objective and better in one."""
    equal, better = np.ones((len(rivals), len(rivals)), bool), np.zeros((len(rivals), len(rivals)), bool)
    for key in rivals[0].objectives if rivals else ():
        line = np.array([one.objectives[key] for one in rivals])
        equal &= line[:, None] >= line
        better |= line[:, None] > line
    return equal & better


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
    order = dice.permutation(len(ids))
    return [ids[int(order[n % len(ids)])] for n in (slot, slot + 1)]

"""Who is fitter, and who has children with whom. Pure: all chance comes from the generators that are handed in."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Rng = np.random.Generator


@dataclass(frozen=True)
class Rival:
    """A member as selection sees it: more of each objective is better."""

    id: str
    fitness: float
    objectives: Mapping[str, float]
    solved: Sequence[float] = ()  # how far each question, between 0 and 1: the same ones for all rivals
    worth: Sequence[float] = ()  # of each question


# -- who is fitter -----------------------------------------------------------------------------------------------------


def by_fitness(rivals: Sequence[Rival]) -> list[Rival]:
    """The best first."""
    return sorted(rivals, key=lambda one: (-one.fitness, one.id))


def unfitness(metrics: Mapping[str, Any]) -> tuple[bool, float]:
    """Of a member: the less, the fitter. Its loss, unless it has a fitness; who has none, as after training that has
    diverged, comes after all who have, and who has neither is the last."""
    if "fitness" in metrics:
        return False, -float(metrics["fitness"])
    return True, float(metrics.get("loss", math.inf))


def by_fronts(rivals: Sequence[Rival]) -> list[Rival]:
    """By the front that they stand in, then by how lonely they are there."""
    places = ((place, front, crowding(front)) for place, front in enumerate(fronts(rivals)))
    keys = {one.id: (place, -lonely[one.id], -one.fitness, one.id) for place, front, lonely in places for one in front}
    return sorted(rivals, key=lambda one: keys[one.id])


def fronts(rivals: Sequence[Rival]) -> list[list[Rival]]:
    """Whom nobody beats in everything; whom nobody else does; and so on."""
    beats = dominance([one.objectives for one in rivals])
    above, left, found = beats.sum(0), np.ones(len(rivals), bool), list[list[Rival]]()
    while left.any():
        front = np.flatnonzero(left & (above == 0))
        found.append([rivals[int(n)] for n in front])
        left[front] = False
        above = above - beats[front].sum(0)
    return found


def dominance(objectives: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Who (row) is as good as whom (column) in every objective and better in one."""
    equal, better = np.ones((len(objectives),) * 2, bool), np.zeros((len(objectives),) * 2, bool)
    for key in objectives[0] if objectives else ():
        line = np.array([one[key] for one in objectives])
        equal &= line[:, None] >= line
        better |= line[:, None] > line
    return equal & better


def crowding(front: Sequence[Rival]) -> dict[str, float]:
    """How far a member's neighbours are, summed over the objectives; those at the ends are the loneliest."""
    found = {one.id: 0.0 for one in front}
    for key in front[0].objectives:
        line = sorted(front, key=lambda one: (one.objectives[key], one.id))
        if not (wide := line[-1].objectives[key] - line[0].objectives[key]):
            continue
        found[line[0].id] = found[line[-1].id] = math.inf
        for before, one, after in zip(line, line[1:], line[2:], strict=False):
            found[one.id] += (after.objectives[key] - before.objectives[key]) / wide
    return found


def by_niches(rivals: Sequence[Rival]) -> list[Rival]:
    """By shared fitness: a question's worth is divided among those who solve it (M2N2: Abrantes, Lange and Tang, 2025).
    So whoever solves what few do is fit, however little else it knows."""
    rewards, solved = _rewards(rivals), _solved(rivals)
    shares = {one.id: float(share) for one, share in zip(rivals, solved @ rewards, strict=True)}
    return sorted(rivals, key=lambda one: (-shares[one.id], -one.fitness, one.id))


def attracted(rivals: Sequence[Rival], one: int, rng: Rng) -> int:
    """The mate of one of them: each of the others is as likely as what it solves beyond the one is worth, which is the
    more the fewer solve it. If nobody has anything to add, all are equally likely."""
    others = [n for n in range(len(rivals)) if n != one] or [one]
    solved = _solved(rivals)
    gains = np.maximum(solved[others] - solved[one], 0) @ _rewards(rivals)
    return int(rng.choice(others, p=gains / gains.sum() if gains.sum() > 0 else None))


Spans = Mapping[str, tuple[float, float]]  # of each objective, from the least to the most


def spans(rivals: Sequence[Rival]) -> Spans:
    """How far apart they are in each objective."""
    lines = {key: [one.objectives[key] for one in rivals] for key in rivals[0].objectives}
    return {key: (min(line), max(line)) for key, line in lines.items()}


def archived(rivals: Sequence[Rival], over: Spans, steps: int) -> list[Rival]:
    """The fittest of each cell, the best first; a cell is a step of each objective between those ends, and whoever is
    beyond one stands in the last (MAP-Elites: Mouret and Clune, 2015)."""
    found = dict[tuple[int, ...], Rival]()
    for one in by_fitness(rivals):
        found.setdefault(tuple(_step(one.objectives[key], *ends, steps) for key, ends in over.items()), one)
    return [*found.values()]


def _step(value: float, low: float, high: float, steps: int) -> int:
    share = (value - low) / (high - low) if high > low else float(value > high)
    return min(steps - 1, max(0, int(share * steps)))


def _solved(rivals: Sequence[Rival]) -> np.ndarray:
    return np.array([one.solved for one in rivals], float).reshape(len(rivals), -1)


def _rewards(rivals: Sequence[Rival]) -> np.ndarray:
    """What solving each question brings, where all who do share its worth; what nobody solves brings nothing yet."""
    by = _solved(rivals).sum(0)
    found: np.ndarray = np.divide(np.array(rivals[0].worth, float), by, out=np.zeros_like(by), where=by > 0)
    return found


# -- the fitter are parents more often: `count` places in the order of fitness, in which 0 is the fittest -------------


def by_rank(candidates: int, count: int, tournament_size: int, rng: Rng) -> Sequence[int]:
    """The fittest is drawn `candidates` times as often as the last."""
    chances = np.arange(candidates, 0, -1, dtype=float)
    return list(rng.choice(candidates, count, replace=False, p=chances / chances.sum()))


def by_tournaments(candidates: int, count: int, tournament_size: int, rng: Rng) -> Sequence[int]:
    left = list(range(candidates))
    return [left.pop(winner(len(left), tournament_size, rng)) for _ in range(count)]


def winner(candidates: int, tournament_size: int, rng: Rng) -> int:
    """The fittest of those that meet by chance."""
    return int(min(rng.choice(candidates, min(tournament_size, candidates), replace=False)))


def uniformly(candidates: int, count: int, tournament_size: int, rng: Rng) -> Sequence[int]:
    """All are equally likely."""
    return list(rng.choice(candidates, count, replace=False))


def exploited(order: Sequence[str], own: str, rng: Rng) -> str:
    """Population based training: who is of the worst fifth goes on from one of the best fifth, all others from their
    own."""
    some = max(1, len(order) // 5)
    return order[int(rng.integers(some))] if own in order[-some:] else own


@dataclass(frozen=True)
class SelectionRule:
    """How parents are picked: `pick(candidates, count, tournament_size, rng)` gives their places in the order."""

    pick: Callable[[int, int, int, Rng], Sequence[int]]
    order: Callable[[Sequence[Rival]], list[Rival]] = by_fitness
    several: bool = False  # objectives that it needs
    marks: bool = False  # of single questions that it needs
    archives: bool = False  # only those who are the fittest of their cells are parents, and they stay


RULES: Mapping[str, SelectionRule] = {
    "rank": SelectionRule(by_rank),
    "tournament": SelectionRule(by_tournaments),
    "random": SelectionRule(uniformly),
    "pareto": SelectionRule(by_tournaments, by_fronts, several=True),
    "niches": SelectionRule(by_tournaments, by_niches, marks=True),
    "archive": SelectionRule(uniformly, several=True, archives=True),
}
# whose members have one loss, and no marks
RULES_OF_EDT = tuple(name for name, rule in RULES.items() if not (rule.several or rule.marks))


def select_parents(rule: str, candidates: int, count: int, tournament_size: int, rng: Rng) -> list[int]:
    """Their places in the order of fitness, in which 0 is the fittest."""
    return [int(n) for n in RULES[rule].pick(candidates, min(count, candidates), tournament_size, rng)]


# -- everybody is a parent equally often ------------------------------------------------------------------------------


def hypercubes(generation: int, population: int, size: int, rng: Rng) -> dict[int, list[int]]:
    found = dict[int, list[int]]()
    for k in range(population):
        if k not in found:
            found |= dict.fromkeys(group := hypercube(k, generation, population, size), group)
    return found


def hypercube(k: int, generation: int, population: int, size: int) -> list[int]:
    """The slots that differ from k only in this generation's directions; after a few generations everybody's work has
    reached everybody."""
    directions, wide = population.bit_length() - 1, size.bit_length() - 1
    group = {k}
    for i in range(wide if directions else 0):
        group |= {member ^ (1 << (generation * wide + i) % directions) for member in group}
    return sorted(group)


def groups_by_chance(generation: int, population: int, size: int, rng: Rng) -> dict[int, list[int]]:
    order = [int(k) for k in rng.permutation(population)]
    groups = [sorted(order[begin : begin + size]) for begin in range(0, len(order), size)]
    return {k: group for group in groups for k in group}


GROUPINGS: Mapping[str, Callable[[int, int, int, Rng], dict[int, list[int]]]] = {  # each slot's parents: its group
    "hypercube": hypercubes,
    "matching": groups_by_chance,
}


def matched(ids: Sequence[str], slot: int, rng: Rng) -> list[str]:
    """Two children each, one with either neighbour in a ring made by chance."""
    order = rng.permutation(len(ids))
    return [ids[int(order[n % len(ids)])] for n in (slot, slot + 1)]

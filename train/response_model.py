"""From some answers to all of them: the two-parameter logistic model of item response theory, with several abilities.

An item, which is one metric's mark of one question, has a slope for each ability, and an intercept; who has abilities t
gets it right with the chance 1 / (1 + exp(-(slopes t + intercept))). In float64, and nothing is drawn by chance. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

Array = np.ndarray

_ROUNDS = 30  # of expectation and maximization: after them items move by less than their priors allow
_ABILITIES = 2  # one that all items ask for, and one by which models differ otherwise
_SLOPE, _SLOPES, _INTERCEPTS = 1.0, 0.4, 2.0  # what is expected of an item: its first slope; how far each may be off
_BEYOND = 1.5  # whoever comes later may be so much farther from the middle than those by whom items became known
_WIDE, _FINE = 4.5, 15  # the grid of abilities: how far it goes, and its points along each
_ROUGH = 7  # points along each, where only the choice of items depends on it
_PARTS = 8  # in which respondents are left out in turn


@dataclass(frozen=True)
class ResponseModel:
    """What is known of items: the less it is, the nearer to 1/2 are the chances that it tells."""

    slopes: Array  # item by ability
    intercepts: Array
    widening: float = 1.0  # errors are that many times what the model by itself would say

    def chances(self, abilities: Array) -> Array:
        return _logistic(abilities @ self.slopes.T + self.intercepts)


@dataclass(frozen=True)
class Estimate:
    """Of the weighted sum of all marks, of which some are known."""

    value: float
    error: float  # its standard error
    marks: Array  # of each item: the known one, or what is to be expected


def fitted(answers: Array, abilities: int = _ABILITIES) -> ResponseModel:
    """By expectation and maximization over a grid of abilities (Bock and Aitkin, 1981), with a prior for each item.
    `answers`, respondent by item, lie between 0 and 1."""
    grid, chance = _grid(abilities, _FINE)
    design = np.column_stack([grid, np.ones(len(grid))])
    expected = np.array([_SLOPE] + [0.0] * abilities)
    sure = np.diag([_SLOPES**-2] * abilities + [_INTERCEPTS**-2])
    items = _beginning(answers, abilities)
    for _ in range(_ROUNDS):
        p = _logistic(design @ items.T)
        who = _posterior(answers, p, chance)
        there = who.sum(0)[:, None]
        gradient = (who.T @ answers - there * p).T @ design - (items - expected) @ sure
        curved = _curvature(there * p * (1 - p), design) + sure
        items = items + np.clip(np.linalg.solve(curved, gradient[..., None])[..., 0], -1, 1)
    spread = np.trace(np.linalg.inv(curved), axis1=1, axis2=2)  # of the logit of somebody near the middle
    items = items / np.sqrt(1 + np.pi / 8 * spread)[:, None]  # which brings a chance that much nearer to 1/2
    return ResponseModel(items[:, :-1], items[:, -1])


def estimated(model: ResponseModel, weights: Array, asked: Sequence[int], answers: Array) -> Estimate:
    """From the answers to some items; `weights` are those of all items in the sum."""
    grid, chance = _grid(model.slopes.shape[1], _FINE, _BEYOND)
    p, known = model.chances(grid), np.zeros(len(weights), bool)
    known[list(asked)] = True
    (who,) = _posterior(answers[None, :], p[:, list(asked)], chance)
    marks = who @ p
    marks[list(asked)] = answers
    sums = p[:, ~known] @ weights[~known]
    of_ability = who @ (sums - who @ sums) ** 2
    of_luck = (who @ (p * (1 - p)))[~known] @ weights[~known] ** 2
    return Estimate(float(marks @ weights), float(np.sqrt(of_ability + of_luck)) * model.widening, marks)


def informative(model: ResponseModel, weights: Array, questions: Array, count: int, among: Sequence[int]) -> list[int]:
    """So many questions, one after the other: always the one that leaves the sum the smallest variance, on average over
    the abilities that somebody may have. `questions` says whose mark each item is; of equal ones the first is taken."""
    abilities = model.slopes.shape[1]
    grid, chance = _grid(abilities, _ROUGH, _BEYOND)
    p = model.chances(grid)
    v, left, found = p * (1 - p), np.isin(questions, among), list[int]()
    steep = (v * weights) @ model.slopes  # of the sum, in each ability
    known = np.broadcast_to(np.eye(abilities) / _BEYOND**2, (len(grid), abilities, abilities))
    while left.any() and len(found) < count:
        inverse = np.linalg.inv(known)
        along = np.einsum("gab,gb,ja->gj", inverse, steep, model.slopes)
        across = np.einsum("ja,gab,jb->gj", model.slopes, inverse, model.slopes)
        gain = (chance @ (v * along**2 / (1 + v * across) + v * weights**2)) * left
        whole = np.bincount(questions, gain)
        if not whole.max() > 0:  # the others count for nothing
            break
        found.append(int(np.argmax(np.round(whole / whole.max(), 9))))
        its = questions == found[-1]
        left = left & ~its
        known = known + np.einsum("gj,ja,jb->gab", v[:, its], model.slopes[its], model.slopes[its])
    return sorted(found)


def widened(answers: Array, weights: Array, questions: Array, count: int) -> float:
    """By how much an estimate from so many questions is farther off than its model says: seen by respondents that the
    model and its choice of questions know nothing of, a part of them after the other. Never below 1."""
    parts = [np.arange(n, len(answers), _PARTS) for n in range(min(_PARTS, len(answers)))]
    off = list[float]()
    for part in parts if len(answers) > 2 else []:
        model = fitted(np.delete(answers, part, 0))
        chosen = informative(model, weights, questions, count, range(int(questions.max()) + 1))
        asked = np.flatnonzero(np.isin(questions, chosen))
        found = [(estimated(model, weights, [*asked], one[asked]), one @ weights) for one in answers[part]]
        off += [(each.value - whole) / each.error for each, whole in found if each.error]
    return max(1.0, float(np.sqrt(np.mean(np.square(off))))) if off else 1.0


def _beginning(answers: Array, abilities: int) -> Array:
    """Where items begin: the first slope as expected, the others as the answers vary most."""
    mean = np.clip(answers.mean(0), 0.05, 0.95)
    _, _, directions = np.linalg.svd(answers - answers.mean(0), full_matrices=False)
    directions = directions[: abilities - 1]
    turned = np.sign(directions[np.arange(len(directions)), np.abs(directions).argmax(1)])
    others = np.zeros((answers.shape[1], abilities - 1))
    others[:, : len(directions)] = (directions * turned[:, None]).T * np.sqrt(answers.shape[1]) / 2
    return np.column_stack([np.full(len(mean), _SLOPE), others, np.log(mean / (1 - mean))])


def _posterior(answers: Array, p: Array, chance: Array) -> Array:
    """How likely each point of the grid is, for each respondent."""
    told = answers @ np.log(p).T + (1 - answers) @ np.log1p(-p).T + np.log(chance)
    likely = np.exp(told - told.max(1, keepdims=True))
    whole: Array = likely / likely.sum(1, keepdims=True)
    return whole


def _curvature(weights: Array, design: Array) -> Array:
    """For each item, the weighted sum of the design's outer squares."""
    squares = (design[:, :, None] * design[:, None, :]).reshape(len(design), -1)
    found: Array = weights.T @ squares
    return found.reshape(-1, design.shape[1], design.shape[1])


@cache
def _grid(abilities: int, points: int, spread: float = 1.0) -> tuple[Array, Array]:
    """Points, and how likely each is: standard normal, or wider."""
    line = np.linspace(-_WIDE, _WIDE, points)
    grid = np.stack(np.meshgrid(*[line] * abilities, indexing="ij"), -1).reshape(-1, abilities)
    likely = np.exp(-((grid / spread) ** 2).sum(1) / 2)
    return grid, likely / likely.sum()


def _logistic(x: Array) -> Array:
    found: Array = np.clip(1 / (1 + np.exp(-np.clip(x, -30, 30))), 1e-9, 1 - 1e-9)
    return found

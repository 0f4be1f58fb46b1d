"""Formulas of the first generation, mutation, crossover, selection. Pure: all chance is handed in."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from evomerge.config import STAGES, EvolutionSettings, MergeSettings
from evomerge.formula import BLEND, MOST, Blend, Formula, Step, in_words, lighter
from evomerge.techniques import ENGINE_METHODS
from merge.parameters import within
from train.parent_selection import Rival, Rng, attracted, by_niches, winner

_LEAST, _GREATEST = 1e-3, 1e3  # shares
_SCALES = (0.1, 3.0)


@dataclass(frozen=True)
class Pool:
    """What formulas are made from."""

    settings: MergeSettings
    names: Sequence[str]  # of the models
    layers: int  # of each of them

    @property
    def longest(self) -> int:
        """Steps of a path."""
        return int(self.layers * self.settings.longest_path)


@dataclass(frozen=True)
class Scored:
    """A model of a generation."""

    id: str
    formula: Formula
    score: float | None  # None: it could not be made, or not be scored
    solved: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of each objective, how far each question


@dataclass(frozen=True)
class Child:
    """What a generation adds."""

    formula: Formula
    technique: str  # how it came from its parents
    parents: tuple[str, ...] = ()
    carried: bool = False  # an elite: its only parent, unchanged


# -- the first generation ---------------------------------------------------------------------------------------------


def first(pool: Pool, size: int, seed: int) -> list[Formula]:
    """Every combination of the techniques; where there is room for more, again with other weights or paths."""
    stages = [pool.settings.of_stage(stage) for stage in STAGES]
    combinations = [*product(*(stage or [""] for stage in stages))]
    found: list[Formula] = []
    for n in range(size):
        rng, turn = np.random.default_rng([seed, 1, n]), n // len(combinations)
        techniques = combinations[n % len(combinations)]
        for _ in range(20):  # with few layers, two paths may be alike
            one = combined(pool, techniques, rng, even=turn == 0)
            if weights_of(one) not in map(weights_of, found):
                break
        found.append(one)
    return found


def combined(pool: Pool, techniques: Sequence[str], rng: Rng, even: bool = True) -> Formula:
    """Two models by linear or slerp, what comes out and the others by ties or dare, then a path through all of it."""
    (first, second, third), names = techniques, pool.names
    blend: str | Blend | None = None
    if first:
        pair = names[:2] if first == "slerp" or (second and len(names) > 2) else names
        blend = _blend(first, pair, pool.settings, rng, even)
    if second:
        rest = [name for name in names if blend is None or len(names) < 3 or name not in names[:2]]
        parts = [*([blend] if blend is not None else []), *rest]
        weights = [2.0 if isinstance(each, Blend) else 1.0 for each in parts]
        blend = _blend(second, parts, pool.settings, rng, even, weights)
    if not third:
        return Formula(blend=blend)
    path = _through_blend(pool, third, rng) if blend is not None else _through_models(pool, rng)
    return Formula(blend=blend, path=tuple(path), scaled=third == "dfs")


def _blend(
    technique: str,
    of: Sequence[str | Blend],
    settings: MergeSettings,
    rng: Rng,
    even: bool,
    weights: Sequence[float] = (),
) -> Blend:
    start = np.array(weights or [1.0] * len(of)) / sum(weights or [1.0] * len(of))
    if not even:
        start = start * np.exp(0.7 * rng.standard_normal(len(of)))
        start = start / start.sum()
    shares = tuple((float(share),) * settings.points for share in start)
    density = settings.density if technique in ("ties", "dare") else 1.0
    return Blend(technique=technique, of=tuple(of), shares=shares, density=density)


def _through_blend(pool: Pool, technique: str, rng: Rng) -> list[Step]:
    """frankenmerge: the last layers are a model's own. dfs: the blend's layers, one of them from a model."""
    name, layers = pool.names[int(rng.integers(len(pool.names)))], pool.layers
    if technique == "frankenmerge":
        cut = layers - int(rng.integers(1, max(2, layers // 3 + 1)))
        return [Step(model=BLEND if n < cut else name, layer=n) for n in range(layers)]
    path = [Step(layer=n) for n in range(layers)]
    place = int(rng.integers(max(1, layers - 1)))  # the last one would make a frankenmerge of it
    path[place] = Step(model=name, layer=place)
    return path


def _through_models(pool: Pool, rng: Rng) -> list[Step]:
    """Each layer of some model, a few in a row."""
    layers, order = pool.layers, [pool.names[n] for n in rng.permutation(len(pool.names))]
    length = int(rng.integers(1, max(2, layers)))
    offset = int(rng.integers(length))
    return [Step(model=order[(n + offset) // length % len(order)], layer=n) for n in range(layers)]


def weights_of(formula: Formula) -> Formula:
    """Formulas that are equal here make equal models."""
    return formula.model_copy(update={"scaled": False})


# -- children ---------------------------------------------------------------------------------------------------------


def mutated(formula: Formula, pool: Pool, e: EvolutionSettings, rng: Rng) -> Formula:
    """Other coefficients, another path; always something."""
    for _ in range(100):
        blend = _mutated_blend(formula.blend, e, rng) if formula.blend is not None else None
        path = _mutated_path(formula, pool, e, rng)
        made = formula.model_copy(update={"blend": blend, "path": path})
        if e.weight_noise:
            made = made.model_copy(update={"noise": e.weight_noise, "seed": int(rng.integers(1, 1 << 31))})
        if made != formula:
            return made
    return formula


def can_mutate(formula: Formula, e: EvolutionSettings) -> bool:
    return isinstance(formula.blend, Blend) or bool(formula.path) or e.weight_noise > 0


def _mutated_blend(node: str | Blend, e: EvolutionSettings, rng: Rng) -> str | Blend:
    if isinstance(node, str):
        return node
    of = tuple(_mutated_blend(each, e, rng) for each in node.of)
    shares = tuple(tuple(_factored(x, e, rng, _LEAST, _GREATEST) for x in each) for each in node.normed)
    update: dict[str, Any] = {"of": of, "shares": shares}
    if node.technique in ("ties", "dare"):
        told = {
            "density": _factored(node.density, e, rng, 0.02),
            "lambda": _factored(node.strength, e, rng, 0.05, 4.0),
        }
        (told,) = within(ENGINE_METHODS[node.technique], [told])
        update |= {"density": told["density"], "strength": told["lambda"]}
    return node.model_copy(update=update)


def _factored(x: float, e: EvolutionSettings, rng: Rng, low: float, high: float = math.inf) -> float:
    hit, by = rng.random() < e.mutation_rate, float(np.exp(e.mutation_strength * rng.standard_normal()))
    return min(high, max(low, x * by)) if hit else x


def _mutated_path(formula: Formula, pool: Pool, e: EvolutionSettings, rng: Rng) -> tuple[Step, ...]:
    """Scales of a path in data flow space; sometimes a step comes from elsewhere, is left out, or taken twice."""
    path = [*formula.path]
    if not path:
        return ()
    if formula.scaled:
        path = [step.model_copy(update={"scale": _factored(step.scale, e, rng, *_SCALES)}) for step in path]
    if rng.random() < e.mutation_rate:
        sources = [*pool.names, *([BLEND] if formula.blend is not None else [])]
        _moved(path, sources, pool, rng)
    return tuple(path)


def _moved(path: list[Step], sources: Sequence[str], pool: Pool, rng: Rng) -> None:
    place = int(rng.integers(len(path)))
    step = path[place]
    match rng.choice(["source", "source", "swap", "repeat", "drop", "layer"]):
        case "source":
            path[place] = step.model_copy(update={"model": str(rng.choice(list(sources)))})
        case "swap" if place + 1 < len(path):
            path[place], path[place + 1] = path[place + 1], step
        case "repeat" if len(path) < pool.longest:
            path.insert(place, step)
        case "drop" if len(path) > max(1, pool.layers // 2):
            del path[place]
        case "layer":
            layer = int(np.clip(step.layer + rng.choice([-1, 1]), 0, pool.layers - 1))
            path[place] = step.model_copy(update={"layer": layer})


def crossed(one: Formula, other: Formula, pool: Pool, e: EvolutionSettings, rng: Rng) -> tuple[Formula, str]:
    """A merge of two, and how: their blends are blended, their paths are joined somewhere."""
    technique = str(rng.choice(pool.settings.of_stage("first") or ["linear"]))
    blend, both = one.blend if other.blend is None else other.blend, one.blend is not None and other.blend is not None
    if one.blend is not None and other.blend is not None:
        share = float(np.clip(0.5 + e.mutation_strength * rng.standard_normal() / 2, 0.1, 0.9))
        of = (lighter(one.blend, MOST // 2), lighter(other.blend, MOST // 2))
        shares = ((1 - share,) * pool.settings.points, (share,) * pool.settings.points)
        blend = Blend(technique=technique, of=of, shares=shares)
    path = _joined(one.path, other.path, rng) if one.path and other.path else one.path or other.path
    made = Formula(blend=blend, path=path, scaled=one.scaled or other.scaled)
    if made in (one, other):
        made = mutated(made, pool, e, rng)
    return made, technique if both else in_words(made)


def _joined(one: tuple[Step, ...], other: tuple[Step, ...], rng: Rng) -> tuple[Step, ...]:
    """The beginning of the one and the end of the other, cut so that it is neither, if that can be."""
    joined = [(*one[: len(one) * n // 16], *other[len(other) * n // 16 :]) for n in rng.permutation(15) + 1]
    return next((each for each in joined if each not in (one, other)), one)


# -- who is selected --------------------------------------------------------------------------------------------------


def ranked(population: Sequence[Scored]) -> list[Scored]:
    """The best first; those without a score last."""
    return sorted(population, key=lambda one: (one.score is None, -(one.score or 0.0), _number(one.id)))


def _number(id: str) -> list[int]:
    """Of a member: 1/m2 comes before 1/m10."""
    return [int(part) for part in re.findall("[0-9]+", id)]


def _rival(one: Scored, worth: Mapping[str, float]) -> Rival:
    """As niches and attraction see it."""
    marks = [mark for some in one.solved.values() for mark in some]
    worths = [worth[key] / len(some) for key, some in one.solved.items() for _ in some]
    return Rival(one.id, one.score or 0.0, {}, marks, worths)


def _attracted(alive: Sequence[Scored], rivals: Sequence[Rival], e: EvolutionSettings, rng: Rng) -> list[Scored]:
    one = winner(len(alive), e.tournament_size, rng)
    return [alive[one], alive[attracted(rivals, one, rng)]]


def _two_of(lower: Sequence[Scored], rng: Rng) -> list[Scored]:
    return [lower[int(k)] for k in sorted(rng.choice(len(lower), 2, replace=False))]


def next_generation(
    population: Sequence[Scored],
    pool: Pool,
    e: EvolutionSettings,
    seed: Sequence[int],
    worth: Mapping[str, float] = MappingProxyType({}),
) -> list[Child]:
    """The elite; mutants of those who win tournaments; merges of the lower half, who get another chance together."""
    order = ranked(population)
    alive = [one for one in order if one.score is not None]
    elite = alive[: min(e.elite, e.population_size - 1)]
    rivals = [_rival(one, worth) for one in alive]
    if e.selection == "niches":
        rivals, there = by_niches(rivals), {one.id: one for one in alive}
        alive = [there[rival.id] for rival in rivals]
    found = [Child(one.formula, "elite", (one.id,), carried=True) for one in elite]
    seen = [weights_of(one.formula) for one in order]
    lower = alive[len(order) // 2 :]
    merges = (e.population_size - len(found)) // 3 if len(lower) > 1 else 0
    for n in range(len(found), e.population_size):
        rng = np.random.default_rng([*seed, n])
        if n < e.population_size - merges:
            best = alive[winner(len(alive), e.tournament_size, rng)]
            child = Child(mutated(best.formula, pool, e, rng), "mutation", (best.id,))
        else:
            pair = _attracted(alive, rivals, e, rng) if e.mates == "attraction" else _two_of(lower, rng)
            child = Child(*crossed(pair[0].formula, pair[1].formula, pool, e, rng), (pair[0].id, pair[1].id))
        for _ in range(20):  # nothing is made twice, where there is anything else
            if weights_of(child.formula) not in seen:
                break
            child = replace(child, formula=mutated(child.formula, pool, e, rng))
        seen.append(weights_of(child.formula))
        found.append(child)
    return found

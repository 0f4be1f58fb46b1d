"""What a member of post-training inherits and mutates: which data it learns from, how fast, how its parents merge."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from merge.methods import METHODS
from merge.parameters import within
from train.parent_selection import Rng
from train.posttrain.posttrain_config import PosttrainConfig
from train.rl.rl_config import COOLER, WARMER

Genome = Mapping[str, Any]  # data: name -> weight; rate; crossover: of the merge; temperature, rewards: of grpo
_RATES = (0.1, 10.0)
_LEAST, _MOST = 1e-6, 1e6  # weights of data, whose mean is 1 at the beginning


def first_genome(c: PosttrainConfig, rng: Rng) -> Genome:
    """What the configuration says, each a little different, so that there is something to choose from."""
    return mutated(c, unmutated(c), rng)


def unmutated(c: PosttrainConfig) -> Genome:
    mean = math.fsum(each.weight for each in c.mutation_datasets) / max(1, len(c.mutation_datasets))
    return {
        "data": {name: each.weight / mean for name, each in zip(names(c), c.mutation_datasets, strict=True)},
        "rate": 1.0,
        **({"temperature": c.grpo.temperature, "rewards": c.grpo.rewards} if c.grpo else {}),
        **({"crossover": c.curves} if c.crossover_evolves else {}),
    }


def names(c: PosttrainConfig) -> list[str]:
    """Of the data sets; each is different. A file's is its own, wherever it lies."""
    found: list[str] = []
    for each in c.mutation_datasets:
        words = [Path(each.source).name if each.is_file else each.source, each.name, each.split]
        name = ":".join(word for word in words if word not in ("", "train"))
        found.append(name if name not in found else f"{name}#{len(found)}")
    return found


def child(c: PosttrainConfig, parents: Sequence[Genome], rng: Rng) -> Genome:
    """Each gene of one parent or another; some children's genes are mutated."""
    crossed = _crossed(parents, rng)
    return mutated(c, crossed, rng) if rng.random() < c.mutation_probability else crossed


def mutated(c: PosttrainConfig, genome: Genome, rng: Rng) -> Genome:
    strength = c.mutation_strength

    def factor() -> float:
        return math.exp(strength * rng.standard_normal())

    def weighed(weights: Mapping[str, float]) -> dict[str, float]:
        """What counts nothing stays so."""
        return {name: _within(each * factor(), _LEAST, _MOST) if each else 0.0 for name, each in weights.items()}

    found = {"data": weighed(genome["data"]), "rate": _within(genome["rate"] * factor(), *_RATES)}
    if c.grpo:
        given = c.grpo.temperature
        found["temperature"] = _within(genome["temperature"] * factor(), given * COOLER, given * WARMER)
        found["rewards"] = weighed(genome["rewards"])
    if "crossover" not in genome:
        return found
    return {**found, "crossover": within(c.crossover["method"], [_bent(genome["crossover"], strength, rng)])[0]}


def crossed(c: PosttrainConfig, parents: Sequence[str], genome: Genome, base: str = "") -> dict[str, Any]:
    """The merge engine's recipe: CROSSOVER with its curves, or those of the genome. One parent stays what it is."""
    if len(parents) == 1:
        return {"merge_method": "passthrough", "models": [{"model": parents[0]}]}
    parameters, method = genome.get("crossover", c.curves), METHODS[c.crossover["method"]]
    recipe: dict[str, Any] = {"merge_method": c.crossover["method"]}
    if method.base == "required" and method.most == 1:
        return {**recipe, "base_model": parents[0], "models": [{"model": parents[1]}], "parameters": parameters}
    if "weight" in method.params and "weight" not in parameters:
        parameters = {**parameters, "weight": 1 / len(parents)}
    named = {"base_model": base} if c.base_model else {}
    return {**recipe, **named, "models": [{"model": each} for each in parents], "parameters": parameters}


def mixture(c: PosttrainConfig, genome: Genome) -> dict[str, float]:
    """The shares of the data sets that a member learns from: all in proportion, or the TOP_K in proportion."""
    kept = sorted(genome["data"], key=lambda name: -genome["data"][name])[: c.top_k or None]
    total = sum(genome["data"][name] for name in kept)
    return {name: genome["data"][name] / total for name in genome["data"] if name in kept and genome["data"][name]}


def portions(shares: Mapping[str, float], count: int) -> dict[str, int]:
    """So many rows, shared out: what is left over goes where most was lost to rounding."""
    found = {name: int(share * count) for name, share in shares.items()}
    left = sorted(shares, key=lambda name: found[name] - shares[name] * count)
    return {name: found[name] + (name in left[: count - sum(found.values())]) for name in found}


def _crossed(parents: Sequence[Genome], rng: Rng) -> Genome:
    def one() -> Genome:
        return parents[int(rng.integers(len(parents)))]

    data = {name: one()["data"][name] for name in parents[0]["data"]}
    found = {"data": data, **{key: one()[key] for key in ("rate", "crossover", "temperature") if key in parents[0]}}
    if "rewards" in parents[0]:
        found["rewards"] = {name: one()["rewards"][name] for name in parents[0]["rewards"]}
    return found


def _bent(value: Any, strength: float, rng: Rng) -> Any:
    """All numbers of a merge's parameters: shares stay shares; what counts something, such as rounds, stays."""
    if isinstance(value, Mapping):
        return {key: each if key == "filter" else _bent(each, strength, rng) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bent(each, strength, rng) for each in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, int) and value > 1):
        return value
    if 0 <= value <= 1:
        return _within(value + strength * rng.standard_normal() / 4, 0.0, 1.0)
    return value * math.exp(strength * rng.standard_normal())


def _within(x: float, low: float, high: float) -> float:
    return min(high, max(low, x))

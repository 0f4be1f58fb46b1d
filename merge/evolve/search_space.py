"""What is searched: points in space, and the recipes that they stand for. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet.run_config import UserError
from merge import layer_splits
from merge.evolve.search_config import MergeGenome
from merge.parameters import within


@dataclass(frozen=True)
class Gene:
    """A parameter that every model has: where its coordinate starts, and the parameter's value there."""

    name: str
    start: float | None  # None: equal shares
    value: Callable[[float], float]


def _share(x: float) -> float:
    return min(1.0, abs(x))


WEIGHT = Gene("weight", None, abs)
DENSITY = Gene("density", 0.7, abs)
GAMMA = Gene("gamma", 0.2, lambda x: 0.05 * _share(x))
EPSILON = Gene("epsilon", 0.5, lambda x: 0.3 * _share(x))

GENES: Mapping[str, tuple[Gene, ...]] = {
    **dict.fromkeys(("linear", "slerp", "nuslerp", "multislerp", "karcher", "task_arithmetic"), (WEIGHT,)),
    **dict.fromkeys(("ties", "dare_linear", "dare_ties"), (WEIGHT, DENSITY)),
    **dict.fromkeys(("breadcrumbs", "breadcrumbs_ties"), (WEIGHT, DENSITY, GAMMA)),
    **dict.fromkeys(("della", "della_linear"), (WEIGHT, DENSITY, EPSILON)),
}


@dataclass(frozen=True)
class Space:
    """Coordinates: layer groups x models x filters x genes, of which the last change fastest; then the split points."""

    genome: MergeGenome
    layers: int
    dtype: str = ""  # the models' own

    def __post_init__(self) -> None:
        if self.genome.layer_granularity and self.layers % self.genome.layer_granularity:
            fitting = ", ".join(str(n) for n in range(1, self.layers + 1) if self.layers % n == 0)
            raise UserError(
                f"genome.layer_granularity is {self.genome.layer_granularity}, which does not divide the models' "
                f"{self.layers} layers; possible are 0 (all layers alike) and {fitting}"
            )
        if self.genome.layer_splits >= self.layers:
            raise UserError(
                f"genome.layer_splits is {self.genome.layer_splits}; between the models' {self.layers} layers are "
                f"{self.layers - 1} places for a split point"
            )

    @property
    def genes(self) -> tuple[Gene, ...]:
        return GENES[self.genome.merge_method]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        genome = self.genome
        groups = self.layers // genome.layer_granularity if genome.layer_granularity else genome.layer_splits + 1
        return groups, len(self.genome.models), len(self.genome.filters) + 1, len(self.genes)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) + self.genome.layer_splits

    def start(self, seed: int | None = None) -> list[float]:
        """Equal weights, and split points at equal distances; or, with a seed, anywhere in the unit cube."""
        if seed is not None:
            return [float(x) for x in np.random.default_rng(seed).random(self.size)]
        starts = [1 / len(self.genome.models) if gene.start is None else gene.start for gene in self.genes]
        splits = [n / (self.genome.layer_splits + 1) for n in range(1, self.genome.layer_splits + 1)]
        return [*(float(x) for x in np.broadcast_to(starts, self.shape).ravel()), *splits]

    def recipe(self, point: Sequence[float]) -> dict[str, Any]:
        """The recipe of a point, as plain data: what stands in best_config.yaml."""
        genome, cut = self.genome, self.size - self.genome.layer_splits
        x, ranges = np.asarray(point[:cut], float).reshape(self.shape), self._ranges(point[cut:])
        if genome.merge_method == "slerp":
            parts = [self._pair(x[n, :, 0, 0]) for n, _, _ in ranges]
        elif genome.smooth:
            parts = [self._sources(x)]
        else:
            parts = [self._sources(x[n : n + 1]) for n, _, _ in ranges]
        said: dict[str, Any] = {"merge_method": genome.merge_method}
        if len(parts) == 1:
            said |= parts[0]
        else:
            said["slices"] = [self._slice(part, [*here]) for part, (_, *here) in zip(parts, ranges, strict=True)]
        if genome.base_model:
            said["base_model"] = genome.base_model
        if genome.normalize is not None:
            said["parameters"] = {"normalize": genome.normalize}
        more = {
            "dtype": genome.dtype,
            "out_dtype": genome.out_dtype or self.dtype,
            "tokenizer_source": genome.tokenizer_source,
        }
        return said | {key: value for key, value in more.items() if value}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _ranges(self, places: Sequence[float]) -> list[tuple[int, int, int]]:
        """Of each group of layers its number, the first of them, and the one behind the last."""
        size = self.genome.layer_granularity
        if size:
            return [(n, n * size, (n + 1) * size) for n in range(self.layers // size)]
        return layer_splits.parts([_share(float(x)) for x in places], self.layers)

    def _sources(self, x: np.ndarray) -> dict[str, Any]:
        """Models with their parameters; several groups become curves over the layers."""
        told = []
        for m in range(len(self.genome.models)):
            params: dict[str, Any] = {}
            for g, gene in enumerate(self.genes):
                values = [[self._value(gene, float(x[n, m, f, g])) for n in range(len(x))] for f in range(x.shape[2])]
                plain = [value if len(value) > 1 else value[0] for value in values]
                filters = [*self.genome.filters, "*"]
                several = [{"filter": part, "value": value} for part, value in zip(filters, plain, strict=True)]
                several[-1].pop("filter")
                params[gene.name] = several if self.genome.filters else plain[0]
            told.append(params)
        normalize = {} if self.genome.normalize is None else {"normalize": self.genome.normalize}
        told = within(self.genome.merge_method, told, normalize)
        named = zip(self.genome.models, told, strict=True)
        return {"models": [{"model": model, "parameters": params} for model, params in named]}

    def _slice(self, part: Mapping[str, Any], here: list[int]) -> dict[str, Any]:
        sources = [{"model": each["model"], "layer_range": here, **each} for each in part["models"]]
        if self.genome.base_model:  # mergekit wants to see it among the sources
            sources.append({"model": self.genome.base_model, "layer_range": here})
        return {"sources": sources, **{key: part[key] for key in ("base_model", "parameters") if key in part}}

    def _value(self, gene: Gene, x: float) -> float:
        return x if gene is WEIGHT and self.genome.allow_negative_weights else gene.value(x)

    def _pair(self, weights: np.ndarray) -> dict[str, Any]:
        """The two strongest models, the strongest first, as far apart as their weights say."""
        first, second = (int(n) for n in np.argsort(-np.abs(weights), kind="stable")[:2])
        total = abs(float(weights[first])) + abs(float(weights[second]))
        models = [{"model": self.genome.models[n]} for n in (first, second)]
        t = abs(float(weights[second])) / total if total else 0.5
        return {"models": models, "base_model": self.genome.models[first], "parameters": {"t": t}}

"""CMA-ES as a pure function: from the seed and all that was scored so far to the next generation's points."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Generation:
    """Points that were tried, and their scores; None: it failed."""

    points: Sequence[Sequence[float]]
    scores: Sequence[float | None]


@dataclass(frozen=True)
class Search:
    start: tuple[float, ...]
    sigma: float
    size: int  # points of a generation; 0: as CMA-ES suggests
    seed: int

    @property
    def population(self) -> int:
        return self.size or 4 + int(3 * math.log(len(self.start)))

    def next(self, past: Sequence[Generation]) -> list[list[float]]:
        """All generations so far are told again: a search that goes on proposes what an undisturbed one would."""
        strategy = self._strategy()
        for number, generation in enumerate(past):
            asked = self._ask(strategy, number)
            told = [np.array(point) for point in generation.points]
            same = all(np.array_equal(a, b) for a, b in zip(asked, told, strict=True))
            strategy.tell(asked if same else told, _losses(generation.scores), check_points=None if same else False)
        return [[float(x) for x in point] for point in self._ask(strategy, len(past))]

    def _strategy(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import cma  # it looks for matplotlib, and says so

        self._dice: np.random.Generator
        options = {"popsize": self.population, "verbose": -9, "signals_filename": None, "seed": math.nan}
        return cma.CMAEvolutionStrategy(list(self.start), self.sigma, {**options, "randn": self._normal})

    def _ask(self, strategy: Any, number: int) -> list[np.ndarray]:
        """Each generation has dice of its own: however a search got there, it throws the same."""
        object.__setattr__(self, "_dice", np.random.default_rng([self.seed, number]))
        return [np.asarray(point) for point in strategy.ask()]

    def _normal(self, *shape: int) -> np.ndarray:
        return self._dice.standard_normal(shape)


def _losses(scores: Sequence[float | None]) -> list[float]:
    """CMA-ES looks at ranks alone, the smallest first: what failed comes last."""
    good = [-score for score in scores if score is not None]
    worst = max(good, default=0.0)
    return [worst + 1 + abs(worst) if score is None else -score for score in scores]

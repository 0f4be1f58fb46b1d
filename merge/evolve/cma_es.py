"""CMA-ES as a pure function: from the seed and all that was scored so far to the next generation's points."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_DIGITS = 9  # behind the point: coarser than what libraries and processors round differently, finer than what matters


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

    def next(self, past: Sequence[Generation], known: "CmaState | None" = None) -> list[list[float]]:
        """What follows from all generations so far. One that was told the first of them already is told the rest; a
        new one hears them all, so that a search that goes on proposes what an undisturbed one would."""
        return [*map(_rounded, self._told(past, known).asked())]

    def middle(self, past: Sequence[Generation], known: "CmaState | None" = None) -> list[float]:
        """The point around which it would go on: what many scores have come to, as far as each of them is luck."""
        return _rounded(self._told([each for each in past if len(each.points) == self.population], known).middle)

    def _told(self, past: Sequence[Generation], known: "CmaState | None") -> "CmaState":
        strategy = known or CmaState(self)
        for generation in past[strategy.number :]:
            strategy.tell(generation)
        return strategy


def _rounded(point: np.ndarray) -> list[float]:
    return [round(float(x), _DIGITS) for x in point]


class CmaState:
    """CMA-ES, with a random generator of its own for each generation: however a search got there, it draws the same."""

    def __init__(self, search: Search) -> None:
        self.seed, self.number = search.seed, 0
        self._asked: list[np.ndarray] = []  # once in each generation: asking changes it
        self._rng = np.random.default_rng([search.seed, 0])
        options: dict[str, Any] = {"popsize": search.population, "verbose": -9, "signals_filename": None}
        options["seed"] = math.nan
        options["randn"] = lambda *shape: self._rng.standard_normal(shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it looks for matplotlib, and finds its own defaults unsafe
            import cma

            self._cma = cma.CMAEvolutionStrategy(list(search.start), search.sigma, options)
        # thrown along the coordinates, not the covariance's axes: which way those point is up to a library's rounding
        model = self._cma.sm
        model.randn = lambda *shape: self._rng.standard_normal(shape) @ model.B

    def asked(self) -> list[np.ndarray]:
        if not self._asked:
            self._rng = np.random.default_rng([self.seed, self.number])
            self._asked = [np.asarray(point) for point in self._cma.ask()]
        return self._asked

    @property
    def middle(self) -> np.ndarray:
        return np.asarray(self._cma.mean)

    def tell(self, generation: Generation) -> None:
        """Points as they were tried, which are not quite those that were asked for."""
        self.asked()
        self._cma.tell([np.array(point) for point in generation.points], _losses(generation.scores), check_points=False)
        self.number, self._asked = self.number + 1, []


def _losses(scores: Sequence[float | None]) -> list[float]:
    """CMA-ES looks at ranks alone, the smallest first: what failed comes last."""
    good = [-score for score in scores if score is not None]
    worst = max(good, default=0.0)
    return [worst + 1 + abs(worst) if score is None else -score for score in scores]

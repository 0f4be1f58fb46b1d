"""The API for programs: a tournament's steps without a run, and `run_evolutionary_tournament`, which is what `--run`
does (tournament_running.py)."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from evomerge.config import Configuration, ModelReference
from evomerge.formula import Formula, in_words
from evomerge.given_models import resolved
from evomerge.merger import AdvancedModelMerger, known
from evomerge.tournament import ended_after, scored, worth
from evomerge.utils import EvoMergeException, expected, log
from evomerge.variation import Pool, Scored, can_mutate, crossed, first, mutated, next_generation, ranked
from fleet.run_config import UserError


class EvolutionaryMerger:
    """The steps of a tournament, each by itself: models in, models' folders out. Unlike a run, they leave every model
    that they make."""

    def __init__(self, config: Configuration, out: Path | str = "") -> None:
        self.config, self.e = config, config.evolution_settings
        self.merger, self._pool = AdvancedModelMerger(config, out), partial(Pool, config.merge_settings)
        self._drawn = 0
        self._last: tuple[str, Any] | None = None

    def create_merged_models(self) -> list[ModelReference]:
        """The first generation: every combination of the techniques."""

        def nth(n: int, names: Sequence[str], layers: int) -> Formula:
            return first(self._pool(names, layers), self.e.population_size, self.e.seed)[n]

        return [self.merger.write(partial(nth, n)) for n in range(self.e.population_size)]

    def mutate_model(self, model: ModelReference) -> ModelReference:
        """The same models merged with other coefficients, along another path; with noise where the settings ask."""
        with expected():
            formula, models, base = known(model)
            if not can_mutate(formula, self.e):
                raise EvoMergeException(
                    f"{model.name} was not merged here, so it has no coefficients that could be mutated: set "
                    "evolution_settings.weight_noise, or mutate a merged model"
                )

            def make(names: Sequence[str], layers: int) -> Formula:
                return mutated(formula, self._pool(names, layers), self.e, self._rng())

            return self.merger.built(make, models, base, f"{model.name}-mutant")

    def merge_models(self, one: ModelReference, other: ModelReference) -> ModelReference:
        """A merge of two models, merged ones or not."""
        with expected():
            (left, right), models, base = _joined([known(one), known(other)])

            def make(names: Sequence[str], layers: int) -> Formula:
                return crossed(left, right, self._pool(names, layers), self.e, self._rng())[0]

            return self.merger.built(make, models, base, f"{one.name}-x-{other.name}"[:80])

    def evaluate(self, model: ModelReference) -> float:
        """Its score: more is better."""
        with expected():
            log.info("evaluating %s", model.name)
            (there,) = resolved([model])
            evaluator = self._evaluator({there.name: there.path}, "")
            return float(evaluator.scored(Formula(blend=there.name))["score"])

    def tournament_selection(self, population: Sequence[ModelReference], scores: Sequence[float]) -> ModelReference:
        """Some meet by chance; the best of them wins."""
        if len(population) != len(scores) or not population:
            raise EvoMergeException(
                f"{len(population)} models and {len(scores)} scores: as many are needed, at least one"
            )
        rng, there = self._rng(), len(scores)
        some = [int(n) for n in rng.choice(there, min(self.e.tournament_size, there), replace=False)]
        known = {n: -math.inf if math.isnan(scores[n]) else scores[n] for n in sorted(some)}  # not a number: it failed
        return population[max(known, key=lambda n: known[n])]

    def evolve(self, population: Sequence[ModelReference] = ()) -> ModelReference:
        """Generation after generation, from these models or the first merged ones; the winner."""
        if (how := self.config.evaluation_settings.fitness_from) != "all":
            raise EvoMergeException(f"fitness_from {how} is for runs, run_evolutionary_tournament(config); here: all")
        there = list(population) or self.create_merged_models()
        with expected():
            formulas, models, base = _joined([known(model) for model in there])
            evaluator = self._evaluator(models, base)
            pool = self._pool([*models], evaluator.builder.layers())
            past = list[list[float]]()
            entries = [self._scored(evaluator, f"1/m{n}", each) for n, each in enumerate(formulas)]
            while True:
                past.append([entry.score for entry in entries if entry.score is not None])
                if not past[-1]:
                    raise EvoMergeException("no model of this generation could be made and scored; the log says why")
                log.info("generation %d: best %.4f", len(past), max(past[-1]))
                if ended_after(self.e, past) is not None:
                    break
                entries = self._next(evaluator, entries, pool, len(past) + 1)
            return self.merger.built(lambda names, layers: ranked(entries)[0].formula, models, base, "winner")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _next(self, evaluator: Any, entries: Sequence[Scored], pool: Pool, generation: int) -> list[Scored]:
        children = next_generation(
            entries, pool, self.e, [self.e.seed, generation], worth(self.config.evaluation_settings)
        )
        kept = {entry.id: entry for entry in entries}
        return [
            kept[one.parents[0]] if one.carried else self._scored(evaluator, f"{generation}/m{n}", one.formula)
            for n, one in enumerate(children)
        ]

    def _scored(self, evaluator: Any, id: str, formula: Formula) -> Scored:
        log.info("evaluating %s (%s)", id, in_words(formula))
        try:
            return scored(id, formula, evaluator.scored(formula))
        except UserError as error:
            log.warning("%s (%s): %s", id, in_words(formula), error)
            return Scored(id, formula, None)

    def _evaluator(self, models: Mapping[str, str], base: str) -> Any:
        """The last one is kept, with its models and its text."""
        from evomerge.fitness_evaluator import alone

        key = repr((models, base))
        if self._last is None or self._last[0] != key:
            self._last = key, alone(self.config, models, base)
        return self._last[1]

    def _rng(self) -> np.random.Generator:
        """Other ones at every call; the same ones in another process that does the same."""
        self._drawn += 1
        return np.random.default_rng([self.e.seed, 3, self._drawn])


def _joined(there: Sequence[tuple[Formula, dict[str, str], str]]) -> tuple[list[Formula], dict[str, str], str]:
    """All their models, and the first base; those that are called like another one have new names."""
    formulas, models = list[Formula](), dict[str, str]()
    for formula, more, _ in there:
        taken = [name for name, path in more.items() if models.get(name, path) != path]
        names = {name: _free(name, {**models, **more}) for name in taken}
        formulas.append(formula.renamed(names))
        models |= {names.get(name, name): path for name, path in more.items()}
    return formulas, models, next((base for *_, base in there if base), "")


def _free(name: str, known: Mapping[str, str]) -> str:
    return next(free for n in range(2, 10_000) if (free := f"{name}-{n}") not in known)


def run_evolutionary_tournament(config: Configuration) -> str:
    """The whole tournament as a run on the disk; the same call goes on where it stopped. The winner's folder."""
    from evomerge.tournament_running import winner_of

    with expected():
        return winner_of(config)

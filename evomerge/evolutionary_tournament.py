"""Eight merged models, tournaments, one winner: step by step, or as a run that can be stopped and goes on."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evomerge import breeding
from evomerge.breeding import Among, Ranked, can_mutate, mutated, next_generation, ranked
from evomerge.config import Configuration, ModelReference
from evomerge.formula import Formula, in_words
from evomerge.merger import AdvancedModelMerger, known
from evomerge.tournament import last_generation
from evomerge.tournament_running import resolved
from evomerge.utils import EvoMergeException, expected, log
from fleet.config import UserError
from fleet.errors import absolute


class EvolutionaryMerger:
    """The steps of a tournament, each by itself: models in, models' folders out. Unlike a run, they leave every model
    that they make."""

    def __init__(self, config: Configuration, out: Path | str = "") -> None:
        self.config, self.e = config, config.evolution_settings
        self.merger = AdvancedModelMerger(config, out)
        self._drawn = 0
        self._last: tuple[str, Any] | None = None

    def create_merged_models(self) -> list[ModelReference]:
        """The first generation: every combination of the techniques."""

        def nth(n: int) -> Callable[[Sequence[str], int], Formula]:
            return lambda names, layers: breeding.first(
                self._among(names, layers), self.e.population_size, self.e.seed
            )[n]

        return [self.merger.write(nth(n)) for n in range(self.e.population_size)]

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
                return mutated(formula, self._among(names, layers), self.e, self._dice())

            return self.merger.built(make, models, base, f"{model.name}-mutant")

    def merge_models(self, one: ModelReference, other: ModelReference) -> ModelReference:
        """A merge of two models, merged ones or not."""
        with expected():
            (first, models, base), (second, more, other_base) = known(one), known(other)
            names = _told_apart(models, more)
            second = second.renamed(names)
            together = {**models, **{names.get(name, name): path for name, path in more.items()}}

            def make(names: Sequence[str], layers: int) -> Formula:
                among = self._among(names, layers)
                return breeding.bred(first, second, among, self.e, self._dice())[0]

            return self.merger.built(make, together, base or other_base, f"{one.name}-x-{other.name}"[:80])

    def evaluate(self, model: ModelReference) -> float:
        """Its score: more is better."""
        with expected():
            log.info("evaluating %s", model.name)
            (there,) = resolved([model])
            evaluator = self._evaluator({there.name: there.path}, "")
            return float(evaluator.scored(Formula(blend=there.name), "choosing")["score"])

    def tournament_selection(self, population: Sequence[ModelReference], scores: Sequence[float]) -> ModelReference:
        """Some meet by chance; the best of them wins."""
        if len(population) != len(scores) or not population:
            raise EvoMergeException(
                f"{len(population)} models and {len(scores)} scores: as many are needed, at least one"
            )
        known = [-math.inf if math.isnan(score) else score for score in scores]  # not a number: it failed
        return population[breeding.tournament(known, self.e.tournament_size, self._dice())]

    def evolve(self, population: Sequence[ModelReference] = ()) -> ModelReference:
        """Generation after generation, from these models or the first merged ones; the winner."""
        there = list(population) or self.create_merged_models()
        with expected():
            formulas, models, base = _joined([known(model) for model in there])
            evaluator = self._evaluator(models, base)
            among = self._among([*models], evaluator.builder.layers())
            past = list[list[float]]()
            entries = [self._ranked(evaluator, f"1/m{n}", each) for n, each in enumerate(formulas)]
            while True:
                past.append([entry.score for entry in entries if entry.score is not None])
                if not past[-1]:
                    raise EvoMergeException("no model of this generation could be made and scored; the log says why")
                log.info("generation %d: best %.4f", len(past), max(past[-1]))
                if last_generation(self.e, past) is not None:
                    break
                entries = self._next(evaluator, entries, among, len(past) + 1)
            return self.merger.built(lambda names, layers: ranked(entries)[0].formula, models, base, "winner")

    # -- inside -------------------------------------------------------------------------------------------------------

    def _next(self, evaluator: Any, entries: Sequence[Ranked], among: Among, generation: int) -> list[Ranked]:
        children = next_generation(entries, among, self.e, [self.e.seed, generation])
        kept = {entry.id: entry for entry in entries}
        return [
            kept[one.parents[0]] if one.carried else self._ranked(evaluator, f"{generation}/m{n}", one.formula)
            for n, one in enumerate(children)
        ]

    def _ranked(self, evaluator: Any, id: str, formula: Formula) -> Ranked:
        log.info("evaluating %s (%s)", id, in_words(formula))
        try:
            return Ranked(id, formula, float(evaluator.scored(formula, "choosing")["score"]))
        except UserError as error:
            log.warning("%s (%s): %s", id, in_words(formula), error)
            return Ranked(id, formula, None)

    def _among(self, names: Sequence[str], layers: int) -> Among:
        return Among(self.config.merge_settings, names, layers)

    def _evaluator(self, models: Mapping[str, str], base: str) -> Any:
        """The last one is kept, with its models and its text."""
        from evomerge.formula_evaluator import alone

        key = repr((models, base))
        if self._last is None or self._last[0] != key:
            self._last = key, alone(self.config, models, base)
        return self._last[1]

    def _dice(self) -> np.random.Generator:
        """Other ones at every call; the same ones in another process that does the same."""
        self._drawn += 1
        return np.random.default_rng([self.e.seed, 3, self._drawn])


def _told_apart(models: Mapping[str, str], more: Mapping[str, str]) -> dict[str, str]:
    """New names for those models that are called like another one."""
    names: dict[str, str] = {}
    for name, path in more.items():
        if models.get(name, path) != path:
            names[name] = next(n for k in range(2, 10_000) if (n := f"{name}-{k}") not in models and n not in more)
    return names


def _joined(there: Sequence[tuple[Formula, dict[str, str], str]]) -> tuple[list[Formula], dict[str, str], str]:
    formulas, models, base = list[Formula](), dict[str, str](), ""
    for formula, more, own in there:
        names = _told_apart(models, more)
        formulas.append(formula.renamed(names))
        models |= {names.get(name, name): path for name, path in more.items()}
        base = base or own
    return formulas, models, base


def run_evolutionary_tournament(config: Configuration) -> str:
    """The whole tournament as a run on the disk; the same call goes on where it stopped. The winner's folder."""
    from evomerge import ending, tournament_running

    with expected():
        code = tournament_running.run(config)
        folder = absolute(Path(config.out))
        if code == 130:
            raise KeyboardInterrupt
        if code:
            raise EvoMergeException(f"the tournament in {folder} stopped before its end (exit code {code}); see above")
        return str(ending.concluded(folder))

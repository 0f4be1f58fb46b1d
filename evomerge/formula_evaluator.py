"""A worker's memory: the models, what they are asked, and the model that takes on one formula after the other."""

from collections.abc import Mapping
from typing import Any

import torch

from evomerge import fitness_evaluator
from evomerge.building import builder
from evomerge.config import Configuration, ModelReference, TournamentConfig
from evomerge.fitness_evaluator import FitnessEvaluator
from evomerge.formula import Blend, Formula
from evomerge.model_checks import check_alike, check_causal
from merge.live import LiveModel


class FormulaEvaluator:
    def __init__(self, config: TournamentConfig) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.m = config, config.merge_settings
        self.builder = builder(config)
        self.digest = fitness_evaluator.digest(config.evaluation_settings)
        self._tasks: dict[str, Any] | None = None
        self._evaluator: tuple[str, FitnessEvaluator] | None = None

    def check(self) -> Mapping[str, Any]:
        """Whether these models can be merged and asked; how many layers they have."""
        references = [*self.config.models, *([self.m.base_model] if self.m.base_model else [])]
        check_alike(references)
        check_causal(references, self.m.trust_remote_code)
        layers = self.builder.layers()
        names = tuple(model.name for model in self.config.models)
        even = Formula(blend=Blend(technique="linear", of=names, shares=((1.0,),) * len(names)))
        self.builder.planned(even)
        self._asked(self.builder.model(Formula(blend=names[0])))
        return {"layers": layers}

    def scored(self, formula: Formula, on: str) -> Mapping[str, Any]:
        live = self.builder.model(formula)
        return self._asked(live).evaluated(live.model, on)

    def _asked(self, live: LiveModel) -> FitnessEvaluator:
        """Models of one tokenizer share what they are asked."""
        if self._evaluator is None or self._evaluator[0] != live.words:
            seed, e = self.config.evolution_settings.seed, self.config.evaluation_settings
            if self._tasks is None:
                self._tasks = fitness_evaluator.load_tasks(e, seed)
            self._evaluator = live.words, FitnessEvaluator(e, seed, live.tokenizer, self.builder.context(), self._tasks)
        return self._evaluator[1]


def alone(config: Configuration, models: Mapping[str, str], base: str = "") -> FormulaEvaluator:
    """For whoever evaluates without a run: with as many threads as this process has."""
    threads = max(config.threads, torch.get_num_threads())
    merging = config.merge_settings.model_copy(update={"base_model": ModelReference("base", base) if base else None})
    return FormulaEvaluator(
        TournamentConfig(
            models=tuple(ModelReference(name, path) for name, path in models.items()),
            merge_settings=merging,
            evolution_settings=config.evolution_settings,
            evaluation_settings=config.evaluation_settings,
            threads=threads,
        )
    )

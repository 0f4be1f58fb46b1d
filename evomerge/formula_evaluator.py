"""A worker's memory: the models, what they are asked, and the model that takes on one formula after the other."""

import os
from collections.abc import Mapping
from typing import Any

import torch

from evomerge import fitness_evaluator
from evomerge.building import builder
from evomerge.config import Configuration, ModelReference, TournamentConfig
from evomerge.fitness_evaluator import FitnessEvaluator
from evomerge.formula import Blend, Formula
from evomerge.given_models import check_alike, check_causal
from merge.live import LiveModel
from merge.search.search_strategy import Questions
from merge.search.search_worker import CandidateEvaluator


class FormulaEvaluator(CandidateEvaluator[FitnessEvaluator]):
    def __init__(self, config: TournamentConfig) -> None:
        super().__init__()
        torch.set_num_threads(config.threads)
        self.e, self.m, self.models = config.evaluation_settings, config.merge_settings, config.models
        self.builder, self.seed = builder(config), config.evolution_settings.seed
        self.digest = fitness_evaluator.digest(self.e)

    def loaded(self) -> dict[str, Any]:
        return fitness_evaluator.load_tasks(self.e, self.seed)

    def questions_for(self, live: LiveModel) -> FitnessEvaluator:
        return FitnessEvaluator(self.e, self.seed, live.tokenizer, self.builder.context(), self.tasks)

    def check(self) -> Mapping[str, Any]:
        references = [*self.models, *([self.m.base_model] if self.m.base_model else [])]
        check_alike(references)
        check_causal(references, self.m.trust_remote_code)
        layers = self.builder.layers()
        names = tuple(model.name for model in self.models)
        self.builder.planned(Formula(blend=Blend(technique="linear", of=names, shares=((1.0,),) * len(names))))
        self.questions(self.builder.model(Formula(blend=names[0])))
        return {"layers": layers}

    def scored(self, formula: Formula, on: Questions = "validation") -> Mapping[str, Any]:
        live = self.builder.model(formula, self.forget)
        return self.questions(live).evaluated(live.model, on)


def alone(config: Configuration, models: Mapping[str, str], base: str = "") -> FormulaEvaluator:
    """For whoever evaluates without a run: with all of this machine's processors."""
    merging = config.merge_settings.model_copy(update={"base_model": ModelReference("base", base) if base else None})
    return FormulaEvaluator(
        TournamentConfig(
            models=tuple(ModelReference(name, path) for name, path in models.items()),
            merge_settings=merging,
            evolution_settings=config.evolution_settings,
            evaluation_settings=config.evaluation_settings,
            threads=max(config.threads, len(os.sched_getaffinity(0))),
        )
    )

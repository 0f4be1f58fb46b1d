"""What makes one model better than another: a text, tasks of lm-eval, or both; one part for validation, another for the
held-out test. And a worker's memory: the models, what they are asked, the model that takes on formula after formula."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from evomerge.building import builder
from evomerge.config import Configuration, EvaluationSettings, ModelReference, TournamentConfig
from evomerge.formula import Blend, Formula
from evomerge.given_models import check_alike, check_causal
from evomerge.texts import mixed
from fleet.config import UserError
from merge.live import LiveModel
from merge.search.search_strategy import Questions
from merge.search.search_worker import CandidateEvaluator
from train import tasks, text
from train.config import Dataset
from train.passages import Losses, PassageReader, as_metrics
from train.tasks import Asked, TaskEvaluation

BITS = "bits per byte"
PASSAGE = 800  # characters of a passage, about
_SHORTEST = 8  # bytes
_FEWEST = 8  # passages
Metrics = Mapping[str, Any]


class FitnessEvaluator:
    """All that models of one tokenizer are asked."""

    def __init__(
        self, e: EvaluationSettings, seed: int, tokenizer: Any, longest: int | None, loaded: dict[str, Any]
    ) -> None:
        self.e = e
        text = texts(e) if e.text_weight else {}
        self.readers = {on: PassageReader(tokenizer, some, longest, e.batch_tokens) for on, some in text.items()}
        self.evaluation = TaskEvaluation(asked(e, seed), tokenizer, loaded, tokens=e.batch_tokens) if e.tasks else None
        there = self.evaluation.questions() if self.evaluation else {}
        self.numbers = {on: tasks.parted(there, e.holdout, seed, on == "test") for on in ("validation", "test")}

    def forget(self) -> None:
        """Let go of the last model: the next one needs its room."""
        if self.evaluation:
            self.evaluation.forget()

    def evaluated(self, model: Any, on: Questions) -> Metrics:
        """The score, each objective, and what intervals are made of."""
        found: dict[str, Any] = {}
        objectives: dict[str, float] = {}
        score = 0.0
        if on in self.readers:
            losses: Losses = self.readers[on].losses(model)
            found |= as_metrics(losses)
            objectives[BITS] = losses.bits_per_byte
            score -= self.e.text_weight * losses.bits_per_byte
            if on == "test":
                found |= {"each": json.dumps([round(x, 6) for x in losses.nats]), "sizes": json.dumps(losses.bytes)}
        if self.evaluation:
            marks = self.evaluation.marks(model, self.numbers[on])
            for task in self.e.tasks:
                objectives[key(task)] = float(marks.results[task.name][task.metric])
                score += task.weight * objectives[key(task)]
        if not math.isfinite(score):
            raise UserError(f"the score is {score}: {objectives}")
        name = "score" if on == "validation" else "test_score"  # two things that nobody should compare
        return {**found, name: score, "objectives": json.dumps(objectives)}


class FormulaEvaluator(CandidateEvaluator[FitnessEvaluator]):
    def __init__(self, config: TournamentConfig) -> None:
        super().__init__()
        torch.set_num_threads(config.threads)
        self.e, self.m, self.models = config.evaluation_settings, config.merge_settings, config.models
        self.builder, self.seed = builder(config), config.evolution_settings.seed
        self.digest = digest(self.e)

    def loaded(self) -> dict[str, Any]:
        return load_tasks(self.e, self.seed)

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
    """For whoever evaluates without a run: with as many threads as this process has."""
    merging = config.merge_settings.model_copy(update={"base_model": ModelReference("base", base) if base else None})
    return FormulaEvaluator(
        TournamentConfig(
            models=tuple(ModelReference(name, path) for name, path in models.items()),
            merge_settings=merging,
            evolution_settings=config.evolution_settings,
            evaluation_settings=config.evaluation_settings,
            threads=max(config.threads, torch.get_num_threads()),
        )
    )


def key(task: Any) -> str:
    return task.name if task.metric == "acc,none" else f"{task.name}:{task.metric}"


def gains(e: EvaluationSettings, objectives: Mapping[str, float]) -> dict[str, float]:
    """Each objective, turned so that more is better; those that weigh nothing are none."""
    signs = {BITS: -1.0, **{key(task): math.copysign(1.0, task.weight) for task in e.tasks if task.weight}}
    return {name: signs[name] * value for name, value in objectives.items() if name in signs}


def asked(e: EvaluationSettings, seed: int) -> Asked:
    names = tuple(dict.fromkeys(task.name for task in e.tasks))
    return Asked(names, e.limit, e.num_fewshot, shuffle=True, task_path=tuple(e.task_path), seed=seed)


def load_tasks(e: EvaluationSettings, seed: int) -> dict[str, Any]:
    if not e.tasks:
        return {}
    loaded = tasks.load(asked(e, seed), e.allow_benchmark_tasks)
    tasks.check_metrics(loaded, [(task.name, task.metric) for task in e.tasks])
    return loaded


# -- the text ---------------------------------------------------------------------------------------------------------


def texts(e: EvaluationSettings) -> dict[str, list[str]]:
    """Passages for validation, and as many others for the test, in turns: all kinds of text are in both."""
    there = cut(e) if e.text else [each.text for each in mixed()]
    if len(there) < 2 * _FEWEST:
        found = f"{len(there)} passages of at most {PASSAGE} characters"
        raise UserError(f"{e.text}: {found}; at least {2 * _FEWEST} are needed to compare models")
    most = min(e.passages, len(there) // 2)
    return {"validation": there[: 2 * most : 2], "test": there[1 : 2 * most : 2]}


def cut(e: EvaluationSettings) -> list[str]:
    """A file's documents in passages; what is too short to say anything is left out."""
    if not e.text.endswith(text.FILES):
        raise UserError(f"{e.text}: a text file ends in {', '.join(text.FILES)}")
    found: list[str] = []
    for document in text.documents(Dataset(source=str(Path(e.text).expanduser()), text_field=e.text_field)):
        found += [piece for piece in _passages(document) if len(piece.encode()) >= _SHORTEST]
        if len(found) >= 2 * e.passages:
            break
    return found


def _passages(document: str) -> Sequence[str]:
    """Cut at the ends of lines, where there are any."""
    found, begin = [], 0
    while begin < len(document):
        end = min(len(document), begin + PASSAGE)
        line = document.rfind("\n", begin + PASSAGE // 2, end)
        end = line + 1 if line > 0 and end < len(document) else end
        found.append(document[begin:end])
        begin = end
    return found


def digest(e: EvaluationSettings) -> str:
    """Of all that is asked, but for tasks, which lm-eval loads."""
    if not e.text_weight:
        return "none"
    return hashlib.sha256(json.dumps(texts(e)).encode()).hexdigest()[:16]

"""What makes one model better than another: a text, tasks of lm-eval, or both; one part for validation, another for the
held-out test. And a worker's memory: the models, what they are asked, the model that takes on formula after formula."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import torch

from evomerge.config import BITS, Configuration, EvaluationSettings, ModelReference, TournamentConfig
from evomerge.formula import Blend, Formula
from evomerge.given_models import check_alike, check_causal
from evomerge.model_builder import builder
from evomerge.texts import KINDS, unseen
from fleet.errors import UserError, from_home
from merge.live_models import LiveModel
from merge.search.search_worker import CandidateEvaluator
from train import lm_eval_tasks, question_marks, text_sources
from train.few_questions import Items, asked_for
from train.fitness_from import Interview
from train.lm_eval_tasks import TaskEvaluation, TaskRequest
from train.passages import Losses, PassageReader, as_metrics
from train.question_marks import Answers
from train.splits import HELD_OUT, EvalSplit, Split, normal, parts_of
from train.training_config import Dataset

PASSAGE = 800  # characters of a passage, about
_SHORTEST = 8  # bytes
GROUP = 4  # passages that are neighbours: what one of them says of a model, the others nearly say, too
_FEWEST = 8  # passage groups for validation, and for the test
_READ = 4  # times as many passages as are asked, of which some are taken from everywhere
Metrics = Mapping[str, Any]


class FitnessQuestions:
    """All that models of one tokenizer are asked."""

    def __init__(self, c: TournamentConfig, tokenizer: Any, longest: int | None, loaded: dict[str, Any]) -> None:
        self.e, seed = (e := c.evaluation_settings), c.evolution_settings.seed
        self.compares = bool(c.evolution_settings.compares_questions)  # question by question
        self.text = texts(e) if e.text_weight else {}
        readers = partial(PassageReader, longest=longest, batch=e.batch_tokens)
        self.readers = {on: readers(tokenizer, some.texts) for on, some in self.text.items()}
        self.evaluation = TaskEvaluation(asked(e, seed), tokenizer, loaded, tokens=e.batch_tokens) if e.tasks else None

    def forget(self) -> None:
        """Let go of the last model: the next one needs its room."""
        if self.evaluation:
            self.evaluation.forget()

    def evaluated(self, model: Any, how: Interview) -> Metrics:
        """The score, each objective, and what intervals are made of."""
        on = how.on
        found: dict[str, Any] = {}
        objectives: dict[str, float] = {}
        solved, score = dict[str, list[float]](), 0.0
        if on in self.readers:
            losses: Losses = self.readers[on].losses(model).together(self.text[on].group)
            found |= as_metrics(losses)
            objectives[BITS] = losses.bits_per_byte
            score -= self.e.text_weight * losses.bits_per_byte
            solved[BITS] = [math.exp(-nats / size) for nats, size in zip(losses.nats, losses.bytes, strict=True)]
            if on == "test":
                found |= {"each": json.dumps([round(x, 6) for x in losses.nats]), "sizes": json.dumps(losses.bytes)}
        if self.evaluation and self.e.fitness_from != "all" and on == "validation":
            told = self.interviewed(model, how, score)
            found |= {key: value for key, value in told.items() if key not in ("score", "scores")}
            objectives |= json.loads(told["scores"])
            score += told["score"]
        elif self.evaluation:
            marks = self.evaluation.marks(model, self.evaluation.parted(self.e.holdout)[on])
            for task in self.e.tasks:
                objectives[task.key] = float(marks.results[task.name][task.metric])
                score += task.weight * objectives[task.key]
            there = question_marks.single(self.e.tasks, marks)
            solved |= {
                task.key: [x if task.weight > 0 else 1 - x for x in there.get(task.key, ())] for task in self.e.tasks
            }
        if not math.isfinite(score):
            raise UserError(f"the score is {score}: {objectives}")
        name = "score" if on == "validation" else "test_score"  # two things that nobody should compare
        told = {key: [round(min(1.0, max(0.0, x)), 6) for x in some] for key, some in solved.items()}
        more = {"solved": json.dumps(told)} if self.compares and on == "validation" else {}
        return {**found, **more, name: score, "objectives": json.dumps(objectives)}

    def interviewed(self, model: Any, how: Interview, score: float) -> Metrics:
        """What it says to tasks, perhaps to few of their questions; the score that it has without them is known."""
        assert self.evaluation
        answers = Answers(self.e.tasks, partial(self.evaluation.marks, model))
        theirs = json.loads(how.rival["objectives"]).get(BITS, 0.0) if how.rival else 0.0
        ahead = score + self.e.text_weight * theirs if how.rival else 0.0
        seed, parts = self.evaluation.asked.seed, self.evaluation.parted(self.e.holdout)
        everything = asked_for("validation", parts, self.e.fitness_from, seed)
        return how.of(self.e.tasks, answers, everything, seed, ahead)


class FormulaEvaluator(CandidateEvaluator[FitnessQuestions]):
    def __init__(self, config: TournamentConfig) -> None:
        super().__init__(config.evolution_settings.seed, config.evaluation_settings.fitness_questions)
        torch.set_num_threads(config.threads)
        self.config, self.e = config, config.evaluation_settings
        self.m, self.models = config.merge_settings, config.models
        self.builder = builder(config)
        self.digest = digest(self.e)

    def loaded(self) -> dict[str, Any]:
        return load_tasks(self.e, self.seed, self.config.evolution_settings.compares_questions)

    def questions_for(self, live: LiveModel) -> FitnessQuestions:
        return FitnessQuestions(self.config, live.tokenizer, self.builder.context(), self.eval_tasks)

    def check(self) -> Mapping[str, Any]:
        references = [*self.models, *([self.m.base_model] if self.m.base_model else [])]
        check_alike(references)
        check_causal(references, self.m.trust_remote_code)
        layers = self.builder.layers()
        names = tuple(model.name for model in self.models)
        self.builder.planned(Formula(blend=Blend(technique="linear", of=names, shares=((1.0,),) * len(names))))
        self.questions(self.builder.model(Formula(blend=names[0])))
        return {"layers": layers}

    def items(self) -> Items:
        parts = lm_eval_tasks.parted(asked(self.e, self.seed), self.eval_tasks, self.e.holdout)
        return Items(self.e.tasks, asked_for("validation", parts, self.e.fitness_from, self.seed))

    def scored(self, formula: Formula, how: Interview = Interview()) -> Mapping[str, Any]:
        live = self.builder.model(formula, self.forget)
        return self.questions(live).evaluated(live.model, how)


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


def gains(e: EvaluationSettings, objectives: Mapping[str, float]) -> dict[str, float]:
    """Each objective, turned so that more is better; those that weigh nothing are none."""
    signs = {BITS: -1.0, **{task.key: math.copysign(1.0, task.weight) for task in e.tasks if task.weight}}
    return {name: signs[name] * value for name, value in objectives.items() if name in signs}


def asked(e: EvaluationSettings, seed: int) -> TaskRequest:
    names = tuple(dict.fromkeys(task.name for task in e.tasks))
    return TaskRequest(names, e.limit, e.num_fewshot, shuffle=True, task_path=tuple(e.task_path), seed=seed)


def load_tasks(e: EvaluationSettings, seed: int, compares: str = "") -> dict[str, Any]:
    """Why their questions are compared one by one, if they are."""
    if not e.tasks:
        return {}
    loaded = lm_eval_tasks.load(asked(e, seed), e.allow_benchmark_tasks)
    lm_eval_tasks.check_metrics(loaded, [(task.name, task.metric) for task in e.tasks])
    lm_eval_tasks.parted(asked(e, seed), loaded, e.holdout)
    if compares or e.fitness_from != "all":
        question_marks.check(e.tasks, loaded, compares or f"fitness_from {e.fitness_from}")
    return loaded


# -- the text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passages:
    """Passages that are asked, and which passage group each is of."""

    texts: tuple[str, ...]
    group: tuple[int, ...]

    @classmethod
    def of(cls, groups: Sequence[Sequence[str]], most: int) -> "Passages":
        """The first one of each group, then the second ones: so many, of as many groups as there are."""
        turns = [(n, each[turn]) for turn in range(GROUP) for n, each in enumerate(groups) if turn < len(each)]
        return cls(tuple(text for _, text in turns[:most]), tuple(n for n, _ in turns[:most]))


def texts(e: EvaluationSettings) -> dict[EvalSplit, Passages]:
    """As many passages for validation as for the test, of other documents, or groups of one with gaps between."""
    kinds = [cut(e)] if e.text else [[*islice(unseen(kind), e.passages)] for kind in KINDS]
    sides: dict[EvalSplit, list[list[list[str]]]] = {on: [] for on in HELD_OUT}
    for some in kinds:
        groups = {normal("".join(each)): each for each in some}  # once, however often they stand there
        if (there := len(groups)) < 2 * _FEWEST:
            found = f"{there} documents, or groups of {GROUP} passages of at most {PASSAGE} characters"
            raise UserError(f"{e.text}: {found}; at least {2 * _FEWEST} are needed to compare models")
        parts = parts_of(e.text, [*groups], Split(1.0, 0.5), least=there // 2)
        for on, side in sides.items():
            side.append([each for each, part in zip(groups.values(), parts, strict=True) if part == on])
    mixed = {on: [each for turn in zip_longest(*side) for each in turn if each] for on, side in sides.items()}
    most = min(e.passages, *(sum(map(len, side)) for side in mixed.values()))
    return {on: Passages.of(side, most) for on, side in mixed.items()}


def cut(e: EvaluationSettings) -> list[list[str]]:
    """A file's passage groups: what is long is cut, and between two of its groups a passage is left out."""
    if not e.text.endswith(text_sources.FILES):
        raise UserError(f"{e.text}: a text file ends in {', '.join(text_sources.FILES)}")
    source = Dataset(source=str(from_home(e.text)), text_field=e.text_field)
    documents, found = text_sources.documents(source), list[list[str]]()
    if text_sources.is_one_document(source):
        documents = iter(["".join(islice(documents, e.passages))])  # of which each has several passages
    for document in documents:
        passages = _passages(document)
        for begin in range(0, len(passages), GROUP + 1):
            some = [each for each in passages[begin : begin + GROUP] if len(each.encode()) >= _SHORTEST]
            found += [some] if some else []
        if sum(map(len, found)) >= _READ * e.passages:
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
    asked = {on: [some.texts, some.group] for on, some in texts(e).items()}
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]

"""From which answers a model's fitness comes: from all; of a race, in which the hopeless answer few; or from a few, by
which a response model estimates the others."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fleet.run_config import UserError
from train import response_model
from train.lm_eval_tasks import Marks, is_mean
from train.response_model import ResponseModel
from train.splits import EvalSplit

Metrics = Mapping[str, Any]
Questions = Mapping[str, Sequence[int]]  # of each task
Single = Mapping[str, Sequence[float]]  # of each objective, question by question
_STAGES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the questions, in a race
_FEW = 8  # questions of a task, from which nothing is concluded
_HOPELESS = 2.33  # standard errors below the best: a chance of 1% to be as good
_SHARE, _LEAST = 20, 16  # of irt: one question of so many, and how many at least
_CHOICE = 4  # times as many questions as are taken are looked at, or a quarter of all: others in each generation
_DIGITS = 4  # of what a plan's readers are told of an item


class Objective(Protocol):
    """A metric of a task, and what it weighs in the score."""

    @property
    def name(self) -> str: ...
    @property
    def metric(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def key(self) -> str: ...


Objectives = Sequence[Objective]


def check(objectives: Objectives, loaded: Mapping[str, Any], why: str) -> None:
    """Marks can be compared question by question."""
    for each in objectives:
        if each.name in loaded["groups"]:
            raise UserError(f"{why}: {each.name} is a group; list its tasks instead")
        if not is_mean(loaded, each.name, each.metric):
            raise UserError(
                f"{why}: {each.metric} of {each.name} is not a mean over single questions, so it cannot be compared "
                "question by question"
            )


def single(objectives: Objectives, marks: Marks) -> dict[str, list[float]]:
    """Question by question, where a metric has such marks."""
    found = {}
    for each in objectives:
        values = marks.single.get(each.name, {}).get(each.metric, [])
        if values and all(isinstance(value, (bool, int, float)) for value in values):
            found[each.key] = [round(float(value), 6) for value in values]
    return found


class Answers:
    """What one model has said so far; it is never asked twice."""

    def __init__(self, objectives: Objectives, ask: Callable[[Questions], Marks]) -> None:
        self.objectives, self._ask = objectives, ask
        self._known: dict[str, dict[int, float]] = {each.key: {} for each in objectives}

    def know(self, questions: Questions, marks: Single) -> None:
        for each in self.objectives:
            self._known[each.key] |= zip(questions.get(each.name, ()), marks.get(each.key, ()), strict=True)

    def to(self, questions: Questions) -> dict[str, list[float]]:
        """Its marks of these questions, in their order."""
        known = {each.name: self._known[each.key] for each in self.objectives}
        new = {name: [n for n in numbers if n not in known[name]] for name, numbers in questions.items()}
        if any(new.values()):
            self.know(new, single(self.objectives, self._ask({name: some for name, some in new.items() if some})))
        return {each.key: [self._known[each.key][n] for n in questions[each.name]] for each in self.objectives}

    @property
    def count(self) -> int:
        """Of questions."""
        return sum({each.name: len(self._known[each.key]) for each in self.objectives}.values())


def means(objectives: Objectives, marks: Single) -> dict[str, float]:
    """Of each objective that was asked; summed as lm-eval does."""
    return {each.key: sum(marks[each.key]) / len(marks[each.key]) for each in objectives if marks[each.key]}


def summed(objectives: Objectives, scores: Mapping[str, float]) -> float:
    """The score."""
    score = float(sum(each.weight * scores[each.key] for each in objectives))
    if not math.isfinite(score):
        raise UserError(f"the score is {score}: {dict(scores)}")
    return score


@dataclass(frozen=True)
class Interview:
    """What a candidate is asked, and why."""

    on: EvalSplit = "validation"
    rival: Metrics | None = None  # in a race: it is given up once it has no hope to beat this one
    few: "FewQuestions | None" = None  # those that it answers, of all
    earlier: Metrics | None = None  # what it has answered already

    def of(
        self, objectives: Objectives, answers: Answers, everything: Questions, seed: int, ahead: float = 0.0
    ) -> Metrics:
        """Its score; of a race, perhaps only what it would probably have been; of few questions, an estimate. So far
        `ahead` of its rival it is in what is no question."""
        if self.few:
            return {**self.few.estimated(answers.to(self.few.chosen)), "asked": answers.count, "given_up": False}
        if self.earlier:
            answers.know(json.loads(self.earlier["questions"]), json.loads(self.earlier["single"]))
        there, behind, theirs = answers.count, None, json.loads(self.rival["single"]) if self.rival else {}
        if theirs:
            marks, behind = raced(objectives, answers, everything, theirs, seed, ahead)
        else:
            marks = answers.to(everything)
        scores = means(objectives, marks)
        score = summed(objectives, scores)
        if behind is not None:
            score = summed(objectives, means(objectives, theirs)) + behind
        told = {"scores": json.dumps(scores), "single": json.dumps(marks), "asked": answers.count - there}
        return {"score": score, **told, "given_up": behind is not None}


# -- a race ------------------------------------------------------------------------------------------------------------


def raced(
    objectives: Objectives, answers: Answers, everything: Questions, theirs: Single, seed: int, ahead: float = 0.0
) -> tuple[dict[str, list[float]], float | None]:
    """A model's marks of all questions, or of those after which it was given up on, and then by how much it is ahead of
    the rival there, whose marks of all questions are given."""
    for share in _STAGES[:-1]:
        some = _subset(everything, share, seed)
        if min(map(len, some.values())) < _FEW:
            continue
        mine = answers.to(some)
        mean, error = behind(objectives, mine, some, theirs, everything)
        if ahead + mean + _HOPELESS * error < 0:
            return mine, mean
    return answers.to(everything), None


def behind(
    objectives: Objectives, mine: Single, some: Questions, theirs: Single, everything: Questions
) -> tuple[float, float]:
    """How far a candidate is ahead of the rival on the same questions, and the standard error of that."""
    ahead = dict[str, list[float]]()
    for each in objectives:
        place = {question: n for n, question in enumerate(everything[each.name])}
        other = [theirs[each.key][place[question]] for question in some[each.name]]
        ahead[each.key] = [a - b for a, b in zip(mine[each.key], other, strict=True)]
    return mean_and_error(objectives, ahead)


def mean_and_error(objectives: Objectives, marks: Single) -> tuple[float, float]:
    """Of the weighted sum of marks; a question's marks by several metrics go together."""
    of_task: dict[str, np.ndarray] = {}
    for each in objectives:
        weighed = each.weight * np.asarray(marks.get(each.key, ()), float)
        of_task[each.name] = of_task[each.name] + weighed if each.name in of_task else weighed
    if any(len(weighed) < 2 for weighed in of_task.values()):
        return math.nan, math.inf
    # few questions with equal marks are no proof that all are equal
    parts = [max(one.var(ddof=1), np.abs(one).max() ** 2 / len(one)) / len(one) for one in of_task.values()]
    return float(sum(one.mean() for one in of_task.values())), math.sqrt(sum(parts))


def _subset(everything: Questions, share: float, seed: int) -> dict[str, list[int]]:
    """The first so many in an order that the seed chose: a larger share contains every smaller one."""
    found = {}
    for name, numbers in everything.items():
        order = np.random.default_rng([seed, 11, len(numbers)]).permutation(len(numbers))
        found[name] = sorted(numbers[n] for n in order[: max(1, round(share * len(numbers)))])
    return found


# -- few questions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Items:
    """Every objective's mark of every question, in this order."""

    objectives: Objectives
    everything: Questions

    @cached_property
    def listed(self) -> list[tuple[str, str, int]]:
        """Of each, its objective, its task and its question."""
        return [(each.key, each.name, n) for each in self.objectives for n in self.everything[each.name]]

    @cached_property
    def weights(self) -> np.ndarray:
        """In the score, which is a sum of means."""
        shares = (
            [each.weight / len(self.everything[each.name])] * len(self.everything[each.name])
            for each in self.objectives
        )
        return np.concatenate([*map(np.asarray, shares)])

    @cached_property
    def questions(self) -> np.ndarray:
        """Which question each is a mark of: the same one where several metrics look at it."""
        known = dict[tuple[str, int], int]()
        return np.array([known.setdefault((name, n), len(known)) for _, name, n in self.listed])

    def row(self, marks: Single) -> np.ndarray:
        """Of a model that has answered everything."""
        return np.array([mark for each in self.objectives for mark in marks[each.key]])


def calibrated(items: Items, respondents: Sequence[Single], count: int) -> dict[str, Any]:
    """What the answers of some models to everything say of all questions, as metrics."""
    answers = np.stack([items.row(each) for each in respondents])
    if answers.min() < 0 or answers.max() > 1:
        raise UserError("FITNESS_FROM irt: marks between 0 and 1 are expected, as those of acc and exact_match are")
    count = few(count, int(items.questions.max()) + 1)
    model = response_model.fitted(answers)
    wider = response_model.widened(answers, items.weights, items.questions, count)
    return {
        "respondents": len(answers),
        "few": count,
        "widening": round(wider, _DIGITS),
        "slopes": json.dumps(model.slopes.round(_DIGITS).tolist()),
        "intercepts": json.dumps(model.intercepts.round(_DIGITS).tolist()),
    }


def few(count: int, there: int) -> int:
    return min(there, count or max(_LEAST, -(-there // _SHARE)))


@dataclass(frozen=True)
class FewQuestions:
    """Those that everybody answers who is compared."""

    items: Items
    model: ResponseModel
    chosen: Questions

    @classmethod
    def of(cls, items: Items, calibration: Metrics, seed: int, draw: int) -> "FewQuestions":
        """The most informative ones of a part of all, which chance chooses anew for each draw: a search that always
        asked the same would in time have learned them."""
        model = ResponseModel(
            np.array(json.loads(calibration["slopes"])),
            np.array(json.loads(calibration["intercepts"])),
            calibration["widening"],
        )
        there, count = int(items.questions.max()) + 1, int(calibration["few"])
        order = np.random.default_rng([seed, 17, draw]).permutation(there)
        among = order[: max(_CHOICE * count, there // _CHOICE)].tolist()
        taken = response_model.informative(model, items.weights, items.questions, count, among)
        found: dict[str, list[int]] = {name: [] for name in items.everything}
        known = {int(q): (name, n) for q, (_, name, n) in zip(items.questions, items.listed, strict=True)}
        for name, number in (known[q] for q in taken):
            found[name].append(number)
        return cls(items, model, {name: sorted(numbers) for name, numbers in found.items()})

    def estimated(self, marks: Single) -> dict[str, Any]:
        """The score of a model, as metrics, by its marks of the chosen questions."""
        items, objectives = self.items, self.items.objectives
        asked = {
            (each.key, n): mark
            for each in objectives
            for n, mark in zip(self.chosen[each.name], marks[each.key], strict=True)
        }
        there = [
            (n, asked[key, question]) for n, (key, _, question) in enumerate(items.listed) if (key, question) in asked
        ]
        places, answers = [n for n, _ in there], np.array([mark for _, mark in there])
        found = response_model.estimated(self.model, items.weights, places, answers)
        keys = np.array([key for key, _, _ in items.listed])
        scores = {each.key: round(float(found.marks[keys == each.key].mean()), 6) for each in objectives}
        return {
            "score": round(found.value, 6),
            "scores": json.dumps(scores),
            "standard_error": round(found.error, 6),
            "single": json.dumps({key: [*some] for key, some in marks.items()}),
            "questions": json.dumps(self.chosen),
        }

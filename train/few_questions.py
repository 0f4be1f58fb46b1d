"""Fitness from few questions: the answers to some say how all depend on a model's abilities, and then its answers to a
few of these are an estimate of those to the others."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fleet.run_config import UserError
from train import response_model
from train.question_marks import Answers, Metrics, Objectives, Questions, Single, means, subset, summed
from train.response_model import ResponseModel

_POOL = 256  # so many questions of all are known by their answers, of each task as large a share
_SHARE, _LEAST = 8, 16  # of these one of so many is asked later, and how many at least
_CHOICE = 4  # times as many questions as are taken are looked at, or a quarter of all: others in each generation
_DIGITS = 4  # of what a plan's readers are told of an item


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


def pool(everything: Questions, seed: int) -> Questions:
    """The questions that irt is about: all, or as many as a response model needs."""
    there = sum(map(len, everything.values()))
    return subset(everything, _POOL / there, seed) if there > _POOL else everything


def of_pool(items: Items, everything: Questions, metrics: Metrics) -> Single:
    """What somebody has said to these questions, who may have answered all."""
    marks: Single = json.loads(metrics["single"])
    if "questions" in metrics:
        return marks
    places = {name: {n: place for place, n in enumerate(numbers)} for name, numbers in everything.items()}
    return {
        each.key: [marks[each.key][places[each.name][n]] for n in items.everything[each.name]]
        for each in items.objectives
    }


def graded(objectives: Objectives, marks: Single, questions: Questions) -> dict[str, Any]:
    """As metrics, of these questions alone."""
    scores = means(objectives, marks)
    told = {"single": json.dumps(marks), "questions": json.dumps({name: [*some] for name, some in questions.items()})}
    return {"score": summed(objectives, scores), "scores": json.dumps(scores), **told}


def unsure(objectives: Objectives, found: Metrics, some: Questions, everything: Questions) -> dict[str, float]:
    """The standard error of a score that is known of some questions, as one of all."""
    of_task, scores = dict[str, float](), json.loads(found["scores"])
    for each in objectives:
        mean, n, rest = min(1.0, max(0.0, scores[each.key])), len(some[each.name]), len(everything[each.name])
        off = abs(each.weight) * math.sqrt(mean * (1 - mean) / n * (1 - n / rest))
        of_task[each.name] = of_task.get(each.name, 0.0) + off
    errors = [float(found.get("standard_error", 0.0)), *of_task.values()]
    return {"standard_error": round(math.hypot(*errors), 6)}


def asked(answers: Answers) -> dict[str, Any]:
    return {"asked": answers.count, "given_up": False}


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

"""Fitness from few questions: the answers to some say how all depend on a model's abilities, and then its answers to a
few of these are an estimate of those to the others."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fleet.run_config import UserError
from train import response_model
from train.fitness_config import FitnessFrom
from train.question_marks import Metrics, Objectives, Questions, Single, subset
from train.response_model import ResponseModel
from train.splits import EvalSplit

_POOL = 384  # questions at most, of each task as large a share: a response model needs no more
_SHARE, _LEAST = 6, 16  # one question of so many is asked later, and how many at least
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
        counts = [len(self.everything[each.name]) for each in self.objectives]
        return np.repeat([each.weight / n for each, n in zip(self.objectives, counts, strict=True)], counts)

    @cached_property
    def questions(self) -> np.ndarray:
        """Which question each is a mark of: the same one where several metrics look at it."""
        known = dict[tuple[str, int], int]()
        return np.array([known.setdefault((name, n), len(known)) for _, name, n in self.listed])

    def row(self, marks: Single) -> np.ndarray:
        """Of a model that has answered everything."""
        return np.array([mark for each in self.objectives for mark in marks[each.key]])


def pool(everything: Questions, seed: int) -> Questions:
    """The questions of a search that goes by few: all that there are, or a part; the others are not asked at all."""
    there = sum(map(len, everything.values()))
    return subset(everything, _POOL / there, seed) if there > _POOL else everything


def asked_for(on: EvalSplit, parts: Mapping[EvalSplit, Questions], how: FitnessFrom, seed: int) -> Questions:
    """All that are for it; where few are asked for validation, few are chosen of a part."""
    return pool(parts[on], seed) if how == "irt" and on == "validation" else parts[on]


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
        taken = {*response_model.informative(model, items.weights, items.questions, count, among)}
        some = [(name, n) for q, (_, name, n) in zip(items.questions, items.listed, strict=True) if q in taken]
        return cls(items, model, {name: sorted({n for task, n in some if task == name}) for name in items.everything})

    def estimated(self, marks: Single) -> dict[str, Any]:
        """The score of a model, as metrics, by its marks of the chosen questions."""
        items, objectives = self.items, self.items.objectives
        asked = {
            (each.key, n): mark
            for each in objectives
            for n, mark in zip(self.chosen[each.name], marks[each.key], strict=True)
        }
        known = {n: asked[key, q] for n, (key, _, q) in enumerate(items.listed) if (key, q) in asked}
        found = response_model.estimated(self.model, items.weights, [*known], np.array([*known.values()]))
        keys = np.array([key for key, _, _ in items.listed])
        scores = {each.key: round(float(found.marks[keys == each.key].mean()), 6) for each in objectives}
        return {
            "score": round(found.value, 6),
            "scores": json.dumps(scores),
            "standard_error": round(found.error, 6),
            "single": json.dumps({key: [*some] for key, some in marks.items()}),
            "questions": json.dumps(self.chosen),
        }

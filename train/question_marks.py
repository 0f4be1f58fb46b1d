"""What models have said to single questions, and what that comes to."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fleet.run_config import UserError
from train.lm_eval_tasks import Marks, is_mean

Metrics = Mapping[str, Any]
Questions = Mapping[str, Sequence[int]]  # of each task
Single = Mapping[str, Sequence[float]]  # of each objective, question by question


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


def subset(everything: Questions, share: float, seed: int) -> dict[str, list[int]]:
    """The first so many in an order that the seed chose: a larger share contains every smaller one."""
    found = {}
    for name, numbers in everything.items():
        order = np.random.default_rng([seed, 11, len(numbers)]).permutation(len(numbers))
        found[name] = sorted(numbers[n] for n in order[: max(1, round(share * len(numbers)))])
    return found

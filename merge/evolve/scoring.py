"""How candidates are graded: what a score is, how sure it is, when to give up."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fleet.run_config import UserError
from merge.evolve.search_config import SearchConfig
from train import lm_eval_tasks, splits
from train.lm_eval_tasks import Marks, TaskEvaluation, TaskRequest

Metrics = Mapping[str, Any]
Questions = dict[str, list[int]]
_STAGES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the questions, in a race
_FEW = 8  # questions of a task, from which nothing is concluded
_HOPELESS = 2.33  # standard errors below the best: a chance of 1% to be as good


def asked(c: SearchConfig) -> TaskRequest:
    names = tuple(dict.fromkeys(task.name for task in c.tasks))
    how = (c.limit, c.num_fewshot, c.shuffle, c.apply_chat_template, c.fewshot_as_multiturn)
    return TaskRequest(names, *how, c.task_path, c.seed)


def check(c: SearchConfig, loaded: Mapping[str, Any]) -> None:
    lm_eval_tasks.check_metrics(loaded, [(task.name, task.metric) for task in c.tasks])
    lm_eval_tasks.parted(asked(c), loaded, c.holdout)
    if c.race or c.holdout:
        option = "race" if c.race else "holdout"
        for task in c.tasks:
            if task.name in loaded["groups"]:
                raise UserError(f"--{option}: {task.name} is a group; list its tasks instead")
            if not lm_eval_tasks.is_mean(loaded, task.name, task.metric):
                raise UserError(
                    f"--{option}: {task.metric} of {task.name} is not a mean over single questions, so it cannot be "
                    "compared question by question"
                )


def scored(
    c: SearchConfig,
    evaluation: TaskEvaluation,
    model: Any,
    rival: Metrics | None = None,
    on: splits.EvalSplit = "validation",
) -> Metrics:
    """A model's score; of a race, perhaps only what it would probably have been."""
    everything = evaluation.parted(c.holdout)[on]
    for share in _STAGES if rival else (1.0,):
        some = _subset(c, everything, share)
        if share < 1 and min(map(len, some.values())) < _FEW:
            continue
        marks = evaluation.marks(model, some)
        if rival and share < 1:
            mean, error = behind(c, marks, some, rival, everything)
            if mean + _HOPELESS * error < 0:
                count = sum(map(len, some.values()))
                return {**graded(c, marks), "score": float(rival["score"]) + mean, "asked": count, "given_up": True}
    return {**graded(c, marks), "asked": sum(map(len, everything.values())), "given_up": False}


def graded(c: SearchConfig, marks: Marks) -> Metrics:
    scores = {task.key: marks.results[task.name][task.metric] for task in c.tasks}
    score = sum(task.weight * scores[task.key] for task in c.tasks)
    if not math.isfinite(score):
        raise UserError(f"the score is {score}: {scores}")
    return {"score": float(score), "scores": json.dumps(scores), "single": json.dumps(_single(c, marks))}


def behind(
    c: SearchConfig, marks: Marks, some: Questions, rival: Metrics, everything: Questions
) -> tuple[float, float]:
    """How far a candidate is ahead of the rival on the same questions, and the standard error of that."""
    theirs, mine, ahead = json.loads(rival["single"]), _single(c, marks), dict[str, list[float]]()
    for task in c.tasks:
        place = {question: n for n, question in enumerate(everything[task.name])}
        other = [theirs[task.key][place[question]] for question in some[task.name]]
        ahead[task.key] = [a - b for a, b in zip(mine[task.key], other, strict=True)]
    return mean_and_error(c, ahead)


def mean_and_error(c: SearchConfig, single: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Of the weighted sum of marks; a question's marks by several metrics go together."""
    of_task: dict[str, np.ndarray] = {}
    for task in c.tasks:
        marks = task.weight * np.asarray(single.get(task.key, ()), float)
        of_task[task.name] = of_task[task.name] + marks if task.name in of_task else marks
    if any(len(marks) < 2 for marks in of_task.values()):
        return math.nan, math.inf
    # few questions with equal marks are no proof that all are equal
    parts = [max(marks.var(ddof=1), np.abs(marks).max() ** 2 / len(marks)) / len(marks) for marks in of_task.values()]
    return float(sum(marks.mean() for marks in of_task.values())), math.sqrt(sum(parts))


def _single(c: SearchConfig, marks: Marks) -> dict[str, list[float]]:
    """Question by question, where a metric has such marks."""
    found = {}
    for task in c.tasks:
        values = marks.single.get(task.name, {}).get(task.metric, [])
        if values and all(isinstance(value, (bool, int, float)) for value in values):
            found[task.key] = [round(float(value), 6) for value in values]
    return found


def _subset(c: SearchConfig, everything: Questions, share: float) -> Questions:
    """The first so many in an order that the seed chose: a larger share contains every smaller one."""
    found = {}
    for name, numbers in everything.items():
        order = np.random.default_rng([c.seed, 11, len(numbers)]).permutation(len(numbers))
        found[name] = sorted(numbers[n] for n in order[: max(1, round(share * len(numbers)))])
    return found

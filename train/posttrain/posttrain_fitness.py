"""How fit a member is: by tasks of lm-eval, by the loss on held-out rows, or by several; with its standard error."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from fleet.run_config import UserError
from train import lm_eval_tasks, question_marks
from train.few_questions import Items
from train.fitness_from import Interview
from train.lm_eval_tasks import TaskEvaluation, TaskRequest
from train.parent_selection import Rival
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import LOSS, Objective
from train.question_marks import Answers
from train.recipe_arguments import EvaluationArgs

Metrics = Mapping[str, Any]
Single = Mapping[str, Sequence[float]]  # objective -> marks, question by question


@dataclass(frozen=True)
class Fitness:
    """Of one member on one set of questions."""

    value: float
    error: float | None  # its standard error, where that can be known
    objectives: Mapping[str, float]
    single: Single

    def metrics(self, keep: bool = False) -> dict[str, Any]:
        kept = {"single": json.dumps({key: [round(x, 6) for x in marks] for key, marks in self.single.items()})}
        error = {} if self.error is None else {"error": self.error}
        return {"fitness": self.value, **error, "objectives": json.dumps(self.objectives), **(kept if keep else {})}


def fitness_of(
    c: PosttrainConfig, single: Single, values: Mapping[str, float], told: Metrics = MappingProxyType({})
) -> Fitness:
    """The weighted sum; a loss counts against. Of tasks it may be told, with its standard error."""
    value = math.fsum(signed(each) * values[each.key] for each in c.fitness)
    error = standard_error(c, single)
    if told.get("given_up"):
        value += told["score"] - math.fsum(each.weight * values[each.key] for each in c.tasks)
    elif "standard_error" in told:
        of_loss = standard_error(c, {key: marks for key, marks in single.items() if key == LOSS}, [LOSS])
        error = math.hypot(told["standard_error"], of_loss or 0.0)
    if not math.isfinite(value):
        raise UserError(f"the fitness is {value}: {dict(values)}")
    return Fitness(value, error, values, single)


def signed(objective: Objective) -> float:
    return -objective.weight if objective.task == LOSS else objective.weight


def rival_of(c: PosttrainConfig, id: str, metrics: Metrics) -> Rival:
    values = json.loads(metrics["objectives"])
    gains = {each.key: math.copysign(1.0, signed(each)) * values[each.key] for each in c.fitness if each.weight}
    marks = json.loads(metrics.get("single", "{}")) if c.compares_questions else {}
    there = [(each, [solved(each, mark) for mark in marks[each.key]]) for each in c.fitness if each.key in marks]
    worth = [abs(each.weight) / len(some) for each, some in there for _ in some]
    return Rival(id, metrics["fitness"], gains, [mark for _, some in there for mark in some], worth)


def solved(objective: Objective, mark: float) -> float:
    """How far a question is, between 0 and 1; of a loss, the probability of a token."""
    if objective.task == LOSS:
        return math.exp(-mark)
    return min(1.0, max(0.0, mark if objective.weight > 0 else 1 - mark))


def ahead(c: PosttrainConfig, one: Metrics, other: Metrics) -> tuple[float, float | None]:
    """By how much one is fitter than the other, and the standard error of that: on the same questions."""
    mine, theirs = json.loads(one["single"]), json.loads(other["single"])
    single = {key: [a - b for a, b in zip(mine[key], theirs[key], strict=True)] for key in mine}
    return one["fitness"] - other["fitness"], standard_error(c, single)


def standard_error(c: PosttrainConfig, single: Single, tasks: Sequence[str] = ()) -> float | None:
    """Of the weighted sum. Metrics of one task are of the same questions, so that their marks are added first."""
    whole = dict[str, Any]()
    for each in c.fitness:
        if tasks and each.task not in tasks:
            continue
        marks = np.asarray(single.get(each.key, ()), float)
        if each.weight and len(marks) < 2:
            return None
        whole[each.task] = whole.get(each.task, 0.0) + signed(each) * marks
    return math.sqrt(math.fsum(float(marks.var(ddof=1)) / len(marks) for marks in whole.values() if len(marks) > 1))


# -- tasks ------------------------------------------------------------------------------------------------------------


def asked(c: PosttrainConfig) -> TaskRequest:
    names = tuple(dict.fromkeys(each.task for each in c.tasks))
    return TaskRequest(names, None, c.num_fewshot, False, None, True, c.task_path, c.seed)


def load_tasks(c: PosttrainConfig) -> dict[str, Any]:
    """Whatever is missing is said before anybody trains."""
    if not asked(c).tasks:
        return {}
    loaded = lm_eval_tasks.load(asked(c), c.allow_benchmark_tasks)
    lm_eval_tasks.check_metrics(loaded, [(each.task, each.metric) for each in c.tasks])
    lm_eval_tasks.parted(asked(c), loaded, c.holdout)
    if c.compares_questions or c.fitness_from != "all":
        why = "MATES attraction" if c.mates == "attraction" else f"SELECTION {c.selection}"
        question_marks.check(c.tasks, loaded, why if c.compares_questions else f"FITNESS_FROM {c.fitness_from}")
    for name, task in loaded["tasks"].items():
        if c.num_fewshot and not lm_eval_tasks.has_examples(task):
            raise UserError(
                f"task {name} has no examples besides its questions, and NUM_FEWSHOT would show those that only the "
                "end may ask; give it a training_split, or leave NUM_FEWSHOT out"
            )
    return loaded


def interviewed(
    c: PosttrainConfig, evaluation: TaskEvaluation, model: Any, asked: EvaluationArgs, how: Interview, ahead: float
) -> Metrics:
    """What it says to tasks, perhaps to few of their questions, as metrics."""
    answers, known = Answers(c.tasks, partial(evaluation.marks, model)), asked
    if c.fitness_from == "irt":  # which knows the questions of the first generation
        known = asked.model_copy(update={"generation": 1})
    return how.of(c.tasks, answers, drawn(c, evaluation.parted(c.holdout)["validation"], known), c.seed, ahead)


def items(c: PosttrainConfig, loaded: Mapping[str, Any]) -> Items:
    """Marks of all questions of which few are asked."""
    there = lm_eval_tasks.parted(asked(c), loaded, c.holdout)["validation"]
    return Items(c.tasks, drawn(c, there, EvaluationArgs(on="validation", generation=1)))


def marks_of(
    c: PosttrainConfig, evaluation: TaskEvaluation, model: Any, asked: EvaluationArgs
) -> tuple[Single, Mapping[str, float]]:
    """The same questions for everybody: of a generation, or those at the end."""
    marks = evaluation.marks(model, drawn(c, evaluation.parted(c.holdout)[asked.on], asked))
    single, values = dict[str, Sequence[float]](), dict[str, float]()
    for each in c.tasks:
        values[each.key] = float(marks.results[each.task][each.metric])
        mean = lm_eval_tasks.is_mean(evaluation.loaded, each.task, each.metric)
        answers = marks.single.get(each.task, {}).get(each.metric, []) if mean else []
        single[each.key] = [float(x) for x in answers if isinstance(x, (bool, int, float))]
    return single, values


def drawn(c: PosttrainConfig, there: Mapping[str, Sequence[int]], asked: EvaluationArgs) -> dict[str, list[int]]:
    """Of each task's questions: QUESTIONS of those for validation, others in each generation; or all of the test."""
    if asked.on == "test":
        return {name: list(numbers) for name, numbers in there.items()}
    rng = {name: np.random.default_rng([c.seed, 13, asked.generation, len(each)]) for name, each in there.items()}
    orders = {name: rng[name].permutation(len(each)) for name, each in there.items()}
    return {name: sorted(each[int(n)] for n in orders[name][: c.questions]) for name, each in there.items()}

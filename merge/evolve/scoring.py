"""How candidates are graded: what a score is, and from which questions."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from merge.evolve.search_config import SearchConfig
from train import lm_eval_tasks, question_marks
from train.few_questions import asked_for
from train.fitness_from import Interview
from train.lm_eval_tasks import Marks, TaskEvaluation, TaskRequest
from train.question_marks import Answers, Metrics


def asked(c: SearchConfig) -> TaskRequest:
    names = tuple(dict.fromkeys(task.name for task in c.tasks))
    how = (c.limit, c.num_fewshot, c.shuffle, c.apply_chat_template, c.fewshot_as_multiturn)
    return TaskRequest(names, *how, c.task_path, c.seed)


def check(c: SearchConfig, loaded: Mapping[str, Any]) -> None:
    lm_eval_tasks.check_metrics(loaded, [(task.name, task.metric) for task in c.tasks])
    lm_eval_tasks.parted(asked(c), loaded, c.holdout)
    if c.fitness_from != "all" or c.holdout:
        why = f"--fitness-from {c.fitness_from}" if c.fitness_from != "all" else "--holdout"
        question_marks.check(c.tasks, loaded, why)


def scored(c: SearchConfig, evaluation: TaskEvaluation, model: Any, how: Interview) -> Metrics:
    everything = asked_for(how.on, evaluation.parted(c.holdout), c.fitness_from, c.seed)
    if how.rival or how.few or how.earlier:
        answers = Answers(c.tasks, partial(evaluation.marks, model))
        return how.of(c.tasks, answers, everything, c.seed)
    marks = evaluation.marks(model, everything)
    return {**graded(c, marks), "asked": sum(map(len, everything.values())), "given_up": False}


def graded(c: SearchConfig, marks: Marks) -> Metrics:
    """As lm-eval sums marks up, which need not be means."""
    scores = {task.key: marks.results[task.name][task.metric] for task in c.tasks}
    single = json.dumps(question_marks.single(c.tasks, marks))
    return {"score": question_marks.summed(c.tasks, scores), "scores": json.dumps(scores), "single": single}

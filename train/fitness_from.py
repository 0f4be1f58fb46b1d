"""From which answers a model's fitness comes: from all; of a race, in which the hopeless answer few; or from a few, by
which a response model estimates the others."""

import json
from dataclasses import dataclass

from train.few_questions import FewQuestions
from train.question_marks import (
    Answers,
    Metrics,
    Objectives,
    Questions,
    Single,
    mean_and_error,
    means,
    subset,
    summed,
)
from train.splits import EvalSplit

_STAGES = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the questions, in a race
_FEW = 8  # questions of a task, from which nothing is concluded
_HOPELESS = 2.33  # standard errors below the best: a chance of 1% to be as good


@dataclass(frozen=True)
class Interview:
    """What a candidate is asked, and why."""

    on: EvalSplit = "validation"
    rival: Metrics | None = None  # in a race: it is given up once it has no hope to beat this one
    few: FewQuestions | None = None  # those that it answers, of all
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
        there, theirs = answers.count, json.loads(self.rival["single"]) if self.rival else {}
        race = (objectives, answers, everything, theirs, seed, ahead)
        marks, lead = raced(*race) if theirs else (answers.to(everything), None)
        scores = means(objectives, marks)
        score = summed(objectives, scores)
        if lead is not None:
            score = summed(objectives, means(objectives, theirs)) + lead
        told = {"scores": json.dumps(scores), "single": json.dumps(marks), "asked": answers.count - there}
        return {"score": score, **told, "given_up": lead is not None}


def raced(
    objectives: Objectives, answers: Answers, everything: Questions, theirs: Single, seed: int, ahead: float = 0.0
) -> tuple[dict[str, list[float]], float | None]:
    """A model's marks of all questions, or of those after which it was given up on, and then by how much it is ahead of
    the rival there, whose marks of all questions are given."""
    for share in _STAGES[:-1]:
        some = subset(everything, share, seed)
        if min(map(len, some.values())) < _FEW:
            continue
        mine = answers.to(some)
        mean, error = _lead(objectives, mine, some, theirs, everything)
        if ahead + mean + _HOPELESS * error < 0:
            return mine, mean
    return answers.to(everything), None


def _lead(
    objectives: Objectives, mine: Single, some: Questions, theirs: Single, everything: Questions
) -> tuple[float, float]:
    """How far a candidate is ahead of the rival on the same questions, and the standard error of that."""
    ahead = dict[str, list[float]]()
    for each in objectives:
        place = {question: n for n, question in enumerate(everything[each.name])}
        other = [theirs[each.key][place[question]] for question in some[each.name]]
        ahead[each.key] = [a - b for a, b in zip(mine[each.key], other, strict=True)]
    return mean_and_error(objectives, ahead)

"""What the workers of every search do: check whether it can work, score, and write its records for people."""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

from fleet import faults
from fleet.history import History
from fleet.recipe import NotYet
from fleet.tasks import Args, Task, dispatcher
from fleet.work import Maker, Work
from merge.search.search_strategy import CHECK, QuestionArgs
from train.few_questions import FewQuestions, Items, calibrated
from train.fitness_from import Interview

E = TypeVar("E", bound="CandidateEvaluator[Any]")
F = TypeVar("F")
Q = TypeVar("Q", bound="Forgetful")


class Forgetful(Protocol):
    def forget(self) -> None: ...


class CandidateEvaluator(ABC, Generic[Q]):
    """A worker's memory: models that stay open, and what all candidates of one tokenizer are asked, made once."""

    def __init__(self, seed: int, fewest: int) -> None:
        self.seed, self.fewest = seed, fewest  # of few questions, how many; 0: as many as suit
        self._questions: tuple[str, Q] | None = None
        self._few: tuple[int, FewQuestions] | None = None

    @cached_property
    def eval_tasks(self) -> dict[str, Any]:
        """Of lm-eval."""
        return self.loaded()

    @abstractmethod
    def loaded(self) -> dict[str, Any]: ...

    @abstractmethod
    def check(self) -> Mapping[str, Any]:
        """Whether these models can be merged and asked, before anything is merged; what the strategy must know."""

    @abstractmethod
    def questions_for(self, live: Any) -> Q: ...

    def questions(self, live: Any) -> Q:
        """Models of one tokenizer share them."""
        if self._questions is None or self._questions[0] != live.words:
            self._questions = live.words, self.questions_for(live)
        return self._questions[1]

    @abstractmethod
    def items(self) -> Items:
        """Marks of all questions by which candidates are chosen."""

    def few(self, calibration: Mapping[str, Any], draw: int) -> FewQuestions:
        """A generation is asked the same ones."""
        if self._few is None or self._few[0] != draw:
            self._few = draw, FewQuestions.of(self.items(), calibration, self.seed, draw)
        return self._few[1]

    def forget(self) -> None:
        """Let go of the last model: the next one needs its room."""
        if self._questions:
            self._questions[1].forget()


def maker(
    tasks: Mapping[str, Task[Any]], evaluator: Callable[[], E], check_can_serve: Callable[[E, Work], None], advice: str
) -> Maker:
    """With an evaluator that stays; `check_can_serve` raises where this worker is not the one to make a recipe."""
    from train.verdicts import with_verdicts

    every: Mapping[str, Task[Any]] = {"check": Task(_check), "calibrate": Task(_calibrate), **tasks}
    made = dispatcher(every)

    def make(known: E, work: Work) -> Mapping[str, Any]:
        check_can_serve(known, work)
        return made(known, work)

    return with_verdicts(evaluator, make, advice)


def _check(evaluator: CandidateEvaluator[Any], work: Work, args: Args) -> Mapping[str, Any]:
    return evaluator.check()


def interview(evaluator: CandidateEvaluator[Any], work: Work, args: QuestionArgs) -> Interview:
    """By what others have answered, or the candidate itself."""
    rival, known, earlier = (work.history[id].metrics if id else None for id in (args.rival, args.few, args.earlier))
    return Interview(args.on, rival, evaluator.few(known, args.draw) if known else None, earlier)


def _calibrate(evaluator: CandidateEvaluator[Any], work: Work, args: Args) -> Mapping[str, Any]:
    known = [input.metrics for id, input in work.inputs.items() if id != CHECK]
    return calibrated(evaluator.items(), [json.loads(each["single"]) for each in known], evaluator.fewest)


def writing_when_longer(
    table: str,
    read: Callable[[History], F],
    count: Callable[[F], int],
    entries: Callable[[bytes], int],
    files: Callable[[F], dict[str, bytes]],
) -> Callable[[History], None]:
    """Write a search's files for people into the run's folder once the table among them has more entries than the one
    that is there: somebody may know more than this worker does."""

    def report(history: History) -> None:
        with contextlib.suppress(faults.Fault, NotYet, KeyError):
            found, there = read(history), 0
            with contextlib.suppress(faults.Fault, ValueError, KeyError):
                there = entries(history.store.load(table, 1 << 28))
            if count(found) > there:
                for name, data in files(found).items():
                    history.store.replace(name, data)

    return report

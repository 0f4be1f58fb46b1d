"""A search as a run: round 0 checks whether it can work, each round after it is a generation, the last one tests the
winner and the given models on questions by which nothing was selected. Pure."""

from abc import ABC, abstractmethod

from fleet.recipe import Past, Recipe, round_and_slot
from fleet.tasks import Args
from train.fitness_config import KNOWN
from train.splits import EvalSplit

CHECK = "0/check"


class QuestionArgs(Args):
    """Of every task that scores."""

    on: EvalSplit
    rival: str = ""  # in a race: the candidate to be ahead of
    few: str = ""  # the id of the calibration, which knows what answers say of each question, so that few are asked
    draw: int = 0  # which few
    earlier: str = ""  # who has answered few of them for it already


class SearchStrategy(ABC):
    """What differs between searches is what they propose, and when they are over."""

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round == 0:
            return [Recipe("check", "check", role="tool"), *self.copies()]
        last = self.last_generation(round, history)
        if last is None:
            return self.generation(round, history)
        if (finals := self.finals(last, history)) and round == last + 1:
            return finals
        winner = self.winner(last, history) if round == last + 1 + bool(finals) else None
        return [winner, *self.given("test", history)] if winner else []

    @abstractmethod
    def last_generation(self, round: int, history: Past) -> int | None:
        """The number of the generation after which the search ended; None while it goes on."""

    @abstractmethod
    def generation(self, round: int, history: Past) -> list[Recipe]:
        """What is proposed after all that was scored so far; in round 1 the given models, too."""

    @abstractmethod
    def given(self, on: EvalSplit, history: Past) -> list[Recipe]:
        """The models themselves, to compare with."""

    def finals(self, last: int, history: Past) -> list[Recipe]:
        """Where scores are estimates: those who answer all questions before one of them wins."""
        return []

    @abstractmethod
    def winner(self, last: int, history: Past) -> Recipe | None:
        """The best candidate, to be tested; None: there is none, or no test."""

    def calibration(self, history: Past) -> Recipe:
        """By those who answer everything: the first generation, and the models themselves."""
        there = [f"1/{recipe.slot}" for recipe in history.plan(1) if recipe.task == "score"]
        return Recipe(round_and_slot(KNOWN)[1], "calibrate", (), (CHECK, *there), "tool")

    def copies(self) -> list[Recipe]:
        """What round 0 makes besides its check."""
        return []

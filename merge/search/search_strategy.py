"""A search as a run: round 0 checks whether it can work, each round after it is a generation, the last one tests the
winner and the given models on questions by which nothing was selected. Pure."""

from abc import ABC, abstractmethod

from fleet.recipe import Past, Recipe
from fleet.tasks import Args
from train.splits import EvalSplit

CHECK = "0/check"


class QuestionArgs(Args):
    """Of every task that scores."""

    on: EvalSplit


class SearchStrategy(ABC):
    """What differs between searches is what they propose, and when they are over."""

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round == 0:
            return [Recipe("check", "check", role="tool"), *self.copies()]
        last = self.last_generation(round, history)
        if last is None:
            return self.generation(round, history)
        winner = self.winner(last, history) if round == last + 1 else None
        return [winner, *self.given("test", history)] if winner else []

    @abstractmethod
    def last_generation(self, round: int, history: Past) -> int | None:
        """The last generation, if it lies before this round."""

    @abstractmethod
    def generation(self, round: int, history: Past) -> list[Recipe]:
        """What is proposed after all that was scored so far; in round 1 the given models, too."""

    @abstractmethod
    def given(self, on: EvalSplit, history: Past) -> list[Recipe]:
        """The models themselves, to compare with."""

    @abstractmethod
    def winner(self, last: int, history: Past) -> Recipe | None:
        """The best candidate, to be tested; None: there is none, or no test."""

    def copies(self) -> list[Recipe]:
        """What round 0 makes besides its check."""
        return []

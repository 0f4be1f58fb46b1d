"""The keys of learning from rewards: how many answers, what counts of them, whose are learned from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import field_validator, model_validator

from fleet.run_config import Section, Text, bound, whole

CORRECT = "correct"
TERMS = (CORRECT, "format", "brief")  # that the built-in checkers give
COOLER, WARMER = 0.7, 1.3  # how far a genome's temperature may be from the one that is given, times it


class Answering(Section):
    """What is asked of answers, and what counts of them."""

    max_tokens: int = bound(32, "The longest answer; a question with it must fit into SEQ_LENGTH.", ge=1, le=10**6)
    rewards: dict[str, float] = bound(
        {CORRECT: 1.0, "format": 0.1, "brief": 0.0},
        "Weights of the terms; of grpo, in the first members' genomes, and one of 0 stays 0. FITNESS alone judges. "
        "Unless they are given, with a verifier correct alone.",
    )
    verifier: Text | None = bound(
        None, "A .py file of one's own with `reward(prompt, answer, row)`: named terms from 0 to 1."
    )
    allow_verifier: bool = bound(False, "Let its code run, in a process of its own.")
    verifier_seconds: float = bound(5.0, "For each answer.", gt=0, le=3600)

    @model_validator(mode="before")
    @classmethod
    def _of_a_verifier(cls, values: Any) -> Any:
        """Its terms are its own: of these, what is right is all that can be expected."""
        if isinstance(values, dict) and values.get("verifier") and "rewards" not in values:
            return {**values, "rewards": {CORRECT: 1.0}}
        return values

    @field_validator("rewards")
    @classmethod
    def _weights(cls, rewards: Mapping[str, Any]) -> dict[str, float]:
        found = {str(name): float(weight) for name, weight in rewards.items()}
        if not all(0 <= weight <= 1e6 for weight in found.values()) or not sum(found.values()):
            raise ValueError("weights are from 0 to 1000000, and one is above 0")
        return found

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.verifier and not self.allow_verifier:
            raise ValueError(f'{self.verifier} is a program: "allow_verifier": true lets it run')
        if self.verifier is None and (unknown := self.rewards.keys() - {*TERMS}):
            raise ValueError(f"no term is called {sorted(unknown)[0]!r}; there are {', '.join(TERMS)}")
        return self

    def found_from(self, where: Path) -> Self:
        """With the verifier by its whole path: workers may be anywhere."""
        found = {"verifier": whole(self.verifier, where, (".py",))} if self.verifier else {}
        return self.model_copy(update=found)


class Grpo(Answering):
    """Of a child's answers, and of its steps."""

    answers: int = bound(
        8, "To each question, a group: what counts is how much better than its group one is.", ge=2, le=4096
    )
    temperature: float = bound(1.0, "Of the answers, in the first members' genomes.", ge=0.1, le=4)
    clip_low: float = bound(0.2, "So far below 1 the ratio of a token's probabilities counts.", gt=0, lt=1)
    clip_high: float = bound(0.28, "And so far above.", gt=0, le=100)
    by_spread: bool = bound(True, "Divide what is better or worse by the group's standard deviation.")
    kl: float = bound(0.0, "How much leaving what the parents made counts, in nats a token.", ge=0, le=100)
    share: float = bound(
        0.0,
        "Learn from so many of the others' groups, too, as a share of one's own questions: those that tell most.",
        ge=0,
        le=100,
    )
    staleness: int = bound(1, "Of others: at most so many generations old.", ge=1, le=100)
    truncation: float = bound(
        2.0,
        "The most that a token counts because the policy that learns would say it more often than the one that did.",
        ge=1,
        le=100,
    )


class Es(Answering):
    """Of a round's perturbations."""

    sigma: float = bound(0.001, "How far perturbed members are: the deviation of each weight.", gt=0, le=10)
    rank: int = bound(0, "Above 0, matrices are perturbed by products of two with so many columns.", ge=0, le=4096)
    publish_every: int = bound(
        10, "Rounds from one publishing of the weights, with a held-out evaluation, to the next.", ge=1, le=90_000
    )

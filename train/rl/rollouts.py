"""Rollouts: a policy's answers to some questions, a group to each, with what each was worth; one compressed file, which
nobody ever changes. Pure."""

import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fleet.run_config import UserError
from train.rl.checkers import Said, Terms

FILE = "rollouts.json.gz"
Judged = tuple[Said, Terms]  # an answer, and what it is worth
_EPSILON = 1e-4  # beside a standard deviation, as in TRL


@dataclass(frozen=True)
class Group:
    """All answers to one question."""

    source: str  # the environment's name
    question: str
    prompt: Sequence[int]  # tokens
    answers: Sequence[Said]
    terms: Sequence[Terms]  # of each answer

    def rewards(self, weights: Mapping[str, float]) -> list[float]:
        return [reward(each, weights) for each in self.terms]


@dataclass(frozen=True)
class Rollouts:
    """Of one slot in one round."""

    temperature: float
    groups: Sequence[Group]

    @property
    def tokens(self) -> int:
        """That were generated."""
        return sum(len(said.tokens) for group in self.groups for said in group.answers)


def reward(terms: Terms, weights: Mapping[str, float]) -> float:
    """The terms' weighted mean, from 0 to 1."""
    if missing := [name for name, weight in weights.items() if weight and name not in terms]:
        raise UserError(f"rewards has {missing[0]!r}, but an answer is told {', '.join(terms) or 'nothing'}")
    total = math.fsum(weights.values())
    return math.fsum(weight * terms[name] for name, weight in weights.items() if weight) / total


def advantages(rewards: Sequence[float], by_spread: bool = True) -> list[float]:
    """By how much each is better than its group; in standard deviations, as GRPO has it."""
    mean = math.fsum(rewards) / len(rewards)
    spread = math.sqrt(math.fsum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))
    return [(x - mean) / (spread + _EPSILON if by_spread else 1.0) for x in rewards]


def rewards_differ(rewards: Sequence[float]) -> bool:
    """Whether one answer of a group was better than another: otherwise there is nothing to learn from it."""
    return max(rewards) - min(rewards) > 1e-9


def most_instructive(groups: Sequence[Group], weights: Mapping[str, float], count: int) -> list[Group]:
    """Those in which the rewards differ most; of equal ones the first. None of which nothing can be learned."""
    spread = {
        n: max(found) - min(found) for n, group in enumerate(groups) if rewards_differ(found := group.rewards(weights))
    }
    deviation = {n: sum(abs(x) for x in advantages(groups[n].rewards(weights), by_spread=False)) for n in spread}
    return [groups[n] for n in sorted(deviation, key=lambda n: (-deviation[n], n))[:count]]


# -- the file ----------------------------------------------------------------------------------------------------------


def packed(rollouts: Rollouts) -> bytes:
    """The same bytes for the same rollouts, whenever they are written."""
    return _packed(asdict(rollouts))


def unpacked(data: bytes) -> Rollouts:
    found = _unpacked(data)
    groups = tuple(
        Group(**{**each, "answers": tuple(Said(**said) for said in each["answers"])}) for each in found["groups"]
    )
    return Rollouts(found["temperature"], groups)


def packed_answers(answers: Sequence[Judged]) -> bytes:
    """Of rollouts that are not complete."""
    return _packed([[asdict(said), terms] for said, terms in answers])


def unpacked_answers(data: bytes) -> list[Judged]:
    return [(Said(**said), terms) for said, terms in _unpacked(data)]


def _packed(plain: Any) -> bytes:
    return gzip.compress(json.dumps(plain, separators=(",", ":")).encode(), 6, mtime=0)


def _unpacked(data: bytes) -> Any:
    return json.loads(gzip.decompress(data))


# -- their metrics ----------------------------------------------------------------------------------------------


def metrics_of(rollouts: Rollouts, weights: Mapping[str, float]) -> dict[str, Any]:
    """Means over all answers, of each environment's terms, and of how many groups there is nothing to learn."""
    rewards = [group.rewards(weights) for group in rollouts.groups]
    found: dict[str, list[float]] = {}
    for group in rollouts.groups:
        for terms in group.terms:
            for name, value in terms.items():
                found.setdefault(f"reward/{group.source}/{name}", []).append(value)
    said = [each for group in rollouts.groups for each in group.answers]
    return {
        "reward": _mean([x for each in rewards for x in each]),
        "silent": _mean([float(not rewards_differ(each)) for each in rewards]),
        "generated": rollouts.tokens,
        "ended": _mean([float(each.ended) for each in said]),
        **{name: _mean(values) for name, values in sorted(found.items())},
    }


def samples(rollouts: Rollouts, weights: Mapping[str, float], count: int = 2) -> dict[str, list[dict[str, Any]]]:
    """The best and the worst answers, each to another question, with its rewards."""
    every: list[dict[str, Any]] = [
        {"question": group.question, "answer": said.text, "reward": reward(terms, weights), **terms}
        for group in rollouts.groups
        for said, terms in zip(group.answers, group.terms, strict=True)
    ]
    order = sorted(every, key=lambda each: -each["reward"])
    return {"best": _to_several(order)[:count], "worst": _to_several(order[::-1])[:count]}


def _to_several(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each question the first."""
    found: dict[str, dict[str, Any]] = {}
    for each in answers:
        found.setdefault(each["question"], each)
    return [*found.values()]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0

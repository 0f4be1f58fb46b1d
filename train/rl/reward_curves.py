"""What a round's answers were worth, for people: a line while a run goes on, points for sinks of metrics. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fleet.history import History
from fleet.metrics import points as fleet_points
from fleet.metrics.sink import Point
from fleet.recipe import Past, name
from fleet.reward_hacking import TERM, Rewards, hacked, rewards_of

PAIR = "pair"
TASKS = ("rollouts", PAIR)  # whose answers a model learns from
_BACK = 60  # rounds that are looked at for what has become of rewards
_NOTHING = (
    "all answers to each question had the same reward, so there was nothing to learn: easier or harder questions, a "
    "higher temperature (of es, sigma) or other rewards would tell more"
)


def line(history: History, round: int) -> str:
    """Of the answers that children learned from; empty where nobody gave any."""
    there = _told(history, round)
    if not there:
        return ""
    silent = _mean([float(each["silent"]) for each in there])
    if silent == 1:
        return _NOTHING
    terms: dict[str, list[float]] = {}
    for each in there:
        for key in each:
            if key.startswith(TERM):
                terms.setdefault(key.rpartition("/")[2], []).append(each[key])
    said = ", ".join(f"{term} {_mean(values):.3f}" for term, values in terms.items())
    speed = _speed(history, round)
    told = f"{silent:.0%} of the groups tell nothing"
    if any(recipe.task == PAIR for recipe in history.plan(round)):  # of evolution strategies, of which that is usual
        told = f"{1 - silent:.0%} of the questions tell a pair apart"
    words = f"answers: {said}, {told}, {speed:,.0f} tokens generated a second"
    return "; ".join(filter(None, [words, hacked(_lately(history, round))]))


def _lately(history: History, round: int) -> Mapping[int, Rewards]:
    there = range(max(1, round - _BACK), round + 1)
    return {n: history.once("rewards", n, partial(_rewards, history, n)) for n in there}


def _rewards(history: Past, round: int) -> Rewards:
    return rewards_of(_told(history, round))


def points(history: History, begin: int) -> list[Point]:
    """The fleet's own, and the means over each round's answers."""
    return [
        replace(each, values={**each.values, **_values(history, each.step)})
        for each in fleet_points.points(history, begin)
    ]


def _values(history: History, round: int) -> Mapping[str, float]:
    there = _told(history, round)
    keys = sorted({key for each in there for key in each if key.startswith(TERM)})
    if not there:
        return {}
    found = {key: _mean([each[key] for each in there if key in each]) for key in ("reward", "silent", "ended", *keys)}
    return {
        **found,
        "generated": float(generated(history, round)),
        "generated/second": _speed(history, round),
    }


def generated(history: Past, round: int) -> int:
    """Tokens of the answers that were learned from."""
    return sum(each["generated"] for each in _told(history, round))


def _told(history: Past, round: int) -> list[Mapping[str, Any]]:
    """By those rollouts that were made in this round."""
    return [
        each.metrics for each in history.round(round) if each and each.recipe.task in TASKS and each.id == each.origin
    ]


def _speed(history: History, round: int) -> float:
    """Tokens that one worker generates in a second, all that belongs to it included."""
    ids = [name(round, recipe.slot) for recipe in history.plan(round) if recipe.task in TASKS]
    outcomes = [history.outcome(id) for id in ids]
    tokens = sum(each.member.metrics.get("generated", 0) for each in outcomes if each.member)
    return float(tokens) / max(1e-9, math.fsum(each.seconds for each in outcomes if each.member))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

"""What a run's registers say, as points: a step for each finished round. Pure; docs/metrics.md explains the names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fleet.history import History
from fleet.metrics.sink import Point
from fleet.recipe import Member, name, round_and_slot

BEST: Mapping[str, Callable[[Iterable[float]], float]] = {
    **{"loss": min, "bits_per_byte": min, "train_loss": min},
    **{"fitness": max, "score": max, "test_score": max},
}
_FIRST = ("round", "slot", "loss", "bits_per_byte", "perplexity", "train_loss", "tokens", "seconds", "by")
_LONGEST = 200  # characters of a text that a table shows


def points(history: History, begin: int) -> list[Point]:
    """A point for each finished round from a given one on."""
    return [point(history, round) for round in range(begin, history.first_open)]


def point(history: History, round: int) -> Point:
    members = [member for member in history.round(round) if member]
    values = {key: value for measure in BEST for key, value in _measured(measure, members).items()}
    return Point(round, {**values, **_costs(history, round)}, rows(history, [round]))


def rows(history: History, rounds: Iterable[int]) -> list[dict[str, Any]]:
    """A row for every member that has metrics, with the machine's part in it."""
    found = []
    for round, member in ((n, member) for n in rounds for member in history.round(n)):
        if member.diverged or not BEST.keys().isdisjoint(member.metrics):
            outcome = history.outcome(member.origin)
            said = {"round": round, "slot": round_and_slot(member.id)[1], **_shown(member.metrics),
                    "seconds": f"{outcome.seconds:.3f}", "by": outcome.by}  # fmt: skip
            found.append({**dict.fromkeys(_FIRST, ""), **{key: said[key] for key in sorted(said)}})
    return found


def _shown(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not (isinstance(value, str) and len(value) > _LONGEST)}


def _measured(measure: str, members: Sequence[Member]) -> dict[str, float]:
    """The mean and the best of all members, each by itself, and the model that all are in."""
    known = [(m, float(value)) for m in members if isinstance(value := m.metrics.get(measure), int | float)]
    single = {round_and_slot(member.id)[1]: value for member, value in known if member.recipe.role != "summary"}
    all = {"mean": sum(single.values()) / len(single), "best": BEST[measure](single.values())} if single else {}
    return {
        **{f"{measure}/averaged": value for member, value in known if member.recipe.role == "summary"},
        **{f"{measure}/{what}": value for what, value in all.items()},
        **{f"{measure}_of/{slot}": value for slot, value in single.items()},
    }


def _costs(history: History, round: int) -> dict[str, float]:
    """What was made in this round, not carried over from another one."""
    ids = [name(round, recipe.slot) for recipe in history.plan(round) if not recipe.carried]
    outcomes = [history.outcome(id) for id in ids]
    there = [outcome for outcome in outcomes if outcome.member]
    tokens = [each.member.metrics["tokens"] for each in there if isinstance(each.member.metrics.get("tokens"), int)]
    diverged, lost = (sum(bool(getattr(each.member, what)) for each in there) for what in ("diverged", "lost"))
    return {
        "members/made": float(len(there)),
        "members/absent": float(len(outcomes) - len(there)),
        "seconds/all": sum(outcome.seconds for outcome in there),
        "seconds/longest": max((outcome.seconds for outcome in there), default=0.0),
        "bytes/published": float(sum(size for outcome in there for size, _ in outcome.files.values())),
        **({"members/diverged": float(diverged)} if diverged else {}),
        **({"members/lost_own": float(lost)} if lost else {}),
        **({"tokens": float(sum(tokens))} if tokens else {}),
    }

"""Writing down what is decidable, and removing what nothing planned or still to be planned can reach."""

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from fleet import faults, payload
from fleet.history import History
from fleet.plan_format import recipes_in, record_of
from fleet.recipe import AHEAD, NotYet, Recipe, Strategy, Unplannable, check, folder, name, round_and_slot
from fleet.store import Store, Value

BEGUN = "planning"  # news: somebody is about to write this round's plan

ATTEMPT = re.compile(r"([0-9]{5})\.([a-z0-9][a-z0-9_-]{0,63})\.([0-9]{1,5})\.[^.]+")


def plannable(history: History) -> int | None:
    """The next round without a plan, if it is near enough to be planned."""
    near = history.last < history.first_open + AHEAD
    return history.last + 1 if near and not history.ended else None


def plan_ahead(store: Store, strategy: Strategy, history: History, defer: bool = False) -> tuple[int, str]:
    """Plan all that can be planned: every worker may, one answer stands. How many are one's own, and what waits. With
    `defer`, what somebody else has begun to plan is left to them: dozens may see at once that a round is finished."""
    planned = 0
    while (round := plannable(history)) is not None:
        there = store.names(folder(round)) if defer else ()
        try:
            if "plan" in there:
                history.plan(round)
                continue
            if BEGUN in there:
                return planned, ""
            recipes = strategy.plan(round, history)
        except NotYet as waiting:
            return planned, str(waiting)
        if defer:
            with contextlib.suppress(faults.Missing):  # round 0 has no folder before it has a plan
                store.post(f"{folder(round)}/{BEGUN}", store.name)
        record = _published(store, round, recipes)
        history.adopt(round, record)
        planned += record.get("by") == store.name
    return planned, ""


def _published(store: Store, round: int, recipes: Sequence[Recipe]) -> Value:
    """What stands as a round's plan; nothing is offered that others could not read."""
    try:
        record = {"by": store.name, **record_of(recipes)}
        check(round, recipes_in(record))
        for each in (round, round + 1):  # the next round's too, so that looking for its plan is a short listing
            store.folder(folder(each))
        return store.settle(f"{folder(round)}/plan", record)
    except ValueError as error:
        raise Unplannable(f"this run cannot go on: {error}") from error


def prune(store: Store, history: History, keep_every: int = 0, hurry: Callable[[], bool] = lambda: False) -> bool:
    """Remove what no recipe can need any more: old rounds, but for every N-th one where those stay, and attempts that
    came to nothing. Where there is a hurry, something is left."""
    limit = history.reach - 2  # the parents of the first open round, and theirs, from which damage is repaired
    kept, attempts = _carried(history, limit, keep_every), defaultdict[str, list[tuple[str, int]]](list)
    for attempt in store.names("files"):
        if match := ATTEMPT.fullmatch(attempt):
            attempts[name(int(match[1]), match[2])].append((attempt, int(match[3])))
    useless = [each for id, found in attempts.items() for each in _useless(history, id, found, limit, kept, keep_every)]

    def drop(attempt: str) -> None:
        if not hurry():
            payload.drop(store, attempt)

    store.host.in_short([partial(drop, attempt) for attempt in useless])
    return not (useless and hurry())


def _useless(
    history: History, id: str, found: list[tuple[str, int]], limit: int, kept: set[str], keep_every: int
) -> list[str]:
    """Of a member's attempts, those that no recipe can need any more."""
    round = round_and_slot(id)[0]
    if 0 < round < limit and id not in kept and (not keep_every or round % keep_every):
        return [attempt for attempt, _ in found]
    doubtful = len(found) > 1 or history.over and _may_be_lost(history, id)
    return _beaten(history, id, found) if doubtful else []


def _may_be_lost(history: History, id: str) -> bool:
    """Its one attempt may have come to nothing. Of a member that had to be made it is the one that stands: so much is
    certain without reading what every slot's register says."""
    try:
        recipe = history.recipe(id)
    except (KeyError, NotYet):
        return False
    return recipe.optional or recipe.role != "member"


def _beaten(history: History, id: str, attempts: list[tuple[str, int]]) -> list[str]:
    """Attempts that lost to the one whose register stands, or whose version is void. Those at a later version than the
    one known here are left alone: somebody else knows more."""
    try:
        if round_and_slot(id)[0] > history.last or not history.finished(id):
            return []
        history.look_back(round_and_slot(id)[0])
        outcome = history.outcome(id)
    except (KeyError, NotYet):
        return []
    return [attempt for attempt, version in attempts if version <= outcome.version and attempt != outcome.attempt]


def _carried(history: History, limit: int, keep_every: int) -> set[str]:
    """Where the members that were carried into the rounds still in reach were made, and into those that are kept."""
    rounds = {near for round in history.open_rounds() for near in range(max(0, round - 2), round + 1)}
    kept = range(keep_every, limit, keep_every) if keep_every else ()
    old = (origin for round in kept for origin in history.once("carried", round, partial(_origins, history, round)))
    return {*old, *(origin for round in rounds for origin in _origins(history, round))}


def _origins(history: History, round: int) -> list[str]:
    return [history.origin(name(round, recipe.slot)) for recipe in history.plan(round) if recipe.carried]

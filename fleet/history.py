"""One worker's knowledge of a run: registers that it has seen. They never change, so it only grows.

Seeing a name in a listing is enough to choose what to do next; whatever is acted on (a parent's files, a member's
metrics, a round that is complete) is first made durable and read again.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet import faults, payload
from fleet.host import Host
from fleet.recipe import AHEAD, Member, NotYet, Recipe, check, folder, from_json, name, place
from fleet.run import open_run
from fleet.slots import Slot, parse
from fleet.store import Store

_ROUND = re.compile("[0-9]{5}")


@dataclass(frozen=True)
class Outcome:
    """A slot's done register: the member, and beside it what depends on the machine that made it."""

    member: Member
    version: int
    attempt: str
    files: payload.Files
    why: str  # of an absent member
    by: str
    seconds: float


def opened(folder: Path) -> "History":
    """What a run's folder holds, for whoever only reads; what is not visible yet is not in it."""
    store, _ = open_run(folder, Host(), "reader")
    history = History(store)
    with contextlib.suppress(NotYet, faults.Passing):
        history.look_far()
    return history


class History:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.first = 0  # the first round that is not finished, as far as known
        self.plans: dict[int, tuple[Recipe, ...]] = {}
        self._recipes: dict[str, Recipe] = {}
        self._origins: dict[str, str] = {}
        self._made: dict[int, list[str]] = {}  # round -> the members that are really made there, not carried over
        self._open: dict[str, Recipe] = {}  # planned, to be made, not finished
        self._slots: dict[str, Slot] = {}
        self._names: dict[int, set[str]] = {}
        self._safe: dict[int, set[str]] = {}  # names that no crash of the server can take back
        self._outcomes: dict[str, Outcome] = {}
        self._probe = 0

    # -- what a strategy sees -----------------------------------------------------------------------------------------

    def __getitem__(self, id: str) -> Member:
        if self.recipe(id).carried:
            return replace(self[self.recipe(id).parents[0]], id=id)
        return self.outcome(id).member

    def round(self, round: int) -> list[Member]:
        return [self[name(round, recipe.slot)] for recipe in self.plan(round)]

    def plan(self, round: int) -> Sequence[Recipe]:
        if round not in self.plans:
            self.store.names(folder(round))  # shows what NFS would not, and refuses a link in the folder's place
            try:
                self.adopt(round, self.store.confirmed(f"{folder(round)}/plan"))
            except faults.Missing:
                raise NotYet(f"the plan of round {round}") from None
        return self.plans[round]

    # -- what the worker sees -----------------------------------------------------------------------------------------

    def recipe(self, id: str) -> Recipe:
        self.plan(place(id)[0])
        if id not in self._recipes:
            raise KeyError(f"{id}: no such slot in the plan of its round")
        return self._recipes[id]

    def adopt(self, round: int, record: dict[str, Any]) -> None:
        try:
            recipes = tuple(from_json(value) for value in record["recipes"])
            check(round, recipes)
        except (KeyError, TypeError, ValueError) as error:
            raise faults.Damaged(f"{folder(round)}/plan: {error}") from None
        self.plans[round] = recipes
        self._recipes.update((name(round, recipe.slot), recipe) for recipe in recipes)
        self._made[round] = [name(round, recipe.slot) for recipe in recipes if not recipe.carried]
        if round >= self.first:
            self._reconsider(round)

    def slot(self, id: str) -> Slot:
        if id not in self._slots:
            self._slots[id] = Slot()
        return self._slots[id]

    def origin(self, id: str) -> str:
        """Where a member was made: elsewhere if it was carried over."""
        if id not in self._origins:
            recipe = self.recipe(id)
            self._origins[id] = self.origin(recipe.parents[0]) if recipe.carried else id
        return self._origins[id]

    def finished(self, id: str) -> bool:
        """There is an outcome, as far as the listings have shown."""
        origin = self.origin(id)
        return origin not in self._open and (place(origin)[0] < self.first or self.slot(origin).finished)

    def outcome(self, id: str) -> Outcome:
        """The record of a finished slot that was really made; for a carried one, look up `self[id].origin`."""
        if id not in self._outcomes:
            round, slot = place(id)
            if round < self.first and round not in self._names:
                self.scan(round)
            version = self.slot(id).version
            if not (round < self.first or self.finished(id)):
                raise NotYet(id)
            path = f"{folder(round)}/{slot}.{version}.done"
            try:
                self._secure(round, f"{slot}.{version}.done")
                self._outcomes[id] = self._outcome(id, self.store.standing(path), version, path)
            except faults.Missing:  # void, or taken back by a crash of the server, or not visible here yet
                self.reopen(id)
                raise NotYet(id) from None
        return self._outcomes[id]

    def files(self, id: str) -> payload.Payload:
        """The files of a present member, wherever it was made."""
        outcome = self.outcome(self[id].origin)
        return payload.Payload(self.store, outcome.attempt, outcome.files)

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, probe: int = 0) -> None:
        """Learn what is new in the rounds that are not finished; `probe` opens so many awaited names by hand."""
        if not self.plans:
            self._catch_up()
        self._adopt_plans(always=probe > 0)
        for round in self.open_rounds():
            if round not in self._names or any(map(self._startable, self._made[round])):
                self.scan(round)
        self._open_awaited(probe)
        while self._advance():
            pass

    def look_far(self) -> None:
        """For whoever looks seldom: one look goes no further than the plans that it begins with."""
        known = None
        while known != (known := (self.first, len(self.plans))):
            self.look(probe=4)

    def open_rounds(self) -> range:
        return range(self.first, max(self.plans, default=-1) + 1)

    def open(self) -> list[tuple[str, Recipe]]:
        """Everything planned and not finished."""
        return list(self._open.items())

    @property
    def over(self) -> bool:
        return self.plans.get(self.first) == ()

    def round_0_is_whole(self) -> bool:
        """It is kept for good: what was voided there when nobody waited for it any more is to be made again."""
        self.plan(0)
        self.scan(0)
        void = [id for id in self._made[0] if not self.slot(id).finished]
        for id in void:
            self.reopen(id)
        return not void

    def scan(self, round: int) -> set[str]:
        """List a round and take in the names that are new."""
        known, listed = self._names.setdefault(round, set()), set(self.store.names(folder(round)))
        new = listed - known
        known |= new
        for register in sorted(new):
            self.saw(round, register)
        return listed

    def saw(self, round: int, register: str) -> None:
        """A register exists; its name says what it is about. Names that none of us writes are passed over."""
        if (known := parse(register)) is None:
            return
        id = name(round, known.slot)
        state = self.slot(id)
        state.take(known)
        if known.kind in ("done", "void"):
            self._reopen(id) if not state.finished else self._open.pop(id, None)

    def learn(self, id: str, record: dict[str, Any]) -> None:
        """A register that this worker settled itself."""
        version = self.slot(id).version
        round, slot = place(id)
        self._outcomes[id] = self._outcome(id, record, version, f"{folder(round)}/{slot}.{version}.done")
        self._safe.setdefault(round, set()).update(self._names.get(round, ()))  # it was synced with them
        self.saw(round, f"{slot}.{version}.done")

    def reopen(self, id: str) -> None:
        """The outcome that was known is void: its round is not finished any more."""
        self._outcomes.pop(id, None)
        round = place(id)[0]
        again = range(round, self.first)
        for each in again:
            self.plan(each)
        self.first = min(self.first, round)
        for each in again:
            self._reconsider(each)
        self.forget(round)

    def forget(self, round: int) -> None:
        """Look at a round afresh."""
        self._names.pop(round, None)
        self._safe.pop(round, None)
        for id in self._made[round]:
            self._slots.pop(id, None)
        if round >= self.first:
            self._reconsider(round)
        self.scan(round)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Go past the first open round if it is finished."""
        done = bool(self.plans.get(self.first)) and not any(id in self._open for id in self._made[self.first])
        if moved := done and self._durable(self.first):
            self.first += 1
        return moved

    def _startable(self, id: str) -> bool:
        """Not finished, and its parents are: where nothing is so, a listing can show nothing new."""
        return id in self._open and all(map(self.finished, self._open[id].parents))

    def _reconsider(self, round: int) -> None:
        for id in self._made[round]:
            self._reopen(id)

    def _reopen(self, id: str) -> None:
        """Put a recipe among those to be made, if it is one of an open round and not finished."""
        if id in self._recipes and place(id)[0] >= self.first and not self.slot(id).finished:
            self._open[id] = self._recipes[id]

    def _catch_up(self) -> None:
        """A late worker needs no more than the last rounds: a plan stands only when the rounds AHEAD of it are done."""
        rounds = [int(n) for n in self.store.names("rounds") if _ROUND.fullmatch(n)]
        for round in sorted(rounds, reverse=True):
            try:
                self.plan(round)
            except NotYet:
                continue
            self.first = max(0, round - AHEAD)
            try:
                for earlier in range(self.first, round):
                    self.plan(earlier)
            except (NotYet, faults.Fault):  # begin again rather than know a later plan without an earlier one
                self.plans.clear()
                self._open.clear()
                raise
            return

    def _adopt_plans(self, always: bool) -> None:
        """The folder of the next round is made with the plan before it, so that a listing of it shows the plan."""
        while True:
            following = max(self.plans, default=-1) + 1
            if self.plans.get(following - 1) == () or following > self.first + AHEAD:
                return
            if "plan" not in self.store.names(folder(following)) and not always:
                return
            try:
                self.plan(following)
            except NotYet:
                return

    def _open_awaited(self, count: int) -> None:
        """Some disks list late what they would open at once: try a few names, in turn."""
        awaited = [id for id in self._open if self._startable(id)] if count else []
        for id in (awaited[(self._probe + i) % len(awaited)] for i in range(min(count, len(awaited)))):
            (round, slot), version = place(id), self.slot(id).version
            try:
                self.store.read(f"{folder(round)}/{slot}.{version}.done")
            except faults.Missing:
                continue
            self.saw(round, f"{slot}.{version}.done")
        self._probe += count

    def _secure(self, round: int, register: str) -> None:
        """What was seen before the folder was synced is there to stay; only then is it read to be acted on."""
        if round >= self.first and register not in self._safe.setdefault(round, set()):
            self.store.sync(folder(round))
            self._safe[round].update(self._names.get(round, ()), [register])

    def _durable(self, round: int) -> bool:
        """A complete round leads to planning and pruning: make sure that no crash can take an outcome back."""
        self.store.sync(folder(round))
        listed = self.scan(round)
        if not listed >= {f"{place(id)[1]}.{self.slot(id).version}.done" for id in self._made[round]}:
            self.forget(round)
        return not any(id in self._open for id in self._made[round])

    def _outcome(self, id: str, record: dict[str, Any], version: int, path: str) -> Outcome:
        recipe = self.recipe(id)
        try:
            files = payload.files_of(record["files"])
            digests = {name: sha for name, (_, sha) in files.items()}
            if not isinstance(record["metrics"], dict) or not isinstance(record["attempt"], str):
                raise ValueError("metrics or attempt have another shape")
            if record["attempt"] and not payload.NAME.fullmatch(record["attempt"]):
                raise ValueError(f"attempt {record['attempt']!r}")
            member = Member(id, id, recipe, record["metrics"], digests, str(record["absent"]))
            return Outcome(
                member,
                version,
                record["attempt"],
                files,
                str(record["why"]),
                str(record["by"]),
                float(record["seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise faults.Damaged(f"{path}: {error}") from None

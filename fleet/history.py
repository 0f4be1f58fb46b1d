"""One worker's knowledge of a run: registers that it has seen. They never change, so what is known stays true.

Seeing a name in a listing is enough to choose what to do next; whatever is acted on (a parent's files, a member's
metrics, a round that is complete) is first made durable and read again.

What is remembered does not grow with the run's age: the rounds that something may still be made in or need, round 0,
and the last few others that somebody asked for. Any other round is read again when it is asked for.
"""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from posixpath import basename
from typing import Any, TypeVar, cast

from fleet import faults, payload, round_state, summary
from fleet.host import Host
from fleet.recipe import AHEAD, Member, NotYet, Recipe, alike, folder, name, round_and_slot
from fleet.round_state import Outcome, RoundState, SlotState, parse
from fleet.run import open_run
from fleet.store import Store

BEHIND = 3  # finished rounds that are remembered: the parents of what is made, theirs, and theirs
_BACK = 8  # older rounds that are remembered
_ROUND = re.compile("[0-9]{5}")

T = TypeVar("T")


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
        self.first_open = 0  # the first round that is not finished, as far as known
        self.last = -1  # the last one that is planned
        self._rounds: dict[int, RoundState] = {}  # old ones in the order in which they were used
        self._again: set[int] = set()  # finished rounds of which something was voided since
        self._open: dict[str, Recipe] = {}  # planned, to be made, not finished
        self._recent: list[dict[str, Any]] = []
        self._once: dict[tuple[str, int], Any] = {}
        self._probe = 0
        self.other: History | None = None  # of the same worker's other lane
        self.listens = False  # to that, which looks around

    # -- what a strategy sees -----------------------------------------------------------------------------------------

    def __getitem__(self, id: str) -> Member:
        return replace(self.outcome(self.origin(id)).member, id=id)

    def round(self, round: int) -> list[Member]:
        """Read once all of it is there: nobody needs a part of it."""
        ids = [*self._known(round).recipes]
        if missing := next((id for id in ids if not self.finished(id)), ""):
            raise NotYet(missing)
        self.look_back(round)
        return [self[id] for id in ids]

    def plan(self, round: int) -> Sequence[Recipe]:
        return self._known(round).plan

    def once(self, what: str, round: int, make: Callable[[], T]) -> T:
        """What somebody makes of a finished round: asked for once, and remembered instead of the round."""
        if not self._round_finished(round):
            return make()
        if (what, round) not in self._once:
            self._once[what, round] = make()
        return cast(T, self._once[what, round])

    @property
    def made(self) -> int:
        """The finished rounds that made something; at the end there may be one more, which only evaluates."""
        last = max(0, self.first_open - 1)
        makes = (round for round in range(last, 0, -1) if any(each.role == "member" for each in self.plan(round)))
        return next(makes, last)

    # -- what the worker sees -----------------------------------------------------------------------------------------

    def recipe(self, id: str) -> Recipe:
        recipes = self._round_of(id).recipes
        if id not in recipes:
            raise KeyError(f"{id}: no such slot in the plan of its round")
        return recipes[id]

    def adopt(self, round: int, record: dict[str, Any]) -> None:
        """Take in a plan."""
        self._plan_is(round, self._rounds.get(round) or round_state.planned(round, record))

    def slot(self, id: str) -> SlotState:
        return self._round_of(id).slots[id]

    def origin(self, id: str) -> str:
        """Where a member was made: elsewhere if it was carried over."""
        if id in self._open or not self.recipe(id).carried:
            return id
        origins = self._round_of(id).origins
        if id not in origins:
            origins[id] = self._origin(id)
        return origins[id]

    def finished(self, id: str) -> bool:
        """There is an outcome, as far as the listings have shown."""
        if (origin := self.origin(id)) in self._open:
            return False
        there = round_and_slot(origin)[0]
        return self._round_finished(there) or self._known(there).slots[origin].finished

    def outcome(self, id: str) -> Outcome:
        """The record of a finished slot that was really made; for a carried one, look up `self[id].origin`."""
        outcomes = self._round_of(id).outcomes
        if id not in outcomes:
            outcomes[id] = self._outcome(id)
        return outcomes[id]

    def files(self, id: str) -> payload.InputMember:
        """A present member with its files, wherever it was made."""
        outcome = self.outcome((member := self[id]).origin)
        return payload.InputMember(self.store, outcome.attempt, outcome.files, member=member)

    def recent(self) -> dict[str, Any]:
        """A dictionary by members' names, from which those disappear that nothing planned can reach any more."""
        self._recent.append({})
        return self._recent[-1]

    # -- looking ------------------------------------------------------------------------------------------------------

    def look(self, probe: int = 0) -> None:
        """Learn what is new in the rounds that are not finished; `probe` opens so many awaited names by hand."""
        if self.last < 0:
            self._catch_up()
        self._adopt_plans(always=probe > 0)
        seen = set[int]()
        while news := [round for round in self.open_rounds() if round not in seen and self._may_have_news(round)]:
            self._scan_all(news)
            seen.update(news)
        if probe:
            self._look_behind()
        self._open_awaited(probe)
        while self._advance():
            pass

    def hear(self) -> None:
        """Learn what is new, from the other lane if that is the one which looks around."""
        if self.listens:
            self.take_over()
        else:
            self.look()

    def take_over(self) -> None:
        """What the other lane has seen since, without asking the disk: true, as registers never change, if not all."""
        assert self.other
        while there := self.other.known_here(self.last + 1):
            self._plan_is(self.last + 1, there.unseen())
        for round in self.open_rounds():
            if (there := self.other.known_here(round)) and not self._known(round).doubted:
                self._take(round, set(there.names or ()))
        while self._other_relies_on(self.first_open) and self._advance():
            pass

    def look_far(self) -> None:
        """For whoever looks seldom: one look goes no further than the plans that it begins with."""
        known = None
        while known != (known := (self.first_open, self.last)):
            self.look(probe=4)

    def look_back(self, round: int) -> None:
        """For whoever wants all of a finished round: its summary, if there is one, spares opening each register."""
        there = self._known(round)
        listed = summary.NAME in (there.names or ()) or not self.store.lists_late  # then to ask costs less than to list
        if there.told is None and self._round_finished(round) and listed:
            done, origins = summary.read(self.store, round)
            there.told = {name(round, slot): each for slot, each in done.items()}
            there.origins |= {name(round, slot): id for slot, id in origins.items()}

    def sum_up(self, round: int) -> None:
        """Spare others that: write the summary of a finished round, if there is none yet."""
        there = self._known(round)
        if self._round_finished(round) and summary.NAME not in (there.names or ()):
            made = {round_and_slot(id)[1]: self.outcome(id) for id in there.made}
            origins = {round_and_slot(id)[1]: self.origin(id) for id in there.recipes if id not in there.made}
            done = {slot: (each.version, each.record) for slot, each in made.items()}
            summary.write(self.store, round, done, origins)

    def share(self) -> None:
        """Where each read costs, whoever has looked for summaries in vain, and so read whole rounds, writes them."""
        for round, there in [*self._rounds.items()] if not self.store.lists_late else ():
            read = there.outcomes.keys() >= {*there.made} and there.recipes.keys() <= {*there.made, *there.origins}
            if there.told == {} and there.made and read and self._round_finished(round):
                self.sum_up(round)
                there.names = (there.names or set()) | {summary.NAME}

    def open_rounds(self) -> list[int]:
        """Those that something may be made in: also old ones, if something of them was voided."""
        return [*sorted(self._again), *range(self.first_open, self.last + 1)]

    @property
    def reach(self) -> int:
        """The first of them."""
        return min([self.first_open, *self._again])

    @property
    def doubts(self) -> bool:
        """Of an open round something was taken back: what the other lane sees of it does not count any more."""
        return any(self._known(round).doubted for round in self.open_rounds())

    def unfinished(self) -> list[tuple[str, Recipe]]:
        """Everything planned and not finished."""
        return list(self._open.items())

    @property
    def begun(self) -> bool:
        """Something was made."""
        return self.reach > 0 or self.last >= 0 and any(map(self.finished, self._known(0).made))

    @property
    def ended(self) -> bool:
        """The last plan says that nothing comes after it."""
        return self.last >= 0 and not self.plan(self.last)

    @property
    def over(self) -> bool:
        return self.ended and self.first_open == self.last and not self._again

    def round_0_is_whole(self) -> bool:
        """It is kept for good: what was voided there when nobody waited for it any more is to be made again."""
        self.scan(0)
        void = [id for id in self._known(0).made if not self.slot(id).finished]
        for id in void:
            self.reopen(id)
        return not void

    def scan(self, round: int) -> set[str]:
        """List a round and take in the names that are new."""
        listed = set(self.store.names(folder(round)))
        self._take(round, listed)
        return listed

    def _scan_all(self, rounds: Sequence[int]) -> None:
        listed = dict[int, set[str]]()

        def look(round: int) -> None:
            listed[round] = set(self.store.names(folder(round)))

        self.store.host.in_short([partial(look, round) for round in rounds])
        for round in rounds:
            self._take(round, listed[round])

    def saw(self, round: int, register: str) -> None:
        """A register exists; its name says what it is about. Names that none of us writes are passed over."""
        said, there = parse(register), self._known(round)
        if said is None or (id := name(round, said.slot)) not in there.recipes:
            return
        state = there.slots[id]
        state.take(said)
        if id in there.outcomes and there.outcomes[id].version in state.void:  # the next version may be there already
            del there.outcomes[id]
        if said.kind in ("done", "void"):
            self._reopen(id) if not state.finished else self._open.pop(id, None)

    def learn(self, id: str, version: int, record: dict[str, Any], just_now: bool = True) -> None:
        """A register that this worker has offered itself; perhaps of a version that is void by now."""
        there = self._round_of(id)
        if version == self.slot(id).version:
            there.outcomes[id] = round_state.outcome(id, self.recipe(id), record, version)
        register = basename(round_state.register(id, version))
        there.safe.update((there.names or ()) if just_now else (), [register])  # it was synced with them
        self.saw(round_and_slot(id)[0], register)

    def reopen(self, id: str) -> None:
        """The outcome that was known is void: it is to be made again, however old its round is."""
        round = round_and_slot(id)[0]
        self._known(round).outcomes.pop(id, None)
        self._once.clear()
        if round < self.first_open:
            self._again.add(round)
        self.forget(round)

    def forget(self, round: int) -> None:
        """Look at a round afresh."""
        self._known(round).forget()
        if not self._round_finished(round):
            self._reconsider(round)
        self.scan(round)

    # -- what the other lane asks, in a thread of its own -------------------------------------------------------------

    def known_here(self, round: int) -> RoundState | None:
        return self._rounds.get(round)

    def read_here(self, id: str, version: int) -> Outcome | None:
        """An outcome that was read here, and stays whatever crashes: so the other lane need not read it behind the
        large files that are on their way to the disk."""
        there = self._rounds.get(round_and_slot(id)[0])
        found = there.outcomes.get(id) if there else None
        safe = there and basename(round_state.register(id, version)) in there.safe
        return found if found and safe and found.version == version else None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _plan_is(self, round: int, there: RoundState) -> None:
        self._rounds[round] = there
        self.last = max(self.last, round)
        if round >= self.first_open:
            self._reconsider(round)

    def _round_of(self, id: str) -> RoundState:
        return self._known(round_and_slot(id)[0])

    def _known(self, round: int) -> RoundState:
        if round not in self._rounds:
            self._load(round)
        elif round < self.first_open - BEHIND:
            self._rounds[round] = self._rounds.pop(round)  # now it is the last one that was used
        return self._rounds[round]

    def _load(self, round: int) -> None:
        listed = self.store.names(folder(round))  # shows what NFS would not, and refuses a link in the folder's place
        look = self.store.standing if self._round_finished(round) else self.store.confirmed
        try:
            self.adopt(round, look(f"{folder(round)}/plan"))
        except faults.Missing:
            raise NotYet(f"the plan of round {round}") from None
        if round < self.first_open:
            self._take(round, set(listed))
            self._let_go(round)

    def _let_go(self, wanted: int = -1) -> None:
        """Of old rounds only those are remembered in which carried members were made, and the last ones used."""
        near = [each for round, each in self._rounds.items() if round >= self.first_open - BEHIND]
        kept = {0, wanted, *self._again, *(round_and_slot(id)[0] for each in near for id in each.origins.values())}
        old = [round for round in self._rounds if round < self.first_open - BEHIND and round not in kept]
        for round in old[:-_BACK]:
            del self._rounds[round]

    def _round_finished(self, round: int) -> bool:
        """All of it is finished, and can be relied on."""
        return round < self.first_open and round not in self._again

    def _origin(self, id: str) -> str:
        """Step by step: a member may have been carried over for thousands of rounds."""
        while (recipe := self.recipe(id)).carried:
            round = round_and_slot(id)[0]
            self.look_back(round)
            id = self._known(round).origins.get(id, recipe.parents[0])
        return id

    def _outcome(self, id: str) -> Outcome:
        round, version, there = round_and_slot(id)[0], self.slot(id).version, self._round_of(id)
        if not (self._round_finished(round) or self.finished(id)):
            raise NotYet(id)
        if self._round_finished(round) and (told := (there.told or {}).get(id)) and told[0] == version:
            return round_state.outcome(id, self.recipe(id), told[1], version)
        path = round_state.register(id, version)
        if self.other and (known := self.other.read_here(id, version)):
            return known
        try:  # what was seen before the folder was synced is there to stay; only then is it read to be acted on
            if not self._round_finished(round) and basename(path) not in there.safe:
                self.store.sync(folder(round))
                there.safe.update(there.names or (), [basename(path)])
            return round_state.outcome(id, self.recipe(id), self.store.standing(path), version)
        except faults.Missing:  # void, or taken back by a crash of the server, or not visible here yet
            self.reopen(id)
            raise NotYet(id) from None

    def _take(self, round: int, listed: set[str]) -> None:
        there = self._known(round)
        new = listed - (there.names or set())
        there.names = (there.names or set()) | new
        for register in sorted(new):
            self.saw(round, register)

    def _advance(self) -> bool:
        """Go past the first open round if it is finished; and past older ones that were open again."""
        for round in sorted(self._again):
            if self._complete(round):
                self._again.discard(round)
        if (
            moved := self.first_open <= self.last
            and bool(self.plan(self.first_open))
            and self._complete(self.first_open)
        ):
            self.first_open += 1
            self._let_go()
            limit = self.reach - BEHIND
            for each in self._recent:
                for id in [id for id in each if round_and_slot(id)[0] < limit]:
                    del each[id]
        return moved

    def _complete(self, round: int) -> bool:
        if any(id in self._open for id in self._known(round).made):
            return False
        return self._other_relies_on(round) or self._durable(round)

    def _other_relies_on(self, round: int) -> bool:
        """The other lane has made sure that all of it is finished, and stays so whatever crashes: in these versions."""
        there, mine = self.other and self.other.known_here(round), self._rounds.get(round)
        if not (self.other and there and mine) or mine.doubted:
            return False
        return self.other._round_finished(round) and there.versions() == mine.versions()

    def _may_have_news(self, round: int) -> bool:
        there = self._known(round)
        return there.names is None or any(map(self._startable, there.made))

    def _startable(self, id: str) -> bool:
        """Not finished, and its inputs are: where nothing is so, a listing can show nothing new."""
        return id in self._open and all(map(self.finished, self._open[id].inputs))

    def _reconsider(self, round: int) -> None:
        for id in self._known(round).made:
            self._reopen(id)

    def _reopen(self, id: str) -> None:
        """Put a recipe among those to be made, if it is one of an open round and not finished."""
        if not self._round_finished(round_and_slot(id)[0]) and not self.slot(id).finished:
            self._open[id] = self.recipe(id)

    def _catch_up(self) -> None:
        """A late worker needs no more than the last rounds: a plan stands only when the rounds AHEAD of it are done."""
        rounds = [int(n) for n in self.store.names("rounds") if _ROUND.fullmatch(n)]
        for round in sorted(rounds, reverse=True):
            try:
                self.plan(round)
            except NotYet:
                continue
            self.first_open = max(0, round - AHEAD)
            try:
                for earlier in range(self.first_open, round):
                    self.plan(earlier)
            except (NotYet, faults.Fault):  # begin again rather than know a later plan without an earlier one
                self.last = -1
                self._rounds.clear()
                self._open.clear()
                raise
            return

    def _adopt_plans(self, always: bool) -> None:
        """The folder of the next round is made with the plan before it, so that a listing of it shows the plan."""
        with contextlib.suppress(NotYet):
            while not self.ended and self.last < self.first_open + AHEAD:
                if "plan" not in self.store.names(folder(self.last + 1)) and not always:
                    return
                self.plan(self.last + 1)

    def _look_behind(self) -> None:
        """What is needed of finished rounds may have been voided by somebody: then all are to make it again."""
        inputs = {input for recipe in alike(self._open.values()).values() for input in recipe.inputs}
        needed = {id for id in map(self.origin, inputs) if self._round_finished(round_and_slot(id)[0])}
        for round in {round_and_slot(id)[0] for id in needed}:
            self.scan(round)
        for id in needed:
            slot, outcomes = self.slot(id), self._round_of(id).outcomes
            if slot.version and not slot.finished:
                self.reopen(id)
            elif id in outcomes and outcomes[id].version != slot.version:
                del outcomes[id]

    def _open_awaited(self, count: int) -> None:
        """Some disks list late what they would open at once: try a few names, in turn."""
        awaited = [id for id in self._open if self._startable(id)] if count and self.store.lists_late else []
        for id in (awaited[(self._probe + i) % len(awaited)] for i in range(min(count, len(awaited)))):
            path = round_state.register(id, self.slot(id).version)
            with contextlib.suppress(faults.Missing):
                self.store.read(path)
                self.saw(round_and_slot(id)[0], basename(path))
        self._probe += count

    def _durable(self, round: int) -> bool:
        """A complete round leads to planning and pruning: make sure that no crash can take an outcome back."""
        self.store.sync(folder(round))
        listed, made = self.scan(round), self._known(round).made
        if not listed >= {basename(round_state.register(id, self.slot(id).version)) for id in made}:
            self.forget(round)
        return not any(id in self._open for id in made)

"""Whose fault a failure is: the recipe's, or of who tried. One maker's word decides nothing while others live.

Whoever fails leaves that recipe to others for a while and rests, longer each time; whoever fails at what others make
benches itself; what nobody can make is said to whoever started the run.
"""

import contextlib
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fleet import faults
from fleet.claims import Claims
from fleet.events import Events
from fleet.history import History
from fleet.peers import Peers, Who, agreed, who
from fleet.recipe import NotYet
from fleet.store import Value

TRIES = 3  # failures of one recipe, by so many makers on so many machines if there are that many
VERDICTS = 2  # makers who find that it can be made nowhere, or all if there are fewer
LOST = 8  # claims lost in a row without a release or a new snapshot
STREAK = 3  # failures in a row, all of recipes that nobody else fails at
PATIENCE = 10  # so many DEAD_SECONDS a silent maker may come back: what it would say is waited for
_GRACE = 2  # so many DEAD_SECONDS somebody may join who can make what nobody here can
_REST, _LONGEST_REST = 0.5, 30.0  # seconds, after the first failure and after many
_LONGEST_BENCH = 3600.0
_REMEMBERED = 16  # failures of a streak
_SHOWN = 4  # reasons in one sentence


@dataclass(frozen=True)
class Verdict:
    """What makers agree on by now; `final` where it is an outcome of a recipe that may fail."""

    id: str
    why: str  # of this recipe alone
    all: str  # for whoever started the run
    final: bool = True
    everywhere: bool = False  # it was found that nobody ever can


class Blame:
    """One worker's failures, and what follows from them."""

    def __init__(self, claims: Claims, history: History, events: Events, dead_seconds: float, seats: int) -> None:
        self.claims, self.history, self.events = claims, history, events
        self.host, self.dead_seconds = claims.store.host, dead_seconds
        self.seats = seats  # so many were to come with the launch, at least
        self.peers = Peers(claims, PATIENCE * dead_seconds, _GRACE * dead_seconds)
        self.me: Who = who({"by": claims.store.name, "machine": self.host.name, "launch": claims.launch})
        self.benched = ""  # why this worker leaves all work to others
        self._benches = 0
        self._failed = Counter[str]()  # open recipes, how often they failed here
        self._found = set[str]()  # those of them on which this worker has given a verdict
        self._lacking = Counter[str]()  # open recipes, how often this machine could not even try
        self._again: dict[str, float] = {}  # when this worker may take them again
        self._streak = deque[str](maxlen=_REMEMBERED)  # failed since something was made
        self._fresh = self._others_can = False  # a failure that was not judged yet; somebody made what failed here
        self._rest = self._wake = -math.inf
        self._nobody: dict[str, float] = {}  # since when no living maker can make it

    # -- what happened here -------------------------------------------------------------------------------------------

    def made(self) -> None:
        if self.benched:
            self.events.note("back", why="it made something")
        self.benched, self._benches, self._others_can = "", 0, False
        self._streak.clear()

    def failed(self, id: str) -> None:
        """Rest, and let others have it first."""
        self._streak.append(id)
        self._failed[id] += 1
        self._fresh = True
        rest = _growing(_REST, len(self._streak), _LONGEST_REST)
        self._rest = self.host.now() + rest
        self.leave_alone(id, 2 * rest)

    def finds(self, id: str) -> None:
        """A verdict on the recipe: in a search many are right, so only one that others disprove counts as a failure."""
        self._failed[id] += 1
        self._found.add(id)
        self.leave_alone(id, _growing(_REST, self._failed[id], _LONGEST_REST))

    def lacks(self, id: str) -> None:
        """This machine cannot make it; it may have what was missing later."""
        self._lacking[id] += 1
        self.leave_alone(id, _growing(self.dead_seconds, self._lacking[id], _LONGEST_BENCH))

    def leave_alone(self, id: str, seconds: float) -> None:
        self._again[id] = self.host.now() + seconds
        self._wake = min(self._again[id], max(self._rest, self.host.now()))

    # -- what to do next ----------------------------------------------------------------------------------------------

    @property
    def resting(self) -> bool:
        return self.host.now() < self._rest

    def shuns(self, id: str) -> bool:
        return self.host.now() < self._again.get(id, -math.inf)

    def wary(self, id: str) -> bool:
        """It failed here: whatever else is to be made comes first."""
        return id in self._failed

    def wakes(self) -> bool:
        """A rest is over: look for work without waiting for news."""
        now = self.host.now()
        if now < self._wake:
            return False
        woke = self._wake > -math.inf
        self._wake = min((at for at in (self._rest, *self._again.values()) if at > now), default=math.inf)
        return woke

    # -- whose fault it is --------------------------------------------------------------------------------------------

    def others(self) -> bool:
        """Somebody else could do this worker's work."""
        return any(not benched for maker, benched in self.peers.others().items() if maker != self.me)

    def able(self, id: str) -> set[Who]:
        """Those who could make it: they live, are not benched, and do not lack what it needs."""
        everybody = {**self.peers.others(), self.me: bool(self.benched)}
        return {maker for maker, benched in everybody.items() if not benched} - {*self._said(id, "elsewhere")}

    def doomed(self, id: str, lost: Sequence[Value]) -> bool:
        """Claims lost in a row speak against a recipe; those of one maker say nothing while others could try."""
        makers, failed = [who(claim) for claim in lost], self._said(id, "failed", "verdict")
        often = makers.count(self.me) > 1 or failed.count(self.me) >= TRIES
        could = self.able(id) - {self.me} - {*self._said(id, "damaged")}  # who finds a parent damaged waits for us
        if often and {*makers, *failed} == {self.me} and could:
            # for longer than a silent maker is waited for: a process that ends at it each time would never see one die
            self.leave_alone(id, (PATIENCE + 1) * self.dead_seconds)
        return len(makers) >= LOST and self._agreed(id, [*makers, *failed], LOST, TRIES)

    def confirmed(self, id: str, parent: str) -> bool:
        """As many as a verdict takes have found a parent's files wrong when they were to make this recipe of it."""
        return self._agreed(id, self._said(id, "damaged", parent=parent), 1, VERDICTS)

    def verdicts(self) -> Iterator[Verdict]:
        """What is agreed on by now, of what this worker has tried."""
        self._forget_finished()
        for id in [*self._failed]:
            yield from self._of_failures(id)
        for id in [*self._lacking]:
            yield from self._of_lack(id)

    def consider_bench(self) -> None:
        """Step aside where others make what this worker fails at; step in again when nobody else is left."""
        fresh, self._fresh = self._fresh, False
        if self.benched and not self.others():
            self.events.note("back", why="nobody else is left")
            self.benched, self._rest = "", -math.inf
        elif (fresh or not self.benched) and len(self._streak) >= STREAK and self._alone() and self.others():
            if not self.claims.holding:  # or nobody would take over what is held here
                self._bench()

    def _alone(self) -> bool:
        """Others make what failed here, and no other machine fails at any of it."""
        failed = {maker for id in {*self._streak} for maker in self._said(id, "failed", "verdict", "damaged")}
        return self._others_can and {machine for machine, _ in failed} <= {self.host.name}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _bench(self) -> None:
        self._benches += 1
        seconds = _growing(self.dead_seconds, self._benches, _LONGEST_BENCH)
        self.benched = f"{len(self._streak)} failures in a row at what others could make"
        self._rest = self._wake = self.host.now() + seconds
        self.events.note("benched", why=self.benched, seconds=round(seconds, 1))
        self.events.flush()

    def _of_failures(self, id: str) -> Iterator[Verdict]:
        """Whatever makers say adds up: one finds that it can be made nowhere, another fails at it."""
        words = [each for each in self._words(id, "failed", "verdict") if who(each) not in self._benched()]
        if not words:
            return
        found = [who(each) for each in words if each.get("why") == "verdict"]
        said, why = [*map(who, words)], str(words[-1].get("error"))
        if found and self._agreed(id, found, 1, VERDICTS):
            yield Verdict(id, why, f"{id} cannot be made: {why}", everywhere=True)
        elif self._agreed(id, said, TRIES, TRIES):
            on = ", ".join(sorted({machine for machine, _ in said}))
            yield Verdict(id, why, f"{id} failed {len(words)} times, on {on}; the last time: {why}")

    def _agreed(self, id: str, said: Sequence[Who], times: int, makers: int) -> bool:
        """Who was to come with the launch and was never seen is waited for, until it was said very often."""
        able = self.able(id) | (self._to_come() if len(said) < LOST else set())
        return agreed(said, able, times, makers)

    def _to_come(self) -> set[Who]:
        """On machines of their own, for all that is known."""
        return {(f"to come {n}", "") for n in range(self.seats - len({*self.peers.others(), self.me}))}

    def _benched(self) -> set[Who]:
        """A benched maker's failures are its own."""
        return {maker for maker, benched in {**self.peers.others(), self.me: self.benched}.items() if benched}

    def _of_lack(self, id: str) -> Iterator[Verdict]:
        """All that live have said so, the benched too, and nobody is at it."""
        silent = {*self.peers.others(), self.me} - {*self._said(id, "elsewhere", "failed", "verdict", "damaged")}
        if silent or self.able(id) or self.claims.held(id) and not self.claims.watch.dead(self.claims.holder(id)):
            self._nobody.pop(id, None)
            return
        lacks = self._words(id, "elsewhere")
        reasons = {who(each): f"{each.get('machine')}: {each.get('error')}" for each in lacks}
        benched = {maker: f"{maker[1]} on {maker[0]} is benched" for maker in self._benched()}
        shown = "; ".join([*dict.fromkeys({**benched, **reasons}.values())][:_SHOWN])
        why = f"no living worker can make {id}: {shown}"
        if id not in self._nobody:
            self.events.note("waits", id, why=f"{why}. The run stops soon unless somebody joins who can")
            self._nobody[id] = self.host.now()
        elif self.host.now() - self._nobody[id] > self._grace():
            yield Verdict(id, why, why, final=False)

    def _grace(self) -> float:
        """How long somebody may join who can. A run in which nothing was made yet loses nothing by ending at once: more
        likely than not a path in its configuration is wrong."""
        if self._to_come():
            return PATIENCE * self.dead_seconds
        return _GRACE * self.dead_seconds if self.history.begun else 0.0

    def _said(self, id: str, *why: str, parent: str = "") -> list[Who]:
        """The makers who gave it up so, in turn."""
        return [who(each) for each in self._words(id, *why) if each.get("parent", "") == parent or not parent]

    def _words(self, id: str, *why: str) -> list[Value]:
        """In this launch, or by who still lives in another; a new launch does not hear what the dead have said."""
        said = [each for each in self.claims.given_up(id) if each.get("why") in why]
        return [each for each in said if each.get("launch") == self.claims.launch or who(each) in self.peers.others()]

    def _forget_finished(self) -> None:
        for id in {*self._failed, *self._lacking, *self._again}:
            if self.history.finished(id):
                disproved = id in self._failed and self._made_elsewhere(id)
                if disproved and id in self._found:
                    self._streak.append(id)
                    self._fresh = True
                self._others_can = self._others_can or disproved
                self._found.discard(id)
                for known in (self._failed, self._lacking, self._again, self._nobody):
                    known.pop(id, None)

    def _made_elsewhere(self, id: str) -> bool:
        with contextlib.suppress(NotYet, faults.Fault, KeyError):
            outcome = self.history.outcome(self.history[id].origin)
            return bool(outcome.member) and outcome.by != self.claims.store.name
        return False


def _growing(first: float, times: int, longest: float) -> float:
    """A pause that doubles each time."""
    return min(longest, first * 2.0 ** min(20, times - 1))

"""The one loop: plan what is decidable, claim, make, publish, look again.

Every worker of a run does this, wherever it runs; nobody coordinates. What may go wrong with the disk is handled in
one place, around a turn of the loop: the next turn begins with a fresh look.
"""

import contextlib
import math
import zlib
from collections.abc import Callable
from typing import Any

from fleet import blame, claims, elastic_rounds, faults, launches, pace, planning
from fleet.archive import WorkerArchive
from fleet.bell import Bell
from fleet.context import Stopped, WorkerContext, WorkerOptions
from fleet.events import Events, Tail, log
from fleet.execution import Execution
from fleet.history import History
from fleet.lane import Lane, LaneEvents, Pending
from fleet.read_ahead import ReadAhead
from fleet.recipe import NotYet, Recipe, Strategy, Unplannable
from fleet.scheduler import Scheduler
from fleet.store import Store
from fleet.work import Maker

_NEVER = -math.inf
_GLANCE, _SPAN = 0.25, 4  # short recipes come several to a look: so many seconds, and so often what the look took
_PLAN_PATIENCE = 1.0  # whoever published last plans first; others only if no plan has come after so long and a breath
_PULSE = 5.0  # seconds between two pulses, at most: people want to see how far each is
_PROBES = 4  # so many awaited names are opened in one slow tick, whatever the listings say
_RARELY = 8  # times as long as a slow tick takes where the disk is slow to answer: until the next one
_SELDOM = 30  # breaths between two looks at others' pulses
_FIRST_NAP = 0.25  # seconds, where each look costs
_PEERS = 4  # so many others' pulses are looked at now and then
_UNLOOKED = 8  # recipes that a first lane goes on with in a row, by what the second one has seen
_FEW = 4  # workers may each look for half of the time that they wait; many share that


class Worker:
    def __init__(
        self,
        store: Store,
        strategy: Strategy,
        make: Maker,
        options: WorkerOptions = WorkerOptions(),
        report: Callable[[History], None] | None = None,
        second: tuple[Store, Maker] | None = None,
        first: "Worker | None" = None,
    ) -> None:
        """A worker has one lane, or two, each a Worker. Whoever is given `second`, a store and a maker for the other,
        is the first lane and makes the second one; whoever is given `first`, that worker, is the second lane."""
        self.store, self.host, self.strategy, self.options = store, store.host, strategy, options
        self.history, self.tail = History(store), Tail()
        self._first = first
        self._second: Worker | None = None
        if first:
            self.history.other, first.history.other = first.history, self.history
            first.history.listens = True
        watch = claims.Watch(store, self.host, options.dead_seconds)
        held = claims.Claims(store, self.history, watch, options.launch)
        self.events: Events = LaneEvents(first.events) if first else Events(store)
        own = self.history.recent()
        self.blame = blame.Blame(held, self.history, self.events, options.dead_seconds, options.seats)
        speed = first.context.pace if first else pace.Pace()
        self.context: WorkerContext = WorkerContext(
            store, self.host, self.history, held, self.blame, speed, self.events, options, own,
            first.context.files_read if first else {}, self._takes,
            first=first.context if first else None,
        )  # fmt: skip
        self.scheduler = Scheduler(self.context)
        self.lane = self._lane(*second, strategy) if second else None
        self.execution = Execution(self.context, make, self.tail, self._wait, self.lane)
        self.elastic = elastic_rounds.Elastic(self.history, self.host, options.quorum, options.grace_seconds)
        self._breath = min(store.breath, options.dead_seconds / 6)
        self._tick = self._until_tick = max(options.tick_seconds, 6 * self._breath)
        self.pulse = claims.Pulse(store, max(min(_PULSE, options.dead_seconds / 5), 2 * self._breath), self._say)
        self._archive = WorkerArchive(
            store, first.events if first else self.events, blame.PATIENCE * options.dead_seconds
        )
        self._began = self.host.now()
        self.bell, self.report = Bell(store), report
        self._ahead = ReadAhead(self.context, first.context, first.current_id) if first else None
        self._trouble = 0  # so often in a row the disk did not answer
        self._fresh = True  # something changed by my own doing: look without waiting for the bell
        self._waits_since = self._ticked = self._looked = self._heard = _NEVER
        self._asking = 0.0  # seconds that the last look at the bell took
        self._rung, self._owed = False, 0.0  # since the last look; and seconds of pause that come before the next one
        self._glance = _GLANCE
        self._unlooked = 0  # recipes gone on with since the last look
        self._away = False  # from looking around: at what may take a while
        self._seen_beside = _NEVER  # the second lane's last look that this one knows of
        self._untidy = False  # there is a new plan, after which something may be removed
        self._waits_for = ""
        self._plannable: tuple[int | None, int] = (None, 0)
        self._plannable_since = _NEVER

    def run(self) -> str:
        """Work until the run is over or this process is asked to end; says which."""
        self.store.prove()
        log.addHandler(self.tail)
        self.pulse.start()
        self.events.note("started", launch=self.options.launch, machine=self.host.name)
        try:
            if self.lane:
                self.lane.start()
            how = self._loop()
            self._hand_in()
            return how
        except (faults.Damaged, faults.Refused) as fault:
            why = f"a register of this run is damaged: {fault}; restore it from a backup"
            self.events.note("stopped", why=why)
            raise Stopped(why) from fault
        except Stopped as why:
            self.events.note("stopped", why=str(why))
            self.bell.ring()
            self._hand_in()
            raise
        finally:
            if self.lane:
                self.lane.end()
            self.pulse.end()
            self.events.note("ended", ops=self.store.ops)
            self.events.flush()
            log.removeHandler(self.tail)

    def _hand_in(self) -> None:
        """What this worker has made is published, and what it holds is given back. Whatever else ends it may come of
        what it makes: then it counts as lost."""
        if self.lane:
            self.lane.end()
        with contextlib.suppress(faults.Fault):
            self.execution.collect_last()
            for lane in filter(None, (self, self._second)):
                lane.context.claims.give_back()

    def _takes(self, recipe: Recipe) -> bool:
        """Whether this lane makes such a recipe. An only lane makes all; of two, the second makes what needs no device
        (OPTIONS.off_device), and the first what does."""
        if not (self._first or self._second):
            return True
        off_device = recipe.task in self.options.off_device
        return off_device if self._first else not off_device

    def _lane(self, store: Store, make: Maker, strategy: Strategy) -> Lane:
        store.at_hand = self.store.at_hand
        other = self._second = Worker(store, strategy, make, self.options, first=self)

        def publish(made: Pending) -> None:
            other.execution.publish_pending(made)
            other._fresh = True  # it plans what can be planned now, and nobody waits for that
            other.bell.ring()

        return Lane(self.host, publish, other.turn, other.execution.forget)

    def _loop(self) -> str:
        while not self.host.stopping:
            if self.turn():
                return "over"
        return "interrupted"

    def turn(self) -> bool:
        """The same, whatever the disk does."""
        try:
            over, self._trouble = self._turn(), 0
            return over
        except (faults.Full, faults.Passing, faults.Missing) as fault:
            self._trouble = self._wait(fault, self._trouble)
        except NotYet:  # what was seen a moment ago is gone: the server crashed, or a member was voided
            self.host.sleep(0.1)
            self._fresh, self._seen_beside = True, _NEVER
        return False

    def _turn(self) -> bool:
        """One turn of the loop; true when the run is over."""
        now, rests = self.host.now(), self.blame.resting
        if any([self.execution.collect(), self.blame.wakes()]):
            self._fresh, self._seen_beside = True, _NEVER
        if not rests and (id := self._beside_second_lane(now) or self._fresh and self._at_once(now)):
            self._make(id)
            return False
        tick = now - self._ticked > self._until_tick
        if not (tick or self._wants_to_look(now)):
            self._nap(now)
            return False
        self._look(tick, now)
        if self.history.over and self.history.round_0_is_whole():
            planning.prune(self.store, self.history, self.options.keep_every)
            self.events.note("over", rounds=self.history.first_open)
            return True
        if tick:
            if self.execution.judge():
                self.bell.ring()
            took = self.host.now() - now
            self._until_tick = max(self._tick, min(_RARELY * took, self.options.dead_seconds) if took > _GLANCE else 0)
        self._work(tick, now)
        return False

    def _look(self, tick: bool, now: float) -> None:
        """At the run, and what follows from what is seen whatever is made next; a slow tick looks at more."""
        if tick:
            self._ticked = now
            if not self.lane:  # else the other one does it, which nobody waits for
                self._obey()
                if not self._archive.tidy():  # one after the other, so that no look costs much
                    self._hear_of_peers(now)
        fresh, self._fresh, self._rung, self._owed, self._unlooked = self._fresh, False, False, 0.0, 0
        self.history.look(probe=_PROBES if tick else 0)
        self._looked = now
        if self._plan(fresh, now):
            self.bell.ring()
            self._looked = self.host.now()  # this is news for the other lane, too
        if not self._ahead:
            self._tidy()
        if self.report and (tick or self.history.over):
            self.report(self.history)

    def _wants_to_look(self, now: float) -> bool:
        """Whoever waits beside a second lane that looks around leaves that to it, but for the end of the run."""
        if self._attended():
            return self.history.over or self._looked == _NEVER
        self._rung = self._rung or self._hears(now)
        return self._fresh or self._rung and self._owed <= 0

    def _attended(self) -> bool:
        second, lane = self._second, self.lane
        around = second and not second.execution.working and not second._away and second._looked != _NEVER
        return bool(around and lane and lane.idle and not self.history.doubts)

    def _beside_second_lane(self, now: float) -> str | None:
        """While the first lane waits: by what the second one has seen since, without asking the disk for it."""
        if not self._second or self._waits_since == _NEVER or self._second._looked == self._seen_beside:
            return None
        looked = self._second._looked
        self.history.take_over()
        id = self.scheduler.claim(tick=False)
        self._seen_beside = _NEVER if self.scheduler.yielding else looked
        return id

    def _at_once(self, now: float) -> str | None:
        """Something to go on with, and no look at the disk: after a short recipe, or where a second lane has looked
        while this one was at a long one. Now and then it looks for itself: what is void or orphaned it sees only so."""
        if now - self._looked < self._glance:
            return self.scheduler.claim_again()
        if not self.lane or self._waits_since != _NEVER or _NEVER == self._looked or self._unlooked == _UNLOOKED:
            return None
        self._unlooked += 1
        self.history.take_over()
        return self.scheduler.claim_next()

    def _work(self, tick: bool, now: float) -> None:
        id = None if self.blame.resting else self.scheduler.claim(tick)
        if self.lane and not id:
            self.lane.looked(False)
        self._glance = max(_GLANCE, _SPAN * (self.host.now() - now))
        if id:
            self._make(id)
        elif self.scheduler.yielding and not self.blame.resting:
            self._fresh = True
            self.host.sleep(0.005)
        elif self.options.quorum < 1 and (overdue := self.elastic.overdue()):
            for id in [id for id in overdue if id not in self.context.pending]:
                self.execution.close(id)
            self._fresh = True
            self.bell.ring()
        else:
            self._owed = self._beside(self.host.now() - now)
            self._nap(now)

    def _make(self, id: str) -> None:
        if self._waits_since != _NEVER:
            self.events.note("waited", seconds=round(self.host.now() - self._waits_since, 3))
            self._waits_since = _NEVER
        self._fresh, self._seen_beside = True, _NEVER
        if self.lane:
            self.lane.looked(True)
        if self.execution.produce(id):
            self.bell.ring()
            if self._second:  # which plans, and would take this for the news of somebody who does so himself
                self._second._fresh = True
        if self.execution.judge():
            self.bell.ring()

    def trains(self) -> bool:
        """A long recipe has begun to take its steps, and waits neither for the disk nor for others."""
        return bool((work := self.execution.working) and work.at[1])

    def current_id(self) -> str:
        work = self.execution.working
        return work.id if work else ""

    def noted(self, why: str) -> None:
        """What goes wrong beside the work, for the status."""
        self.events.note("waits", why=why)
        self.events.flush()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _hears(self, now: float) -> bool:
        rung = self.bell.rung()
        self._asking = self.host.now() - now
        return rung

    def _beside(self, seconds: float) -> float:
        """A pause beside what a look takes: so a crowded machine or a slow disk asks for fewer."""
        return min(1.0, seconds * max(1.0, self.context.pace.workers / _FEW))

    def _nap(self, now: float) -> None:
        """Short naps at first, then in proportion to the wait so far: 5% of it are added at most, or 20% where each
        look costs."""
        if self._waits_since == _NEVER:
            self._waits_since = now
            self.events.flush()
            if self.lane:
                self.lane.call()
        waited = now - max(self._waits_since, self._first._waits_since if self._first else _NEVER)
        usual = min(self.options.poll_seconds, max(0.005, 0.05 * waited))
        seldom = min(self._breath, max(_FIRST_NAP, 0.2 * waited))
        pause = max(seldom if self._breath else usual, self._beside(self._asking))
        if self._attended():  # then the other one asks the disk
            pause = usual
        self._owed -= pause
        if not (self._first and self._first.lane and self._ahead):
            self.host.sleep(pause)
        elif not self._something_useful(self._first.lane.hurry):
            self._first.lane.rest(pause)

    def _something_useful(self, hurry: Callable[[], bool]) -> bool:
        """In the second lane, which has nothing to make: what others need soon comes first."""
        assert self._first and self._ahead
        self._away = True
        try:
            if self._ahead.go_on(self._looked, hurry) or self._first.trains() and self.execution.begin_early(hurry):
                return True
            self._tidy()
            return False
        finally:
            self._away = False

    def _wait(self, fault: faults.Fault, trouble: int) -> int:
        """The disk has no room, refuses or does not answer: say so, do what helps, and wait longer each time."""
        full, refuses = isinstance(fault, faults.Full), isinstance(fault, faults.Denied)
        does = f"the disk {'refuses' if refuses else 'does not answer properly'}: {fault}"
        self.events.note("waits", why=f"the disk is full: {fault}" if full else does)
        if full:
            with contextlib.suppress(faults.Fault, NotYet):
                planning.prune(self.store, self.history, self.options.keep_every)
        self._away = True
        self.host.sleep(min(30.0, 0.1 * 2**trouble))
        self._away, self._fresh, self._seen_beside = False, True, _NEVER
        return min(trouble + 1, 10)

    # -- the others ---------------------------------------------------------------------------------------------------

    def _obey(self) -> None:
        """What holds for everybody: the run was stopped, or has had its time."""
        if self.host.now() - self._began > self.options.time_limit:
            hours = self.options.time_limit / 3600
            limit = f"its time limit of {hours:g} hour{'s' * (hours != 1)}"
            if launches.latest(self.store) > self.options.launch:
                raise Stopped(f"{limit} is over; a later launch of the run may have another")
            launches.end(self.store, limit)
        if why := launches.ordered(self.store, self.options.launch):
            raise Stopped(why)

    def _say(self) -> dict[str, Any]:
        """What stands in the pulse; and whatever was noted before a long recipe began gets to the disk now."""
        self.events.flush()
        launch, identity = self.options.launch, [*self.host.identity]
        about = {"machine": self.host.name, "launch": launch, "identity": identity, "benched": self.blame.benched}
        if work := self.execution.working:  # for people
            about |= {"doing": work.id, **dict(zip(("unit", "done", "of"), work.at, strict=True))}
        return {"seconds": self.context.pace.mine(), **about}

    def _hear_of_peers(self, now: float) -> None:
        if now - self._heard < max(self.pulse.every, _SELDOM * self._breath):
            return
        self._heard = now
        names = [name for name in claims.pulsing(self.store) if name != self.store.name]
        some = sorted(names, key=lambda name: zlib.crc32(f"{self.store.name}{name}{self._ticked}".encode()))[:_PEERS]
        self.context.pace.learn([claims.pulse_of(self.store, name) for name in some], 1 + len(names))

    def _plan(self, fresh: bool, now: float) -> bool:
        """Write down what can be planned, unless somebody else is likely doing just that."""
        round = planning.plannable(self.history)
        if (round, self.history.first_open) != self._plannable:
            self._plannable, self._plannable_since = (round, self.history.first_open), now
        overdue = now - self._plannable_since > _PLAN_PATIENCE + self._breath
        if round is None or not (fresh and not self.lane or overdue):
            return False
        try:
            planned, waits_for = planning.plan_ahead(self.store, self.strategy, self.history, defer=not overdue)
        except Unplannable as error:
            raise self.context.stopped(str(error)) from error
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            self.events.note("plan waits", waits_for)
        if planned:
            self.events.note("planned", rounds=planned, upto=self.history.last)
            self.history.share()
            (self._first or self)._untidy = True
        return planned > 0

    def _tidy(self) -> None:
        """Beside a second lane it is that one's, for which nobody waits."""
        if not self.lane and (worker := self._first or self)._untidy:
            hurry = worker.lane.hurry if worker.lane else lambda: False
            worker._untidy = not planning.prune(self.store, self.history, self.options.keep_every, hurry)

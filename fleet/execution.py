"""From a claim to an outcome: let the maker work, seal what it wrote, offer it; and what every failure means."""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fleet import faults, launches, round_state
from fleet.context import Spent, Stopped, WorkerContext
from fleet.errors import cause_chain, cut, spoils
from fleet.events import Tail, log
from fleet.foresight import awaited, files_read, previous_in_slot
from fleet.lane import Lane, Pending
from fleet.payload import Files, PayloadWriter
from fleet.recipe import NotYet, round_and_slot
from fleet.repair import Repair
from fleet.store import Unreadable, Value, proven
from fleet.work import CannotServe, Failed, Interrupted, Maker, NotOnThisMachine, Superseded, Work, prefix_of

_OFTEN = 8  # times in a row, with pauses that grow to half a minute
_PANICS = "pyo3_runtime"  # what a library in Rust raises is no Exception, and yet no order to end; nor is SystemExit


@dataclass(frozen=True)
class _Early:
    """What was begun before all inputs were there."""

    version: int
    writer: PayloadWriter
    read: Mapping[str, str]  # inputs that were there: in which attempt


class Execution:
    def __init__(
        self,
        context: WorkerContext,
        make: Maker,
        tail: Tail,
        wait: Callable[[faults.Fault, int], int],
        lane: Lane | None = None,
    ) -> None:
        self.context, self.make, self.tail, self._wait, self.lane = context, make, tail, wait, lane
        self.repair = Repair(context)
        self._refused: dict[str, int] = context.history.recent()  # how often the disk did not answer while it was made
        self._tried: dict[str, bool] = context.history.recent()
        self.working: Work | None = None  # what is being made
        self._early: dict[str, _Early] = {}
        self._vain: dict[str, int] = context.history.recent()  # with so many inputs nothing could be begun

    def produce(self, id: str) -> bool:
        """Make a claimed recipe and publish what came of it, or hand it to the second lane (DISK_LANE), which will;
        true if there is news for the others now."""
        context, began = self.context, self.context.host.now()
        read, version = context.store.bytes_read + context.store.bytes_at_hand, context.history.slot(id).version
        waited = context.store.seconds
        writer = self._begun(id, version) or self._writer(id, version)
        record: Value | None = None
        with self._failing(id, writer), self._working(id, writer) as work:
            metrics = _checked(self.make(work))
            later = self._can_be_late(work)
            files = writer.known if later else writer.seal()
            seconds = round(context.host.now() - began, 6)
            said = self._record(metrics, files, writer.attempt if files else "", seconds)
            record = proven(said, f"the record of {id}")[1]  # or it is a verdict: nobody could read it
            parents = work.pending
            context.pace.took(round_and_slot(id)[1], seconds)
            context.files_read[round_and_slot(id)[1]] = files_read(work)
            read = context.store.bytes_read + context.store.bytes_at_hand - read
            disk = round(max(0.0, context.store.seconds - waited), 3)
            context.events.note("made", id, seconds=round(seconds, 3), disk=disk, written=writer.written, read=read)
        if record is None:  # nothing came of it, and what that means was dealt with
            return False
        if later:
            self._hand_over(Pending(round_state.outcome(id, work.recipe, record, version), writer, parents))
        else:
            self.publish(id, version, record, writer)
            self._clear_blame(id)
        return not later

    def judge(self) -> bool:
        """What makers agree on by now: an outcome for what may fail, the end of the run otherwise."""
        agreed = [*self.context.blame.verdicts()]
        for verdict in agreed:
            if not (verdict.final and self.context.history.recipe(verdict.id).optional):
                raise self.context.stopped(verdict.all, again=not verdict.everywhere)
            self.close(verdict.id, "failed", verdict.why)
        self.context.blame.consider_bench()
        return bool(agreed)

    def publish(self, id: str, version: int, record: Value, writer: PayloadWriter | None = None) -> None:
        """Offer an outcome until the disk takes it: sealed work is not thrown away for want of a small register. As the
        version that the attempt's name tells: by that, others know whether its files can be needed. If it was voided
        meanwhile, what was void still stands there, and this one is late."""
        stands = self._offer(id, version, record)
        self.context.history.learn(id, version, stands)
        self._published(id, stands == record, writer)

    def _offer(self, id: str, version: int, record: Value) -> Value:
        trouble = 0
        while True:
            try:
                return self.context.store.settle(round_state.register(id, version), record)
            except (faults.Full, faults.Passing) as fault:
                if self.context.host.stopping:
                    raise
                trouble = self._wait(fault, trouble)

    def _published(self, id: str, mine: bool, writer: PayloadWriter | None) -> None:
        if mine:
            self.context.own[id] = True
        elif writer:
            writer.drop()
        self.context.events.note("published" if mine else "late", id)

    def _clear_blame(self, id: str) -> None:
        self.context.blame.made()
        self._refused.pop(id, None)

    def _can_be_late(self, work: Work) -> bool:
        """The second lane publishes it. What has no files comes soonest from here, where large ones are on the way."""
        if not self.lane or work.writer.foreign:
            return False
        return bool(work.writer.known or work.pending or self.lane.idle)

    # -- what the second lane publishes -------------------------------------------------------------------------------

    def _hand_over(self, made: Pending) -> None:
        assert self.lane
        self.context.pending.known[made.id] = made
        self.lane.enqueue(made)

    def publish_pending(self, made: Pending) -> None:
        """In the second lane: seal and offer what the first one has handed over, by this lane's own view of the disk,
        so that it is known who has waited."""
        first, made.writer.store = made.writer.store, self.context.store
        try:
            if not all(parent.counts for parent in made.parents):
                raise faults.Passing(f"{made.id}: what it was made of does not count")
            if made.writer.seal() != made.outcome.files:
                raise faults.Passing(f"{made.id}: its files are others than were written")
            made.stands = self._offer(made.id, made.outcome.version, made.outcome.record)
        except faults.Fault as fault:
            made.fault = fault
        finally:
            made.writer.store = first
            made.writer.held.clear()  # nobody waits in vain for a file of what could not be written

    def collect(self) -> bool:
        """In the first lane: what has come of it; true if something has."""
        if self.lane:
            self.lane.check()
        ended = self.context.pending.ended()
        for made in sorted(ended, key=lambda each: bool(each.fault)):
            with self._failing(made.id, made.writer):
                if made.fault:
                    raise made.fault
            self._learn(made)
        return bool(ended)

    def collect_last(self) -> None:
        """The same of a worker that ends: what could not be published is for others."""
        for made in self.context.pending.ended():
            self._learn(made)

    def _learn(self, made: Pending) -> None:
        if made.stands:
            self.context.history.learn(made.id, made.outcome.version, made.stands, just_now=False)
            self._published(made.id, made.stands == made.outcome.record, made.writer)
            self._clear_blame(made.id)

    def close(self, id: str, absent: str = "closed", why: str = "late") -> None:
        """Nothing comes of a slot: in elastic rounds it may be too late, or makers agree that it cannot be made."""
        record = {**self._record({}, {}, "", 0.0), "absent": absent, "why": cut(why)}
        self.publish(id, self.context.history.slot(id).version, record)

    # -- early --------------------------------------------------------------------------------------------------------

    def begin_early(self, hurry: Callable[[], bool]) -> bool:
        """In the second lane, which has nothing else to do: write what a recipe that will likely be made here needs no
        missing input for. So little is left to be written when others wait for it. False if there is none."""
        context = self.context
        self.forget(lambda id: context.history.finished(id) or context.claims.held(id))
        if not (id := next(self._likely(), "")):
            return False
        version = context.history.slot(id).version
        writer = self._writer(id, version)
        try:
            every = context.options.snapshot_seconds
            work = Work(id, context.history, writer, False, every, str, context.pending, hurry)
            self.make(work)
            self._early[id] = _Early(version, writer, {each: input.attempt for each, input in work.inputs.items()})
        except Interrupted:
            writer.drop()
        except Exception as error:  # whatever it is, nobody has asked for it yet
            log.debug("%s: nothing is written early: %s", id, _short(error))
            writer.drop()
            self._vain[id] = self._there(id)
        return True

    def forget(self, which: Callable[[str], bool] = lambda id: True) -> None:
        for id in [*filter(which, self._early)]:
            self._early.pop(id).writer.drop()

    def _likely(self) -> Iterator[str]:
        """Of slots whose last one this lane has made, once an input is there."""
        history = self.context.history
        for id, recipe in history.unfinished():
            mine = self.context.takes(recipe) and self._made_before(id)
            if mine and id not in self._early and not self.context.claims.held(id):
                if self._there(id) not in (0, self._vain.get(id)):
                    yield id

    def _made_before(self, id: str) -> bool:
        """Or it was carried over from where it was made."""
        with contextlib.suppress(KeyError, ValueError, NotYet):  # a slot that was not there in the last round
            last = previous_in_slot(id)
            return last in self.context.own or self.context.history.origin(last) in self.context.own
        return False

    def _there(self, id: str) -> int:
        return sum(map(self.context.history.finished, self.context.history.recipe(id).inputs))

    def _begun(self, id: str, version: int) -> PayloadWriter | None:
        """If it is of this version, and of what its inputs still are: one may have been made again meanwhile."""
        if not (begun := self._early.pop(id, None)):
            return None
        with contextlib.suppress(faults.Fault, NotYet):
            now = {each: self.context.history.files(each).attempt for each in begun.read}
            if (begun.version, begun.read) == (version, now):
                return begun.writer
        begun.writer.drop()
        return None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _writer(self, id: str, version: int) -> PayloadWriter:
        attempt = f"{prefix_of(id)}{version}.{self.context.host.token()}"
        return PayloadWriter(self.context.store, attempt, deferred=bool(self.lane))

    @contextlib.contextmanager
    def _working(self, id: str, writer: PayloadWriter) -> Iterator[Work]:
        context = self.context
        resume = context.claims.count(id) > 1 or id in self._tried
        self._tried[id] = True
        self.working = work = Work(
            id, context.history, writer, resume, context.options.snapshot_seconds,
            lambda: launches.ordered(context.store, context.options.launch), context.pending,
        )  # fmt: skip
        try:
            if saved := work.resume():
                context.claims.resumed(id, saved.step)
                context.events.note("resumed", id, step=saved.step)
            if not self.lane:  # else the other one reads ahead, and both would read the same
                work.bring(awaited(context.history, id, work.recipe, context.files_read))
            yield work
        finally:
            context.store.at_hand.drop(work.brought)
            self.working = None

    def _record(self, metrics: Mapping[str, Any], files: Files, attempt: str, seconds: float) -> Value:
        listed = {name: [*each] for name, each in files.items()}
        made = {"metrics": dict(metrics), "files": listed, "attempt": attempt, "absent": "", "why": ""}
        return {**made, "by": self.context.store.name, "machine": self.context.host.name, "seconds": seconds}

    @contextlib.contextmanager
    def _failing(self, id: str, writer: PayloadWriter) -> Iterator[None]:
        """Everything that can happen while a member is made, and what it means."""
        try:
            yield
        except Interrupted:
            self.context.claims.leave(id, "released")
            self.context.events.note("released", id)
        except NotOnThisMachine as why:
            writer.drop()
            self._leave(id, "elsewhere", str(why))
            self.context.blame.lacks(id)
            self.context.events.note("leaves to others", id, why=str(why))
        except CannotServe as why:
            writer.drop()
            self.context.claims.leave(id, "released")
            raise Stopped(str(why)) from why
        except Superseded:
            writer.drop(keep_snapshot=not self.context.history.finished(id))  # for the version that counts now
            self.context.events.note("behind", id)
        except (faults.Full, NotYet):
            writer.drop(keep_snapshot=True)
            raise
        except faults.Passing as fault:
            writer.drop(keep_snapshot=True)
            self._passes(id, fault)
        except (faults.Missing, faults.Damaged, faults.Refused) as fault:
            writer.drop(keep_snapshot=True)
            if not self.repair.explains(id, fault):
                self._failure(id, fault)
        except (Failed, Unreadable) as verdict:
            writer.drop()
            self._leave(id, "verdict", str(verdict))
            self.context.blame.finds(id)
            self.context.events.note("failed", id, why=str(verdict))
        except BaseException as error:
            if not (isinstance(error, (Exception, SystemExit)) or type(error).__module__ == _PANICS):
                raise
            writer.drop(keep_snapshot=True)
            if isinstance(error, OSError):  # a library that writes a file itself meets the same disk
                named, here = faults.named(error, id), self.context.store.holds(error.filename)
                if isinstance(named, faults.Full) and (here or not error.filename):
                    raise named from error
                if isinstance(named, faults.Passing) and (
                    here or not (error.filename or isinstance(named, faults.Denied))
                ):
                    return self._passes(id, named)
            if not self.repair.already_done(id):
                self._failure(id, error)
            if any(map(spoils, cause_chain(error))):
                with contextlib.suppress(faults.Fault, NotYet):
                    self.judge()  # or a recipe that spoils every process would go from one to the next
                raise Spent(f"{id}: this process can use its device no more: {_short(error)}") from error

    def _passes(self, id: str, fault: faults.Passing) -> None:
        """The disk does not answer properly, and the loop waits; but where it goes on so with this recipe alone, one of
        its parents cannot be read any more, or it is this machine."""
        self._refused[id] = self._refused.get(id, 0) + 1
        if self._refused[id] % _OFTEN:
            raise fault
        if not self.repair.explains(id, fault):
            self._failure(id, fault)

    def _failure(self, id: str, error: BaseException) -> None:
        """A fault of the machine, or the recipe's: who else fails at it will tell."""
        log.error("%s failed: %s", id, cut("".join(traceback.format_exception(error))))
        self._leave(id, "failed", _short(error))
        self.context.blame.failed(id)
        self.context.events.note("failed", id, why=_short(error))

    def _leave(self, id: str, why: str, error: str) -> None:
        self.context.claims.leave(id, why, error=cut(error), tail=[*self.tail.lines])


def _short(error: BaseException) -> str:
    return cut("".join(traceback.format_exception_only(error)).strip())


def _checked(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics are plain finite values: a loss that is not a number must never reach a strategy."""
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise TypeError(f"metric {key!r}: its name is no text")
        if isinstance(value, float) and not math.isfinite(value):
            raise Failed(f"{key} is {value}")
        if not isinstance(value, (str, int, float, bool)):
            raise TypeError(f"metric {key}: {type(value).__name__} is not a plain value")
    return dict(metrics)

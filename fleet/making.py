"""From a claim to an outcome: let the maker work, seal what it wrote, offer it; and what every failure means."""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fleet import faults, launches
from fleet.desk import Desk, Spent, Stopped
from fleet.events import Tail, log
from fleet.payload import Draft, Files
from fleet.recipe import NotYet, folder, place
from fleet.repair import Repair
from fleet.store import Unreadable, Value, read_back
from fleet.work import Elsewhere, Failed, Interrupted, Maker, Unfit, Unwanted, Work, prefix_of
from fleet.wrong import behind, cut

_SPENT = ("CUDA error", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "device-side assert")
_OFTEN = 8  # times in a row, with pauses that grow to half a minute
_PANICS = "pyo3_runtime"  # what a library in Rust raises is no Exception, and yet no order to end; nor is SystemExit


class Workshop:
    def __init__(self, desk: Desk, make: Maker, tail: Tail, wait: Callable[[faults.Fault, int], int]) -> None:
        self.desk, self.make, self.tail, self._wait = desk, make, tail, wait
        self.repair = Repair(desk)
        self._refused: dict[str, int] = desk.history.recent()  # how often the disk did not answer while it was made
        self._tried: dict[str, bool] = desk.history.recent()

    def produce(self, id: str) -> bool:
        """Make a claimed recipe and publish what came of it; true if there is news for the others."""
        desk, began = self.desk, self.desk.host.now()
        read, version = desk.store.disk.bytes_read, desk.history.slot(id).version
        draft = Draft(desk.store, f"{prefix_of(id)}{version}.{desk.host.token()}")
        outcome: list[Value] = []
        with self._failing(id, draft):
            work = self._work(id, draft)
            metrics = _checked(self.make(work))
            files = draft.seal()
            seconds = round(desk.host.now() - began, 6)
            record = self._record(metrics, files, draft.attempt if files else "", seconds)
            outcome.append(read_back(record, f"the record of {id}"))  # or it is a verdict: nobody could read it
            desk.pace.took(place(id)[1], seconds)
            read = desk.store.disk.bytes_read - read
            desk.events.note("made", id, seconds=round(seconds, 3), written=draft.written, read=read)
        for record in outcome:
            self.publish(id, version, record, draft)
            desk.blame.made()
            self._refused.pop(id, None)
        return bool(outcome)

    def judge(self) -> bool:
        """What makers agree on by now: an outcome for what may fail, the end of the run otherwise."""
        agreed = [*self.desk.blame.verdicts()]
        for verdict in agreed:
            if not (verdict.final and self.desk.history.recipe(verdict.id).optional):
                raise self._stop(verdict.all)
            self.close(verdict.id, "failed", verdict.why)
        self.desk.blame.consider_bench()
        return bool(agreed)

    def publish(self, id: str, version: int, record: Value, draft: Draft | None = None) -> None:
        """Offer an outcome until the disk takes it: sealed work is not thrown away for want of a small register. As the
        version that the attempt's name tells: by that, others know whether its files can be needed. If it was voided
        meanwhile, what was void still stands there, and this one is late."""
        trouble, stands = 0, None
        while stands is None:
            try:
                stands = self._offer(id, version, record)
            except (faults.Full, faults.Passing) as fault:
                if self.desk.host.stopping:
                    raise
                trouble = self._wait(fault, trouble)
        self.desk.history.learn(id, version, stands)
        if stands == record:
            self.desk.own[id] = True
        elif draft:
            draft.drop()
        self.desk.events.note("published" if stands == record else "late", id)

    def close(self, id: str, absent: str = "closed", why: str = "late") -> None:
        """Nothing comes of a slot: in elastic rounds it may be too late, or makers agree that it cannot be made."""
        self.publish(id, self.desk.history.slot(id).version, self._absent(absent, why))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _work(self, id: str, draft: Draft) -> Work:
        desk = self.desk
        resume = desk.claims.count(id) > 1 or id in self._tried
        self._tried[id] = True
        work = Work(
            id, desk.history, draft, resume, desk.options.snapshot_seconds,
            lambda: launches.ordered(desk.store, desk.options.launch),
        )  # fmt: skip
        if saved := work.resume():
            desk.claims.resumed(id, saved.step)
            desk.events.note("resumed", id, step=saved.step)
        return work

    def _offer(self, id: str, version: int, record: Value) -> Value:
        round, slot = place(id)
        return self.desk.store.settle(f"{folder(round)}/{slot}.{version}.done", record)

    def _record(self, metrics: Mapping[str, Any], files: Files, attempt: str, seconds: float) -> Value:
        listed = {name: [size, sha] for name, (size, sha) in files.items()}
        made = {"metrics": dict(metrics), "files": listed, "attempt": attempt, "absent": "", "why": ""}
        return {**made, "by": self.desk.store.name, "machine": self.desk.host.name, "seconds": seconds}

    def _absent(self, absent: str, why: str) -> Value:
        return {**self._record({}, {}, "", 0.0), "absent": absent, "why": cut(why)}

    @contextlib.contextmanager
    def _failing(self, id: str, draft: Draft) -> Iterator[None]:
        """Everything that can happen while a member is made, and what it means."""
        try:
            yield
        except Interrupted:
            self.desk.claims.leave(id, "released")
            self.desk.events.note("released", id)
        except Elsewhere as why:
            draft.drop()
            self._leave(id, "elsewhere", str(why))
            self.desk.blame.lacks(id)
            self.desk.events.note("leaves to others", id, why=str(why))
        except Unfit as why:
            draft.drop()
            self.desk.claims.leave(id, "released")
            raise Stopped(str(why)) from why
        except Unwanted:
            draft.drop(keep_snapshot=not self.desk.history.finished(id))  # for the version that counts now
            self.desk.events.note("behind", id)
        except (faults.Full, NotYet):
            draft.drop(keep_snapshot=True)
            raise
        except faults.Passing as fault:
            draft.drop(keep_snapshot=True)
            self._passes(id, fault)
        except (faults.Missing, faults.Damaged, faults.Refused) as fault:
            draft.drop(keep_snapshot=True)
            if not self.repair.explains(id, fault):
                self._failure(id, fault)
        except (Failed, Unreadable) as verdict:
            draft.drop()
            self._leave(id, "verdict", str(verdict))
            self.desk.blame.finds(id)
            self.desk.events.note("failed", id, why=str(verdict))
        except BaseException as error:
            if not (isinstance(error, (Exception, SystemExit)) or type(error).__module__ == _PANICS):
                raise
            draft.drop(keep_snapshot=True)
            if isinstance(error, OSError):  # a library that writes a file itself meets the same disk
                named, here = faults.named(error, id), self.desk.store.disk.holds(error.filename)
                if isinstance(named, faults.Full) and (here or not error.filename):
                    raise named from error
                if isinstance(named, faults.Passing) and (
                    here or not (error.filename or isinstance(named, faults.Denied))
                ):
                    return self._passes(id, named)
            if not self.repair.behind(id):
                self._failure(id, error)
            if _is_spent(error):
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
        self.desk.blame.failed(id)
        self.desk.events.note("failed", id, why=_short(error))

    def _leave(self, id: str, why: str, error: str) -> None:
        self.desk.claims.leave(id, why, error=cut(error), tail=[*self.tail.lines])

    def _stop(self, why: str) -> Stopped:
        launches.stop(self.desk.store, self.desk.options.launch, why)
        return Stopped(why)


def _short(error: BaseException) -> str:
    return cut("".join(traceback.format_exception_only(error)).strip())


def _is_spent(error: BaseException) -> bool:
    """After such an error every call to the device fails, in this process and in no other."""
    return any(sign in _short(each) for each in behind(error) for sign in _SPENT)


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

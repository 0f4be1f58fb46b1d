"""From a claim to an outcome: let the maker work, seal what it wrote, offer it; and what every failure means."""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fleet import claims, faults, launches
from fleet.desk import Desk, Stopped
from fleet.events import Tail, log
from fleet.payload import Draft, Files
from fleet.recipe import NotYet, folder, place
from fleet.repair import Repair
from fleet.store import Value
from fleet.work import Elsewhere, Failed, Interrupted, Maker, Unwanted, Work, prefix_of


class Workshop:
    def __init__(self, desk: Desk, make: Maker, tail: Tail, wait: Callable[[faults.Fault, int], int]) -> None:
        self.desk, self.make, self.tail, self._wait = desk, make, tail, wait
        self.repair = Repair(desk)
        self._tried: set[str] = set()

    def produce(self, id: str) -> bool:
        """Make a claimed recipe and publish what came of it; true if there is news for the others."""
        desk, began = self.desk, self.desk.host.now()
        read = desk.store.disk.bytes_read
        draft = Draft(desk.store, f"{prefix_of(id)}{desk.history.slot(id).version}.{desk.host.token()}")
        outcome: list[Value] = []
        with self._failing(id, draft, outcome):
            work = self._work(id, draft)
            metrics = _checked(self.make(work))
            files = draft.seal()
            seconds = round(desk.host.now() - began, 6)
            outcome.append(self._record(metrics, files, draft.attempt if files else "", seconds))
            desk.pace.took(place(id)[1], seconds)
            read = desk.store.disk.bytes_read - read
            desk.events.note("made", id, seconds=round(seconds, 3), written=draft.written, read=read)
        for record in outcome:
            self.publish(id, record, draft)
        return bool(outcome)

    def publish(self, id: str, record: Value, draft: Draft | None = None) -> None:
        """Offer an outcome until the disk takes it: sealed work is not thrown away for want of a small register."""
        trouble, stands = 0, None
        while stands is None:
            try:
                stands = self._offer(id, record)
            except (faults.Full, faults.Passing) as fault:
                if self.desk.host.stopping:
                    raise
                trouble = self._wait(fault, trouble)
        self.desk.history.learn(id, stands)
        if stands == record:
            self.desk.own.add(id)
        elif draft:
            draft.drop()
        self.desk.events.note("published" if stands == record else "late", id)

    def close(self, id: str) -> None:
        """Elastic rounds: offer `closed` to a slot that is late."""
        self.publish(id, self._absent("closed", "late"))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _work(self, id: str, draft: Draft) -> Work:
        desk = self.desk
        resume = desk.claims.count(id) > 1 or id in self._tried
        self._tried.add(id)
        work = Work(
            id, desk.history, draft, resume, desk.options.snapshot_seconds,
            lambda: launches.ordered(desk.store, desk.options.launch),
        )  # fmt: skip
        if saved := work.resume():
            desk.claims.resumed(id, saved.step)
            desk.events.note("resumed", id, step=saved.step)
        return work

    def _offer(self, id: str, record: Value) -> Value:
        (round, slot), version = place(id), self.desk.history.slot(id).version
        return self.desk.store.settle(f"{folder(round)}/{slot}.{version}.done", record)

    def _record(self, metrics: Mapping[str, Any], files: Files, attempt: str, seconds: float) -> Value:
        listed = {name: [size, sha] for name, (size, sha) in files.items()}
        made = {"metrics": dict(metrics), "files": listed, "attempt": attempt, "absent": "", "why": ""}
        return {**made, "by": self.desk.store.name, "machine": self.desk.host.name, "seconds": seconds}

    def _absent(self, absent: str, why: str) -> Value:
        return {**self._record({}, {}, "", 0.0), "absent": absent, "why": why}

    @contextlib.contextmanager
    def _failing(self, id: str, draft: Draft, outcome: list[Value]) -> Iterator[None]:
        """Everything that can happen while a member is made, and what it means."""
        try:
            yield
        except Interrupted:
            self.desk.claims.leave(id, "released")
            self.desk.events.note("released", id)
        except Elsewhere as why:
            draft.drop()
            self.desk.avoided.add(id)
            self.desk.claims.leave(id, "released")
            self.desk.events.note("leaves to others", id, why=str(why))
        except Unwanted:
            draft.drop()
            self.desk.events.note("behind", id)
        except (faults.Full, faults.Passing, faults.Denied, NotYet):
            draft.drop(keep_snapshot=True)
            raise
        except (faults.Missing, faults.Damaged, faults.Refused) as fault:
            draft.drop(keep_snapshot=True)
            if not self.repair.explains(id, fault):
                outcome += self._failure(id, fault)
        except Failed as verdict:
            draft.drop()
            outcome += self._verdict(id, str(verdict))
        except Exception as error:
            draft.drop(keep_snapshot=True)
            if isinstance(error, OSError):  # a library that writes a file itself meets the same disk
                named = faults.named(error, id)
                if isinstance(named, (faults.Full, faults.Passing)):
                    raise named from error
            if not self.repair.behind(id):
                outcome += self._failure(id, error)

    def _verdict(self, id: str, why: str) -> list[Value]:
        """It would fail anywhere: an outcome if the recipe is optional, the end of the run otherwise."""
        if self.desk.history.recipe(id).optional:
            return [self._absent("failed", why)]
        self.desk.claims.leave(id, "failed", error=why, tail=[*self.tail.lines])
        raise self._stop(f"{id} cannot be made: {why}")

    def _failure(self, id: str, error: Exception) -> list[Value]:
        """A fault of the machine, until it has happened too often."""
        why = "".join(traceback.format_exception_only(error)).strip()
        log.error("%s failed: %s", id, "".join(traceback.format_exception(error)))
        self.desk.claims.leave(id, "failed", error=why, tail=[*self.tail.lines])
        self.desk.events.note("failed", id, why=why)
        if len(failures := self.desk.claims.failures(id)) < claims.FAILURES:
            return []
        if self.desk.history.recipe(id).optional:
            return [self._absent("failed", why)]
        machines = ", ".join(sorted({str(failure.get("machine")) for failure in failures}))
        raise self._stop(f"{id} failed {len(failures)} times, on {machines}; the last time: {why}")

    def _stop(self, why: str) -> Stopped:
        launches.stop(self.desk.store, self.desk.options.launch, why)
        return Stopped(why)


def _checked(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics are plain finite values: a loss that is not a number must never reach a strategy."""
    for key, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise Failed(f"{key} is {value}")
        if not isinstance(value, (str, int, float, bool)):
            raise TypeError(f"metric {key}: {type(value).__name__} is not a plain value")
    return dict(metrics)

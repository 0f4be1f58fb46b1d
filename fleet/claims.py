"""Who makes what, and who looks dead. A claim only saves double work; nothing is decided by it."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from fleet import faults, strictjson
from fleet.history import History
from fleet.host import Host
from fleet.recipe import NotYet, round_and_slot
from fleet.round_state import register
from fleet.store import Store, Value

_PULSE = ".pulse"
_WATCHED = 4096  # workers whose pulses are remembered


def pulse_at(worker: str) -> str:
    return f"workers/{worker}{_PULSE}"


def pulsing(store: Store) -> list[str]:
    """The workers whose pulses are there."""
    return pulsing_in(store.names("workers"))


def pulsing_in(names: Iterable[str]) -> list[str]:
    """The workers whose pulses are among the files of `workers`."""
    return [name.removesuffix(_PULSE) for name in names if name.endswith(_PULSE)]


def pulse_of(store: Store, worker: str) -> Value:
    """What a worker said last; nothing where it is gone, or where a crash of the server has torn it."""
    return parse_pulse(store.news(pulse_at(worker)))


def parse_pulse(text: str) -> Value:
    """What a pulse says; nothing where that cannot be read."""
    with contextlib.suppress(strictjson.BadJson):
        said = strictjson.parse(text.encode())
        if isinstance(said, dict):
            return said
    return {}


class Pulse:
    """Says 'alive' from a thread of its own: a disk that hangs holds up neither the loop nor, through it, the pulse."""

    def __init__(self, store: Store, every: float, news: Callable[[], dict[str, Any]]) -> None:
        self.store, self.every, self.news, self.ended = store, every, news, False

    def start(self) -> None:
        self.store.host.background(self._run)

    def end(self) -> None:
        """Gone in good order: nobody shall wait for what it would say."""
        self.ended = True
        self._remove()

    def _run(self) -> None:
        """Also while this process is asked to end: a long step, and what it keeps of it, come first."""
        beat = 0
        while not self.ended:
            with contextlib.suppress(faults.Fault):
                self.store.post(pulse_at(self.store.name), strictjson.text({"beat": beat, **self.news()}))
            beat += 1
            if not self.ended:  # it may have ended while this was said
                self.store.host.pause(self.every)
        self._remove()  # what was under way when it ended

    def _remove(self) -> None:
        with contextlib.suppress(faults.Fault):
            self.store.remove(pulse_at(self.store.name))


class Watch:
    """Times the changes of others' pulses on this process's own clock; two clocks are never compared."""

    def __init__(self, store: Store, host: Host, limit: float) -> None:
        self.store, self.host, self.limit = store, host, limit
        self._seen: dict[str, tuple[str | None, float]] = {}

    def dead(self, claim: Value) -> bool:
        return self.gone(claim) or self.silent(claim)

    def gone(self, claim: Value) -> bool:
        """The holder of a claim has ended for certain: it ran on this very machine, and does not any more."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            boot, namespace, pid, born = claim["identity"]
            return self.host.gone((boot, namespace, pid, born))
        return False

    def silent(self, claim: Value) -> bool:
        """The holder's pulse has stood still for too long."""
        by = str(claim.get("by"))
        return self.still(by, self.store.news(pulse_at(by)))

    def still(self, by: str, text: str) -> bool:
        """This is what its pulse says now, and has said for too long."""
        now = self.host.now()
        old, since = self._seen.get(by, (None, now))
        since = since if text in (old, "") else now  # a pulse that was tidied away is no sign of life
        self._seen.pop(by, None)
        self._seen[by] = (text or old, since)
        if len(self._seen) > _WATCHED:
            del self._seen[next(iter(self._seen))]
        return now - since > self.limit


class Claims:
    """The claims of a run as one worker sees and sets them."""

    def __init__(self, store: Store, history: History, watch: Watch, launch: int) -> None:
        self.store, self.history, self.watch, self.launch = store, history, watch, launch
        self._records: dict[str, dict[str, Value]] = history.recent()
        self._own: dict[str, tuple[int, int]] = history.recent()  # what this worker has claimed: version, number
        self._tried: dict[str, bool] = history.recent()  # what it has tried to claim: the reply may have been lost

    def held(self, id: str) -> bool:
        """Somebody has claimed it and has not given it up, as far as the listings have shown."""
        return self.history.slot(id).held

    def count(self, id: str) -> int:
        slot = self.history.slot(id)
        return slot.claims.get(slot.version, 0)

    @property
    def holding(self) -> bool:
        """Something that was claimed here is neither made nor given up."""
        return any(self.mine(id) and not self.history.finished(id) for id in [*self._own])

    def helped(self, id: str) -> bool:
        """Somebody else is at it, too: whoever claimed it before, and neither gave it up nor looks dead."""
        slot = self.history.slot(id)
        before = [self.record(id, "claim", n) for n in range(self.count(id) - 1) if (slot.version, n) not in slot.left]
        return any(claim and not self.watch.dead(claim) for claim in before)

    def holder(self, id: str) -> Value:
        return self.record(id, "claim", self.count(id) - 1)

    def known(self, id: str) -> bool:
        """Who holds it is known without looking."""
        return self._path(id, "claim", self.count(id) - 1) in self._records.get(id, {})

    def claimed(self, id: str) -> bool:
        """Perhaps by this worker, as far as it knows without looking."""
        return id in self._own or id in self._tried

    def mine(self, id: str) -> bool:
        """Claimed by this worker, which makes one thing at a time: an attempt that came to nothing, or a claim whose
        reply was lost."""
        if mine := self.held(id) and self.holder(id).get("by") == self.store.name:
            self._own[id] = (self.history.slot(id).version, self.count(id) - 1)
        return mine

    def take(self, id: str) -> bool:
        """Claim it, as the next after all claims that are known."""
        n, host = self.count(id), self.store.host
        path = self._path(id, "claim", n)
        if self.store.stamp(path):  # somebody else was faster: where many workers look for work, most are
            self._saw(id, "claim", n)
            return False
        claim = {"by": self.store.name, "identity": [*host.identity], "launch": self.launch, "machine": host.name}
        self._tried[id] = True
        try:
            stands = self.store.settle(path, claim, durable=False)
        except (faults.Damaged, faults.Refused):  # not synced, so a crash may have torn it: it will look dead
            stands = {}
        self._saw(id, "claim", n)
        self._records.setdefault(id, {})[path] = stands
        if taken := stands == claim:
            self._own[id] = (self.history.slot(id).version, n)
        return taken

    def leave(self, id: str, why: str, **more: Any) -> None:
        """Give a claim up: `released` with work kept for the next, `elsewhere` for who has what is missing here,
        `failed`, for a parent that reads as `damaged`, or with a `verdict` on the recipe."""
        if id not in self._own:  # finished long ago, by somebody else
            return
        version, n = self._own.pop(id)
        record = {"by": self.store.name, "machine": self.store.host.name, "launch": self.launch, "why": why, **more}
        if version == self.history.slot(id).version:
            self.store.settle(self._path(id, "left", n), record)
            self._saw(id, "left", n)

    def give_back(self) -> None:
        """What was claimed here and is neither made nor being made: its parents may have to be made again first. Or it
        would look as if whoever makes that was lost."""
        for id in [*self._own]:
            with contextlib.suppress(NotYet):
                if not self.history.finished(id):
                    self.leave(id, "released")

    def given_up(self, id: str) -> list[Value]:
        """What makers said who gave it up, in turn."""
        slot = self.history.slot(id)
        numbers = [n for version, n in sorted(slot.left) if version == slot.version]
        return [record for n in numbers if (record := self.record(id, "left", n))]

    def lost(self, id: str) -> list[Value]:
        """The claims in a row, up to the last one, that ended without a word and without progress, of whatever launch:
        from this one's first on."""
        slot, found = self.history.slot(id), list[Value]()
        for n in reversed(range(self.count(id))):
            claim = self.record(id, "claim", n)
            if not claim:
                break
            if (slot.version, n) in slot.left:
                if self.record(id, "left", n).get("why") == "released":
                    break
                continue  # another's word about it
            if found and self.record(id, "from", n).get("step") != self.record(id, "from", n + 1).get("step"):
                break  # it got somewhere
            found.append(claim)
        while found and found[-1].get("launch") != self.launch:
            found.pop()
        return found

    def resumed(self, id: str, step: int) -> None:
        """Note that the claim goes on from a snapshot: whoever was lost before had got somewhere."""
        with contextlib.suppress(faults.Fault):
            self.store.settle(self._path(id, "from", self._own[id][1]), {"step": step}, durable=False)

    def record(self, id: str, kind: str, n: int) -> Value:
        path, records = self._path(id, kind, n), self._records.setdefault(id, {})
        if path not in records:  # none is synced: a crash may have taken it back
            with contextlib.suppress(faults.Missing, faults.Damaged, faults.Refused):
                records[path] = self.store.read(path)
        return records.get(path, {})

    def _path(self, id: str, kind: str, n: int) -> str:
        return register(id, self.history.slot(id).version, f"{kind}.{n}")

    def _saw(self, id: str, kind: str, n: int) -> None:
        self.history.saw(round_and_slot(id)[0], self._path(id, kind, n).rpartition("/")[2])

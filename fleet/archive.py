"""What gone workers left, put away: their pulses and notes would otherwise be read each time.

Their pulses and drafts are removed, and their notes, but for the last ones, move to workers/ended/. Who moves them goes
on with their sums; so what a run has made in all stands in the notes of few workers, however many there were.
"""

import contextlib
from functools import partial

from fleet import faults, worker_notes
from fleet.claims import pulse_at, pulsing_in
from fleet.events import Events
from fleet.store import Store
from fleet.worker_notes import END

ENDED = "workers/ended"
KEPT = 32  # workers that are gone and still shown
_PULSES, _MOST = 4, 64  # pulses that are looked at in one go, and notes that are moved
_SELDOM = 60  # breaths between two times

Stamp = tuple[int, ...]


class WorkerArchive:
    """A worker's part in that."""

    def __init__(self, store: Store, events: Events, patience: float) -> None:
        self.store, self.events, self.patience = store, events, patience
        self._seen: dict[str, tuple[Stamp, float]] = {}  # pulses, and since when they stand still
        self._turn, self._drafts = 0, set[str]()
        self._tidied = store.host.now()

    def tidy(self) -> bool:
        """Now and then, and says so; what does not succeed is left to the next time, or to somebody else."""
        now = self.store.host.now()
        if now - self._tidied < max(self.patience / 10, _SELDOM * self.store.breath):
            return False
        self._tidied = now
        names = set(self.store.names("workers"))
        tasks = (self._remove_drafts, partial(self._remove_pulses, names, now), partial(self._move_notes, names))
        for task in tasks:
            with contextlib.suppress(faults.Fault):
                task()
        return True

    def _remove_drafts(self) -> None:
        """A draft lives for a moment; one that is still there after a time in which any worker would have looked dead
        belongs to nobody."""
        drafts = set(self.store.names("tmp"))
        for name in drafts & self._drafts:
            with contextlib.suppress(faults.Fault):
                self.store.remove(f"tmp/{name}")
        self._drafts = drafts

    def _remove_pulses(self, names: set[str], now: float) -> None:
        """Those that have stood still for longer than anybody waits for their worker; a few are looked at, in turn."""
        pulses = sorted(map(pulse_at, pulsing_in(names)))
        self._seen = {pulse: seen for pulse, seen in self._seen.items() if pulse in pulses}
        for pulse in [pulses[(self._turn + n) % len(pulses)] for n in range(min(_PULSES, len(pulses)))]:
            stamp = self.store.stamp(pulse)
            before, since = self._seen.get(pulse, ((), now))
            self._seen[pulse] = stamp, since if stamp == before else now
            if now - self._seen[pulse][1] > self.patience:
                self.store.remove(pulse)
        self._turn += _PULSES

    def _move_notes(self, names: set[str]) -> None:
        mine = f"{self.store.name}{END}"
        if self.events.begun and mine not in names:  # put away by somebody who took this worker for gone
            self.events.begin_anew()
        there = {*pulsing_in(names)}
        gone = [n for n in names if n.endswith(END) and n != mine and n.removesuffix(END) not in there]
        if len(gone) > KEPT:
            self.store.folder(ENDED)
            by_age = sorted(gone, key=lambda name: (self.store.stamp(f"workers/{name}")[2:3], name))
            for name in by_age[:-KEPT][:_MOST]:
                self._move(name)

    def _move(self, name: str) -> None:
        """A rename has one winner, who alone goes on with the sums."""
        there = f"{ENDED}/{name.removesuffix(END)}.{self.store.host.token()}{END}"
        with contextlib.suppress(faults.Missing):
            self.store.put_away(f"workers/{name}", there)
            self.events.inherit(worker_notes.read(self.store, there))

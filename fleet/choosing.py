"""What to make next: whatever can be made, what others wait for first, then what continues this worker's own work."""

import contextlib
import zlib
from collections.abc import Iterator

from fleet import claims, launches, pace, strictjson
from fleet.desk import Desk, Stopped
from fleet.recipe import Recipe, place

_PULSES = 3  # so many are looked at in one slow tick


class Chooser:
    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.yielding = False  # free work was left to faster workers for a moment
        self._turn = 0
        self._since: dict[tuple[str, str], float] = {}

    def quickly(self) -> str | None:
        """Claim the best of what was free at the last look; if somebody else has it by now, look again."""
        free = [id for id in self._makeable() if not self.desk.claims.held(id)]
        return free[0] if free and not self._polite(free[0]) and self._take(free[0]) else None

    def choose(self, tick: bool) -> str | None:
        """Claim something; looking for dead or slow holders, which reads their pulses, is left to the slow tick."""
        free, held = list[str](), list[str]()
        self.yielding = False
        for id in self._makeable():
            (held if self.desk.claims.held(id) else free).append(id)
        for id in free:
            if not self._polite(id) and self._take(id):
                return id
        for id in held:
            if self.desk.claims.mine(id):
                return id
        return next((id for id in self._orphans(held) if self._take(id)), None) if tick else None

    def _orphans(self, held: list[str]) -> Iterator[str]:
        """What is claimed and yet to be had. Pulses cost file operations: a few are looked at each time, in turn."""
        claims = self.desk.claims
        self._turn += _PULSES
        for n, id in enumerate(held):
            claim, looked_at = claims.holder(id), (n - self._turn) % len(held) < _PULSES
            if claims.watch.gone(claim) or looked_at and (claims.watch.silent(claim) or self._helps(id)):
                yield id

    def _makeable(self) -> list[str]:
        finished, jobs = self.desk.history.finished, self.desk.history.open()
        wanted = {parent for _, recipe in jobs for parent in recipe.parents}
        avoided = self.desk.avoided
        ready = [(id, recipe) for id, recipe in jobs if all(map(finished, recipe.parents)) and id not in avoided]
        return [id for id, _ in sorted(ready, key=lambda job: self._rank(job[0], job[1], wanted))]

    def _rank(self, id: str, recipe: Recipe, wanted: set[str]) -> tuple[bool, int, int, int]:
        """Evaluations that nothing waits for come last; ties are broken by the worker's name, so that all differ."""
        only_looked_at = id not in wanted and recipe.publish == "nothing"
        own = sum(self.desk.history.origin(parent) in self.desk.own for parent in recipe.parents)
        return only_looked_at, place(id)[0], -own, zlib.crc32((self.desk.store.name + id).encode())

    def _take(self, id: str) -> bool:
        self._check_losses(id)
        if taken := self.desk.claims.take(id):
            self.desk.events.note("claimed", id, n=self.desk.claims.count(id) - 1)
        return taken

    def _polite(self, id: str) -> bool:
        """A clearly slower worker leaves free work to idle faster ones for a moment."""
        patience = self.desk.pace.patience(place(id)[1], 2 * self.desk.options.poll_seconds)
        polite = patience > 0 and self._known_for("free", id) < patience
        self.yielding = self.yielding or polite
        return polite

    def _helps(self, id: str) -> bool:
        """Make again what a clearly slower worker would need much longer for; once is enough."""
        elapsed = self._known_for("held", id)
        if not self.desk.options.backup or self.desk.claims.count(id) > 1:
            return False
        holder = self.desk.claims.holder(id).get("by")
        with contextlib.suppress(strictjson.Bad):
            pulse = strictjson.parse(self.desk.store.news(f"workers/{holder}.pulse").encode())
            return self.desk.pace.worth_helping(place(id)[1], pace.seconds_of(pulse), elapsed, self.desk.options.backup)
        return False

    def _known_for(self, what: str, id: str) -> float:
        now = self.desk.host.now()
        return now - self._since.setdefault((what, id), now)

    def _check_losses(self, id: str) -> None:
        """A recipe that kills whoever makes it must not kill for ever."""
        if self.desk.claims.count(id) < claims.LOST or len(lost := self.desk.claims.lost(id)) < claims.LOST:
            return
        machines = ", ".join(sorted({str(claim.get("machine")) for claim in lost}))
        why = f"{id}: {len(lost)} workers in a row were lost while they made it, on {machines}"
        launches.stop(self.desk.store, self.desk.options.launch, why)
        raise Stopped(why)

"""Which recipe a worker claims next: of all that can be made what others wait for, then what continues its own work."""

from collections.abc import Iterator

from fleet import pace
from fleet.claims import pulse_of
from fleet.context import WorkerContext
from fleet.foresight import likelihood_key, previous_in_slot
from fleet.recipe import Recipe, reads, round_and_slot

_PULSES = 3  # so many are looked at in one slow tick
_LATE = 2  # rounds, after which an evaluation comes first: a worker that was never idle still has its model in memory


Job = tuple[str, Recipe, bool]  # whether it can wait: an evaluation that nothing reads


class Scheduler:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.yielding = False  # free work was left to faster workers for a moment
        self._turn = 0
        self._free = list[str]()  # at the last look, the best one last
        self._since: dict[str, dict[str, float]] = context.history.recent()

    def claim_again(self) -> str | None:
        """Claim the best of what was free at the last look; if somebody else has it by now, look again."""
        while self._free:
            id, context = self._free.pop(), self.context
            known = context.history.finished(id) or id in context.pending
            if not known and not context.blame.shuns(id) and not context.claims.held(id):
                return id if not self._polite(id) and self._take(id) else None
        return None

    def claim_next(self) -> str | None:
        """Without a new look at the disk, the best of what goes on from what was made here, or has long been left."""
        ready = self._makeable()
        if mine := self._mine(ready):
            return mine
        free = [job for job in ready if not self.context.claims.held(job[0])]
        rounds = {id: round_and_slot(id)[0] for id, *_ in free}
        old = max(rounds.values(), default=0) - _LATE
        own = [job for job in free if self.context.has(previous_in_slot(job[0])) or rounds[job[0]] < old]
        best = next(iter(self._ranked(own)), None)
        return best if best and not self._polite(best) and self._take(best) else None

    def claim(self, tick: bool) -> str | None:
        """Claim something; looking for dead or slow holders, which reads their pulses, is left to the slow tick."""
        claims, ready = self.context.claims, self._makeable()
        held = [job for job in ready if claims.held(job[0])]
        self.yielding, self._free = False, []
        if mine := self._mine(held):
            return mine
        free = self._ranked([job for job in ready if not claims.held(job[0])])
        self._free = free[::-1]
        for id in free:
            if not self._polite(id) and self._take(id):
                return id
        return next((id for id in self._orphans(self._ranked(held)) if self._take(id)), None) if tick else None

    def _mine(self, ready: list[Job]) -> str | None:
        """What this worker holds: whoever the disk refuses something would else hold one recipe after the other."""
        claims = self.context.claims
        return next((id for id, *_ in ready if claims.held(id) and claims.claimed(id) and claims.mine(id)), None)

    def _orphans(self, held: list[str]) -> Iterator[str]:
        """What is claimed and yet to be had. Pulses cost file operations: a few are looked at each time, in turn; where
        each look costs, so few claims are read, too, and their holders' pulses when it is their turn again."""
        claims = self.context.claims
        self._turn += _PULSES
        for n, id in enumerate(held):
            known, in_turn = claims.known(id) or not claims.store.breath, (n - self._turn) % len(held) < _PULSES
            claim = claims.holder(id) if known or in_turn else {}
            old = in_turn and (known or not claim)  # or it has no holder that could be known
            if claims.watch.gone(claim) or old and (claims.watch.silent(claim) or self._helps(id)):
                yield id

    def _makeable(self) -> list[Job]:
        """All whose inputs are there; thousands of recipes may share their lists of them."""
        context, there, wanted, ready = (
            self.context,
            dict[tuple[int, int], bool](),
            set[str](),
            list[tuple[str, Recipe]](),
        )
        for id, recipe in context.history.unfinished():
            if not context.takes(recipe) or id in context.pending:
                continue
            if (lists := reads(recipe)) not in there:
                there[lists] = all(map(self._is_there, recipe.inputs))
                wanted.update(recipe.inputs)
            if there[lists] and not context.blame.shuns(id):
                ready.append((id, recipe))
        looks = {id for id, recipe in ready if recipe.role != "member" and id not in wanted}
        free = (round_and_slot(id)[0] for id, _ in ready if id not in looks and not context.claims.held(id))
        late = min(free, default=0) - _LATE
        return [(id, recipe, id in looks and round_and_slot(id)[0] > late) for id, recipe in ready]

    def _ranked(self, jobs: list[Job]) -> list[str]:
        return [id for id, *_ in sorted(jobs, key=lambda job: self._rank(*job))]

    def _is_there(self, id: str) -> bool:
        """For everybody, or for this worker, which has just made it."""
        return id in self.context.pending or self.context.history.finished(id)

    def _rank(self, id: str, recipe: Recipe, can_wait: bool) -> tuple[bool, bool, int, int, int]:
        """What failed here comes last, before it evaluations that nothing waits for; yet where nobody is ever idle, the
        next plans would wait for them in the end."""
        context = self.context
        likes = likelihood_key(context.history, context.store.name, context.has, id, recipe)
        return context.blame.wary(id), can_wait, *likes

    def _take(self, id: str) -> bool:
        self._check_losses(id)
        if self.context.blame.shuns(id):
            return False
        if taken := self.context.claims.take(id):
            self.context.events.note("claimed", id, n=self.context.claims.count(id) - 1)
        return taken

    def _polite(self, id: str) -> bool:
        """A clearly slower worker leaves free work to idle faster ones for a moment."""
        patience = self.context.pace.patience(round_and_slot(id)[1], 2 * self.context.options.poll_seconds)
        polite = patience > 0 and self._known_for("free", id) < patience
        self.yielding = self.yielding or polite
        return polite

    def _helps(self, id: str) -> bool:
        """Make again what a clearly slower worker would need much longer for; once is enough."""
        factor, claims = self.context.options.backup, self.context.claims
        elapsed = self._known_for(f"held {claims.count(id)}", id)
        if not factor or claims.helped(id):
            return False
        pulse = pulse_of(self.context.store, str(claims.holder(id).get("by")))
        return bool(pulse) and self.context.pace.worth_helping(
            round_and_slot(id)[1], pace.seconds_of(pulse), elapsed, factor
        )

    def _known_for(self, what: str, id: str) -> float:
        now = self.context.host.now()
        return now - self._since.setdefault(id, {}).setdefault(what, now)

    def _check_losses(self, id: str) -> None:
        """A recipe that kills whoever makes it must not kill for ever."""
        if self.context.claims.count(id) < 2 or not self.context.blame.doomed(id, lost := self.context.claims.lost(id)):
            return
        machines = ", ".join(sorted({str(claim.get("machine")) for claim in lost}))
        raise self.context.stopped(
            f"{id}: {len(lost)} workers in a row were lost while they made it, on {machines}"
            "; who is lost without a word was mostly killed by the system, for want of memory"
        )

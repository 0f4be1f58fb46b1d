"""The loop's choices alone, as events on a simulated clock: no disk, no processes, so nothing blurs the figures."""

import heapq
import random
import zlib
from dataclasses import dataclass, field

from fleet.context import WorkerOptions
from fleet.foresight import previous_in_slot
from fleet.pace import SLOW
from fleet.recipe import AHEAD, Recipe, name, round_and_slot
from tests.toy.config import ToyConfig
from tests.toy.strategies import strategy

_TICK, _POLITE = WorkerOptions.tick_seconds, 2 * WorkerOptions.poll_seconds


@dataclass
class Seat:
    """One simulated worker."""

    number: int
    seconds: float  # what a recipe takes it
    slow: bool
    ticked: float
    busy: bool = False
    idle: float = 0.0  # since when it waits
    own: set[str] = field(default_factory=set)
    seen: dict[str, float] = field(default_factory=dict)  # since when it knows of a free or a held recipe


class Simulation:
    def __init__(self, config: ToyConfig, seconds: list[float], backup: float, seed: int = 0) -> None:
        usual = sorted(seconds)[len(seconds) // 2]
        self.rng, self.usual, self.backup = random.Random(seed), usual, backup
        self.seats = [Seat(n, s, s > SLOW * usual, -self.rng.uniform(0, _TICK)) for n, s in enumerate(seconds)]
        self.toy, self.rounds, self.first = strategy(config), dict[int, dict[str, Recipe]](), 0
        self.done: dict[str, float] = {}
        self.claims: dict[str, list[int]] = {}
        self.queue: list[tuple[float, int, Seat, str]] = []
        self.twice = 0
        self._pushed = 0

    def run(self, rounds: int) -> list[float]:
        """When the trained members of each round were all there."""
        for seat in self.seats:
            self._turn(seat, 0.0)
        while self.first <= rounds:
            now, _, seat, id = heapq.heappop(self.queue)
            if id:
                self._finish(seat, id, now)
            elif not seat.busy:
                self._turn(seat, now)
        of = [self.rounds[round].items() for round in range(rounds + 1)]
        trained = [[self.done[id] for id, recipe in each if "steps" in recipe.args] for each in of]
        return [max(ends) for ends in trained if ends]

    def _finish(self, seat: Seat, id: str, now: float) -> None:
        seat.busy = False
        self.twice += id in self.done
        if id not in self.done:
            self.done[id] = now
            seat.own.add(id)
        while self.first in self.rounds and all(each in self.done for each in self.rounds[self.first]):
            self.first += 1
        for each in self.seats:
            if each is not seat and not each.busy:  # sleeping, the longer the longer it has waited
                nap = min(WorkerOptions.poll_seconds, max(0.005, 0.05 * (now - each.idle)))
                self._push(now + self.rng.uniform(0, nap), each)
        seat.idle = now
        self._turn(seat, now)

    def _turn(self, seat: Seat, now: float) -> None:
        tick = now - seat.ticked > _TICK
        if tick:
            seat.ticked = now
        ready = self._ready(seat)
        for id in ready:
            if id not in self.claims and not self._polite(seat, id, now):
                return self._take(seat, id, now)
        for id in ready if tick and self.backup else ():
            if id in self.claims and self._helps(seat, id, now):
                return self._take(seat, id, now)
        self._push(max(now, seat.ticked + _TICK) + 1e-6, seat)

    def _ready(self, seat: Seat) -> list[str]:
        """What can be made, in the worker's order of preference."""
        for round in range(self.first, self.first + AHEAD + 1):
            if round not in self.rounds:
                self.rounds[round] = {name(round, each.slot): each for each in self.toy.plan(round, None)}
        jobs = [job for r in range(self.first, self.first + AHEAD + 1) for job in self.rounds[r].items()]
        jobs = [(id, recipe) for id, recipe in jobs if id not in self.done]
        wanted = {input for _, recipe in jobs for input in recipe.inputs}

        def rank(job: tuple[str, Recipe]) -> tuple[bool, int, int, int]:
            id, recipe = job
            only_looked_at = id not in wanted and recipe.role != "member"
            own = (previous_in_slot(id) in seat.own) + len(seat.own.intersection(recipe.inputs))
            return only_looked_at, round_and_slot(id)[0], -own, zlib.crc32(f"w{seat.number}{id}".encode())

        return [id for id, _ in sorted((j for j in jobs if all(p in self.done for p in j[1].inputs)), key=rank)]

    def _polite(self, seat: Seat, id: str, now: float) -> bool:
        patience = min(_POLITE, 0.1 * self.usual) if seat.slow else 0.0
        since = seat.seen.setdefault(f"free {id}", now)
        if polite := now - since < patience - 1e-9:
            self._push(since + patience, seat)
        return polite

    def _helps(self, seat: Seat, id: str, now: float) -> bool:
        elapsed = now - seat.seen.setdefault(f"held {id}", now)
        left = self.seats[self.claims[id][0]].seconds - elapsed
        return len(self.claims[id]) == 1 and left > self.backup * seat.seconds

    def _take(self, seat: Seat, id: str, now: float) -> None:
        self.claims.setdefault(id, []).append(seat.number)
        seat.busy = True
        self._push(now + seat.seconds, seat, id)

    def _push(self, at: float, seat: Seat, id: str = "") -> None:
        self._pushed += 1
        heapq.heappush(self.queue, (at, self._pushed, seat, id))

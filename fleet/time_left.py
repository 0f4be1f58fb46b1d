"""How far everybody is with what is being made, as workers' pulses tell, and how long the rest of a run will take."""

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fleet import faults
from fleet.claims import pulse_at, pulse_of, pulsing
from fleet.history import History
from fleet.recipe import Recipe, name
from fleet.store import Store

_LAST = 16  # recipes of a kind that count
_FIRST = 3  # rounds' worth of recipes, at most, that come before a guess: the first are short, with what happens once


@dataclass(frozen=True)
class Underway:
    """One recipe."""

    id: str
    by: str
    at: str  # in words
    share: float  # that is done


def underway(store: Store, launch: int) -> dict[str, Underway]:
    """By id, as workers of the launch said last. Anybody may have written there."""
    found = dict[str, Underway]()
    for worker in sorted(pulsing(store), key=lambda each: store.stamp(pulse_at(each))[2:3]):  # the last word counts
        with contextlib.suppress(faults.Fault):
            pulse = pulse_of(store, worker)
            if pulse.get("launch") == launch and (id := str(pulse.get("doing") or "")):
                done, of = (_number(pulse.get(key)) for key in ("done", "of"))
                text = f"{pulse.get('unit')} {done:,.0f}" + (f" of {of:,.0f}" if of else "") if done else ""
                found[id] = Underway(id, worker, text, min(1.0, done / of) if of else 0.0)
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e15 else 0.0


class TimeLeft:
    """What a run still takes, from what recipes like the next ones took, and how many are made at a time. A recipe is
    like another one of the same task; where they train, it takes as much longer as it has more steps."""

    def __init__(self, history: History, rounds: int, steps_in: Callable[[int], int] = lambda round: 1) -> None:
        self.history, self.rounds, self.steps_in = history, rounds, steps_in
        self._took: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST))  # task -> seconds, of a step
        self._counted = set[str]()
        self._first = True  # what was finished before this start tells what recipes take, not how many at a time
        self._looked = self._began = self._last = self._work = 0.0
        self._from = history.first_open  # the rounds before it are counted
        self._made = 0  # recipes since this start
        self.tokens = 0  # of what was finished since this start

    def learn(self) -> None:
        """Take in what was finished since the last time."""
        now, upto = self.history.store.host.now(), self.history.first_open
        for round in range(max(0, self._from - self._first), self.history.last + 1):
            for recipe in self.history.plan(round):
                id = name(round, recipe.slot)
                if not recipe.carried and id not in self._counted and self.history.finished(id):
                    self._counted.add(id)
                    outcome = self.history.outcome(id)
                    self._take(recipe, outcome.seconds, now if round and not self._first else 0.0)
                    tokens = outcome.member.metrics.get("tokens", 0)
                    self.tokens += tokens if isinstance(tokens, int) and not self._first else 0
        self._first, self._looked, self._from = False, now, upto
        self._counted = {id for id in self._counted if int(id.partition("/")[0]) >= upto}

    def seconds(self, done: Sequence[Underway] = ()) -> float | None:
        """Until the run is over, if that can be said yet; of what is under way so much is done."""
        if not self._work or self._last <= self._began:
            return None
        last, did = self.history.last, {each.id: each.share for each in done}
        planned = range(max(1, last - 3), last + 1)
        future = range(last + 1, 0 if self.history.ended else self.rounds + 1)
        usual = [recipe for round in planned for recipe in self.history.plan(round) if not recipe.carried]
        enough = min(_FIRST, max(1, self.rounds // 20)) * len(usual) / len(planned)
        if not any(map(self._cost, usual)) or self._made < enough:
            return None
        more, longer = len(future) / len(planned), sum(map(self.steps_in, future)) / sum(map(self.steps_in, planned))
        now = sum((1.0 - did.get(id, 0.0)) * self._cost(recipe) for id, recipe in self.history.unfinished())
        later = sum(self._cost(recipe) * (longer if "steps" in recipe.args else more) for recipe in usual)
        return (now + later) * (self._last - self._began) / self._work

    def _take(self, recipe: Recipe, seconds: float, now: float) -> None:
        self._took[recipe.task].append(seconds / _steps(recipe))
        if now and seconds:
            if not self._work:
                self._began = min(self._looked, now - seconds)  # others may have begun before it
            self._last, self._work, self._made = now, self._work + seconds, self._made + 1

    def _cost(self, recipe: Recipe) -> float:
        took = self._took.get(recipe.task)
        return _steps(recipe) * median(took) if took else 0.0


def _steps(recipe: Recipe) -> int:
    steps = recipe.args.get("steps")
    return steps if isinstance(steps, int) and steps > 0 else 1

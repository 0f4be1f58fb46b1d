"""How fast a worker is beside its peers. Known to the loop alone: it decides who makes what, never what is made."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

SLOW = 1.5  # so many times the usual seconds make a worker a clearly slower one
_LAST = 5

Seconds = Mapping[str, float]  # kind of recipe -> what it takes


class Pace:
    def __init__(self) -> None:
        self._mine: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_LAST))
        self._peers: list[Seconds] = []
        self.workers = 1  # of the run, as far as it was looked
        self._slow: bool | None = None  # if that is known

    def took(self, slot: str, seconds: float) -> None:
        self._mine[kind(slot)].append(seconds)
        self._slow = None

    def mine(self) -> dict[str, float]:
        return {kind: median([*last]) for kind, last in [*self._mine.items()]}  # the pulse's thread asks, too

    def learn(self, pulses: Iterable[Any], workers: int) -> None:
        """What some of so many workers say of themselves; anything of another shape is passed over."""
        self._peers = [seconds for pulse in pulses if (seconds := seconds_of(pulse))]
        self.workers, self._slow = workers, None

    def usual(self, slot: str) -> float | None:
        """What a recipe of this kind takes a typical worker."""
        known = [seconds[kind(slot)] for seconds in (*self._peers, self.mine()) if kind(slot) in seconds]
        return median(known) if known else None

    def slowness(self, seconds: Seconds) -> float:
        """1 is usual, 5 is five times slower."""
        ratios = [taken / usual for kind, taken in seconds.items() if (usual := self.usual(kind))]
        return median(ratios) if ratios else 1.0

    def patience(self, slot: str, most: float) -> float:
        """How long a clearly slower worker leaves free work to others. Bounded by the recipe's own length, or short
        recipes would mostly be waited for."""
        if self._slow is None:
            self._slow = self.slowness(self.mine()) > SLOW
        usual = self.usual(slot) if self._slow else None
        return min(most, 0.1 * usual) if usual else 0.0

    def worth_helping(self, slot: str, holder: Seconds, elapsed: float, factor: float) -> bool:
        """The holder of a claim would still need much longer than this worker would from the start."""
        if (usual := self.usual(slot)) is None or kind(slot) not in self.mine():
            return False
        left = usual * self.slowness(holder) - elapsed
        stuck = elapsed > 3 * usual * max(1.0, self.slowness(holder))
        return stuck or left > factor * usual * self.slowness(self.mine())


def kind(slot: str) -> str:
    """Slots of one kind differ in their number alone: replica-3."""
    return slot.rstrip("0123456789").rstrip("-") or slot


def seconds_of(pulse: Any) -> Seconds:
    found = pulse.get("seconds") if isinstance(pulse, dict) else None
    if not isinstance(found, dict):
        return {}
    return {str(k): float(v) for k, v in found.items() if isinstance(v, (int, float)) and 0 < v < 1e9}

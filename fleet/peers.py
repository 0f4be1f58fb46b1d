"""Who else works on a run, and what makers agree on.

A maker is a worker's place on a machine, in one launch: a process that takes a dead one's place is the same maker.
"""

import math
from collections.abc import Collection, Sequence

from fleet.claims import Claims, Watch, parse_pulse, pulse_at, pulsing
from fleet.store import Value

_REST = 4  # so many times what a look took, it holds: where many were killed and each read costs, looks are long

Who = tuple[str, str]  # the machine, and the place there in a launch


def who(record: Value) -> Who:
    """The maker that a claim, a pulse or a failure names: workers of one place differ in their names' last part."""
    by = str(record.get("by"))
    return str(record.get("machine")), f"{by.rpartition('-')[0] or by} of launch {record.get('launch')}"


def agreed(said: Sequence[Who], able: Collection[Who], times: int, makers: int) -> bool:
    """Said so often, and by so many makers on so many machines, if there are that many; or by all who could make it."""
    tried, could = {*said}, {*able}
    many = len(tried) >= makers and len(_machines(tried)) >= min(makers, len(_machines(tried | could)))
    return len(said) >= times and (many or bool(tried) and could <= tried)


class Peers:
    """Whoever works on the run, in whatever launch, by their pulses; looked at where something went wrong, and not
    before."""

    def __init__(self, claims: Claims, limit: float, back: float) -> None:
        """Who is silent is waited for up to a limit; who has left in good order may be back in so many seconds."""
        self.store, self._back = claims.store, back
        self._watch = Watch(claims.store, claims.store.host, limit)
        self._fresh_until = -math.inf
        self._known = dict[Who, tuple[float, bool]]()  # seen when, and whether it was benched

    def others(self) -> dict[Who, bool]:
        """Makers that live, or may come back; whether each is benched."""
        now = self.store.host.now()
        if now > self._fresh_until:
            there = dict[Who, bool]()
            for name in pulsing(self.store):
                if name != self.store.name and (pulse := self._pulse(name)):
                    there[who(pulse)] = bool(pulse.get("benched")) and there.get(who(pulse), True)
            self._known |= {maker: (now, benched) for maker, benched in there.items()}
            self._known = {maker: each for maker, each in self._known.items() if now - each[0] <= self._back}
            took = self.store.host.now() - now
            self._fresh_until = now + took + max(1.0, _REST * took)
        return {maker: benched for maker, (_, benched) in self._known.items()}

    def _pulse(self, name: str) -> Value:
        """What it says; one that a crash of the server has torn still speaks for somebody."""
        text = self.store.news(pulse_at(name))
        if not text and not self.store.stamp(pulse_at(name)):
            return {}
        pulse = {**parse_pulse(text), "by": name}
        return {} if self._watch.gone(pulse) or self._watch.still(name, text) else pulse


def _machines(makers: Collection[Who]) -> set[str]:
    return {machine for machine, _ in makers}

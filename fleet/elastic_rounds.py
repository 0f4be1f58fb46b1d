"""Elastic rounds: after a quorum and a grace time, the slots that are still out may be closed."""

import math
from statistics import median

from fleet.history import History
from fleet.host import Host
from fleet.recipe import Recipe, alike, name, round_and_slot

_USUAL = 1.5  # so many times what the others have taken are waited by themselves


class Elastic:
    """Times, on this process's own clock, how long each round has had its quorum."""

    def __init__(self, history: History, host: Host, quorum: float, grace: float) -> None:
        self.history, self.host, self.quorum, self.grace = history, host, quorum, grace
        self._since: dict[int, float] = {}

    def overdue(self) -> list[str]:
        """The slots to offer `closed` to."""
        rounds = self.history.open_rounds()
        self._since = {round: since for round, since in self._since.items() if round in rounds}
        return [id for round in rounds for id in self._overdue_in(round)]

    def _overdue_in(self, round: int) -> list[str]:
        optional = [name(round, x.slot) for x in self.history.plan(round) if x.optional and _counts(round, x)]
        out = {id: self.history.recipe(id) for id in optional if not self.history.finished(id)}
        good = [id for id in optional if id not in out and self.history[id]]
        if not out or len(good) < math.ceil(self.quorum * len(optional)):
            self._since.pop(round, None)
            return []
        if self.host.now() - self._since.setdefault(round, self.host.now()) < self._patience(good):
            return []
        needed = self._needed(round)  # and only what could have been made by now can be overdue
        return [id for id in out if id not in needed and all(map(self.history.finished, out[id].inputs))]

    def _patience(self, good: list[str]) -> float:
        return self.grace or _USUAL * median(self.history.outcome(id).seconds for id in good)

    def _needed(self, round: int) -> set[str]:
        """What a planned recipe has to have: of its inputs in this round, none is there or must be made."""
        recipes = (recipe for each in self.history.open_rounds() for recipe in self.history.plan(each))
        return {
            input
            for recipe in alike(recipes).values()
            if not any(self._certain(each) for each in recipe.inputs if round_and_slot(each)[0] == round)
            for input in recipe.inputs
        }

    def _certain(self, id: str) -> bool:
        """It is there, or it must be made."""
        return not self.history.recipe(id).optional or self.history.finished(id) and bool(self.history[id])


def _counts(round: int, recipe: Recipe) -> bool:
    """Towards the quorum: not what is carried over, and not what can only look at others of its own round."""
    return not recipe.carried and not any(round_and_slot(input)[0] == round for input in recipe.inputs)

"""FRAGMENTS: what a slot has not exchanged stays with whoever works for it, from one round to the next. Where somebody
else does, it is lost, and the slot goes on from what all have."""

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fleet.recipe import round_and_slot
from fleet.work import InputMember, Work
from merge.outer_step import ranges
from train.member import vectors
from train.member.vectors import FillStart, Moment, file_of
from train.recipe_arguments import Turn

LOST = "lost_own"  # in a replica's metrics


class _Own:
    """After a turn: all weights; how far those of some shards have come in it; and moments as files that do not leave
    this process, in the form that travels."""

    def __init__(self, turn: Turn, weights: Tensor, since: dict[int, Tensor]) -> None:
        self.turn, self.weights, self.since, self._files = turn, weights, since, dict[str, bytes]()

    @contextmanager
    def create(self, name: str) -> Iterator[io.BytesIO]:
        with io.BytesIO() as file:
            yield file
            self._files[name] = file.getvalue()

    @contextmanager
    def open(self, name: str) -> Iterator[io.BytesIO]:
        yield io.BytesIO(self._files[name])


class OwnFragments:
    def __init__(self, late: bool = False) -> None:
        """`late`: what comes together of a round is there a round later, and meanwhile everybody trains on."""
        self._late = late
        self._kept = dict[str, _Own]()  # by attempt: another's outcome may be the one that counts
        self._lost = False
        self.said = dict[str, Any]()  # of the member that is being made

    def begin(self, work: Work, turn: Turn, model: Tensor, shards: list[InputMember]) -> tuple[Tensor, FillStart]:
        """The weights that a replica begins with, and what fills its moments: its own, but for what has come together
        since it began the last time, to which it adds what it has learned meanwhile."""
        before, cuts = work.inputs.get(turn.before), ranges(len(model), len(shards))
        own, last = self._kept.get(before.attempt) if before else None, turn.round - 1 - self._late
        arrived = [n for n, shard in enumerate(shards) if 0 < last == round_and_slot(shard.member.origin)[0]]
        if own and self._late and not own.since.keys() >= {*arrived}:
            own = None
        self._lost = own is None and turn.round > 1 and len(arrived) < len(shards)
        self.said = {LOST: True} if self._lost else {}
        if own is None:
            return model, lambda stem, into: vectors.joined(shards, stem, into)
        for n in arrived:
            here = slice(cuts[n].start, cuts[n].stop)
            own.weights[here] = model[here] + own.since[n] if self._late else model[here]

        def fill_start(stem: str, into: Tensor) -> None:
            vectors.load(own, file_of(stem), into)
            for n in arrived:
                cut = ranges(len(into), len(shards))[n]
                vectors.joined([shards[n]], stem, into[cut.start : cut.stop])

        return own.weights, fill_start

    def keep(
        self,
        work: Work,
        turn: Turn,
        weights: Tensor,
        moments: Iterable[tuple[Moment, Tensor]],
        learned: Callable[[], dict[int, Tensor]],
    ) -> None:
        """Beside those of the round before, in case this attempt comes to nothing. Who went on from a snapshot of
        somebody who had begun otherwise does not know what has been `learned` since."""
        known = self._late and self._lost == (LOST in self.said)
        own = _Own(turn, weights.clone(), learned() if known else {})
        for moment, vector in moments:
            vectors.save(own, file_of(moment.stem), vector, moment.wire)
        old = {
            attempt: each
            for attempt, each in self._kept.items()
            if each.turn.round >= turn.round - (1 if each.turn.slot == turn.slot else 2)
        }
        self._kept = {**old, work.writer.attempt: own}

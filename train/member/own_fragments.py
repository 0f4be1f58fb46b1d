"""FRAGMENTS: what a slot has not exchanged stays with whoever works for it, from one round to the next. Where somebody
else does, it is lost, and the slot goes on from what all have."""

import io
from collections.abc import Iterable, Iterator
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
    """After a turn: all weights; and moments as files that do not leave this process, in the form that travels."""

    def __init__(self, turn: Turn, weights: Tensor) -> None:
        self.turn, self.weights, self._files = turn, weights, dict[str, bytes]()

    @contextmanager
    def create(self, name: str) -> Iterator[io.BytesIO]:
        with io.BytesIO() as file:
            yield file
            self._files[name] = file.getvalue()

    @contextmanager
    def open(self, name: str) -> Iterator[io.BytesIO]:
        yield io.BytesIO(self._files[name])


class OwnFragments:
    def __init__(self) -> None:
        self._kept = dict[str, _Own]()  # by attempt: another's outcome may be the one that counts
        self.said = dict[str, Any]()  # of the member that is being made

    def begin(self, work: Work, turn: Turn, model: Tensor, shards: list[InputMember]) -> tuple[Tensor, FillStart]:
        """The weights that a replica begins with, and what fills its moments: its own, but for what was exchanged in
        the round before."""
        before = work.inputs.get(turn.before)
        own = self._kept.get(before.attempt) if before else None
        exchanged = [n for n, shard in enumerate(shards) if round_and_slot(shard.member.origin)[0] == turn.round - 1]
        self.said = {LOST: True} if own is None and turn.round > 1 and len(exchanged) < len(shards) else {}
        if own is None:
            return model, lambda stem, into: vectors.joined(shards, stem, into)
        for cut in (ranges(len(model), len(shards))[n] for n in exchanged):
            own.weights[cut.start : cut.stop] = model[cut.start : cut.stop]

        def fill_start(stem: str, into: Tensor) -> None:
            vectors.load(own, file_of(stem), into)
            for n in exchanged:
                cut = ranges(len(into), len(shards))[n]
                vectors.joined([shards[n]], stem, into[cut.start : cut.stop])

        return own.weights, fill_start

    def keep(self, work: Work, turn: Turn, weights: Tensor, moments: Iterable[tuple[Moment, Tensor]]) -> None:
        """Beside those of the round before, in case this attempt comes to nothing."""
        own = _Own(turn, weights.clone())
        for moment, vector in moments:
            vectors.save(own, file_of(moment.stem), vector, moment.wire)
        old = {
            attempt: each
            for attempt, each in self._kept.items()
            if each.turn.round >= turn.round - (1 if each.turn.slot == turn.slot else 2)
        }
        self._kept = {**old, work.writer.attempt: own}

"""DiLoCo's global model as one worker has it in memory: of what it knows already, it reads the last step alone."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fleet.work import InputMember
from merge.outer_step import ranges
from merge.wire import pieces
from train.member import vectors
from train.member.vectors import UPDATE, WEIGHTS, file_of

STEPPED_FROM, STEPPED_TO = "stepped_from", "stepped_to"  # in a shard's metrics: its weights before, and after


class GlobalModel:
    def __init__(self) -> None:
        self._vector, self._known = torch.empty(0), list[str]()  # of each shard, which weights are there
        self._parts = dict[int, tuple[str, Sequence[Tensor]]]()  # of single shards: which weights, and those

    def read(self, shards: list[InputMember], size: int) -> Tensor:
        """All shards together, to be read only: it stays mine. What is read in part, for whatever reason, counts as
        unknown."""
        if (size, len(shards)) != (len(self._vector), len(self._known)):
            self._vector, self._known = torch.empty(size), [""] * len(shards)
        for number, (cut, shard) in enumerate(zip(ranges(size, len(shards)), shards, strict=True)):
            before, self._known[number] = self._known[number], ""
            _become(shard, before, self._vector[cut.start : cut.stop])
            self._known[number] = identity(shard)
        self._parts.clear()
        return self._vector

    @property
    def in_parts(self) -> bool:
        """Nobody here has asked for all shards; those that are made here are remembered by themselves."""
        return not self._known

    def pieces_of(self, shard: InputMember, number: int, cut: range) -> Iterator[Tensor]:
        """Of one shard: what is known of it, or else what is read."""
        if self._whole_has(shard, number):
            return pieces(self._vector[cut.start : cut.stop])
        known, there = self._parts.get(number, ("", ()))
        return iter(there) if known == identity(shard) else vectors.read_stem(shard, WEIGHTS, len(cut))

    def made(self, number: int, known: str, weights: Sequence[Tensor]) -> None:
        self._parts[number] = known, weights

    def remember(self, shard: InputMember, number: int, cut: range) -> None:
        known = identity(shard)
        if not self._whole_has(shard, number) and known != self._parts.get(number, ("",))[0]:
            self.made(number, known, [piece.clone() for piece in self.pieces_of(shard, number, cut)])

    def _whole_has(self, shard: InputMember, number: int) -> bool:
        return number < len(self._known) and self._known[number] == identity(shard)


def identity(shard: InputMember) -> str:
    """Of its weights."""
    return str(shard.metrics.get(STEPPED_TO) or shard.files[file_of(WEIGHTS)][1])


def _become(shard: InputMember, before: str, room: Tensor) -> None:
    if before == identity(shard):
        return
    if not (before and UPDATE in shard.files and shard.metrics.get(STEPPED_FROM) == before):
        vectors.joined([shard], WEIGHTS, room)
        return
    begin = 0
    for piece in vectors.numbers(shard, UPDATE, len(room)):
        room[begin : begin + len(piece)].sub_(piece)
        begin += len(piece)

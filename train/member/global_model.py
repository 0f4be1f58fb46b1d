"""DiLoCo's global model as one worker has it in memory: of what it knows already, it reads the last step alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fleet.work import InputMember
from merge.outer_step import ranges
from merge.wire import pieces
from train.member import vectors
from train.member.vectors import WEIGHTS, file_of

UPDATE = "update.safetensors"  # a shard's last step, in the form in which it travels
STEPPED_FROM = "stepped_from"  # in a shard's metrics: which weights its update is a step from


class GlobalModel:
    def __init__(self) -> None:
        self._vector, self._known = torch.empty(0), list[str]()  # of each shard, which weights are there

    def read(self, shards: list[InputMember], size: int) -> Tensor:
        """All shards together, to be read only: it stays mine. What is read in part, for whatever reason, counts as
        unknown."""
        if (size, len(shards)) != (len(self._vector), len(self._known)):
            self._vector, self._known = torch.empty(size), [""] * len(shards)
        for number, (cut, shard) in enumerate(zip(ranges(size, len(shards)), shards, strict=True)):
            before, self._known[number] = self._known[number], ""
            _become(shard, before, self._vector[cut.start : cut.stop])
            self._known[number] = identity(shard)
        return self._vector

    def pieces_of(self, shard: InputMember, number: int, cut: range) -> Iterator[Tensor] | None:
        """Of one shard, if this is what is known of it."""
        if number < len(self._known) and self._known[number] == identity(shard):
            return pieces(self._vector[cut.start : cut.stop])
        return None


def identity(shard: InputMember) -> str:
    """Of its weights."""
    return shard.files[file_of(WEIGHTS)][1]


def _become(shard: InputMember, before: str, room: Tensor) -> None:
    if before == identity(shard):
        return
    if not (before and UPDATE in shard.files and shard.metrics.get(STEPPED_FROM) == before):
        vectors.load(shard, file_of(WEIGHTS), room)
        return
    begin = 0
    for piece in vectors.numbers(shard, UPDATE, len(room)):
        room[begin : begin + len(piece)].sub_(piece)
        begin += len(piece)

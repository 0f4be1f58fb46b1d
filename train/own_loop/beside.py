"""What goes on beside a model's weights, in members' files: buffers and optimizers' numbers as vectors, which are
averaged, and all else as plain values, which are one member's own."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleet.work import Failed, InputMember
from train.exchange_config import ExchangeConfig
from train.member.vectors import STATE_WIRES, Joining, Moment
from train.member.vectors import read as read_vectors

FILE, BUFFERS = "beside.json", "buffers"
# By which names torch's optimizers and most others keep gradients' averages, and those of their squares: what is known
# may be narrow. Anything else travels exactly.
_AVERAGES, _SQUARES = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "square_avg", "max_exp_avg_sq")


@dataclass(frozen=True)
class KeptBeside:
    """As one member has it: plain values, and which vectors belong to them."""

    plain: Any
    keys: tuple[str, ...]  # of the optimizers' vectors, in the order of the moments; first, if there are any, buffers
    moments: tuple[Moment, ...]

    def data(self) -> bytes:
        rows = [[key, each.count, each.wire] for key, each in zip(self.keys, self.moments, strict=True)]
        return json.dumps({"plain": self.plain, "moments": rows}).encode()

    def parted(self, filled: Callable[[str, Tensor], None]) -> tuple[Tensor, dict[str, Tensor]]:
        """Buffers, and each of the optimizers' vectors by its name."""
        rooms = {key: torch.empty(each.count) for key, each in zip(self.keys, self.moments, strict=True)}
        for room, each in zip(rooms.values(), self.moments, strict=True):
            filled(each.stem, room)
        buffers = rooms.pop(BUFFERS, torch.empty(0))
        return buffers, {key.removeprefix("state-"): room for key, room in rooms.items()}


def kept_beside(c: ExchangeConfig, plain: Any, buffers: Tensor, states: Mapping[str, Tensor]) -> KeptBeside:
    """What is there now."""
    there = {**({BUFFERS: buffers} if len(buffers) else {}), **{f"state-{key}": each for key, each in states.items()}}
    moments = tuple(Moment(_stem(key), len(each), wire_of(c, key)) for key, each in there.items())
    return KeptBeside(plain, tuple(there), moments)


def wire_of(c: ExchangeConfig, key: str) -> str:
    average, square = STATE_WIRES.get(c.inner_optimizer_state, ("fp32", "fp32"))
    name = key.removeprefix("state-")
    return average if name in _AVERAGES else square if name in _SQUARES else "fp32"


def read(data: bytes) -> KeptBeside:
    value = json.loads(data)
    rows = [(str(key), Moment(_stem(key), int(count), str(wire))) for key, count, wire in value["moments"]]
    return KeptBeside(value["plain"], tuple(key for key, _ in rows), tuple(each for _, each in rows))


def first_of(members: Sequence[InputMember | None]) -> KeptBeside:
    """Of the first member that has it."""
    return next(_all(members))


def same_in(members: Sequence[InputMember]) -> KeptBeside:
    """Of the first of them; all are to have the same vectors, which are averaged."""
    first, *others = _all(members)
    for number, other in enumerate(others, 1):
        if first.moments != other.moments:
            mine, its = {*first.moments}, {*other.moments}
            odd = min({*mine ^ its}, key=lambda each: each.stem)
            raise Failed(
                f"optimizers remember other things in {members[0].member.id} and {members[number].member.id}: "
                f"{odd.count} numbers of {odd.stem} in one; INNER_OPTIMIZER_STATE reset lets them forget each round"
            )
    return first


def buffers_of(said: KeptBeside, join: Joining, members: list[InputMember]) -> Tensor:
    """Of several members together."""
    counts = [each.count for each in said.moments if each.stem == BUFFERS]
    return read_vectors(join, members, BUFFERS, counts[0]) if counts else torch.empty(0)


def _all(members: Sequence[InputMember | None]) -> Iterator[KeptBeside]:
    return (read(each.read(FILE)) for each in members if each and FILE in each.files)


def _stem(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", key)

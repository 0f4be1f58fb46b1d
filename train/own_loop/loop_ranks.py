"""Processes that share one model (DDP, FSDP2): the first one is the worker of the run, and the others do what it says.

What is said goes through a group of its own, in which one may wait for the others as long as it takes.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.run_config import UserError
from train.cluster.ranks import Ranks
from train.own_loop.own_model import OwnModel
from train.own_loop.turn_taking import Ended, GoOn, OwnTurn, Told

_TALK = timedelta(days=1000)
_OF_A_TURN = ("round", "slot", "steps", "genome", "base", "done", "drawn")  # all that others need to know of it


def ranks_here() -> Ranks | None:
    """Where the user's script has begun a group of several processes."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    talk = dist.new_group(backend="gloo", timeout=_TALK)
    rank, count = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, count, count, torch.device("cpu"), rank == 0, talk=talk)


class LeadingRank:
    """Says to the others what it does, and does it."""

    def __init__(self, ranks: Ranks, model: OwnModel) -> None:
        self.ranks, self.model = ranks, model

    def answer(self, what: str, given: tuple[Any, ...]) -> Any:
        tensors: list[Tensor] = []
        self.ranks.heard({"do": what, "given": [_plain(each, tensors) for each in given]})
        for each in tensors:
            self.ranks.given(each, each.shape, each.dtype)
        return getattr(self.model, what)(*given)

    def pass_on(self, said: Told) -> None:
        """To the others: what the user's loop is told here."""
        if isinstance(said, OwnTurn):
            self.ranks.heard({"turn": {name: getattr(said, name) for name in _OF_A_TURN}})
        elif isinstance(said, Ended):
            self.ranks.heard({"ended": said.how, "error": str(said.error or "")})
        else:
            self.ranks.heard({})


class FollowingRank:
    def __init__(self, ranks: Ranks, model: OwnModel) -> None:
        self.ranks, self.model = ranks, model

    def tell(self, what: int | BaseException) -> None:
        """The first one counts."""

    def serve(self) -> Told:
        while "do" in (said := self.ranks.heard()):
            getattr(self.model, said["do"])(*(self._filled(each) for each in said["given"]))
        if "turn" in said:
            return OwnTurn(**said["turn"])
        if "ended" in said:
            return Ended(said["ended"], UserError(said["error"]) if said["error"] else None)
        return GoOn()

    def _filled(self, value: Any) -> Any:
        match value:
            case {"tensor": shape, "dtype": dtype}:
                return self.ranks.given(None, shape, getattr(torch, dtype))
            case {"tensors": items}:
                return {key: self._filled(each) for key, each in items.items()}
            case {"plain": plain}:
                return plain
        raise AssertionError(value)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """As it is said; tensors follow in their order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, dict) and all(isinstance(each, Tensor) for each in value.values()):
        return {"tensors": {key: _plain(each, tensors) for key, each in value.items()}}
    return {"plain": value}

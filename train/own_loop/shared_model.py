"""A user's model that several ranks share: of tensors in parts (FSDP2), each rank has its own, and all read them
together."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from train.own_loop.own_model import OwnModel


def whole_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class SharedModel(OwnModel):
    read = staticmethod(whole_tensor)

    def write(self, into: Tensor, values: Tensor) -> None:
        into.copy_(_parted(values, into))

    def spread(self, owner: Any, state: Any) -> Any:
        """What an optimizer remembers of a tensor lies as the tensor does."""
        if "state" not in state or not hasattr(owner, "param_groups"):
            return state
        params = [p for group in owner.param_groups for p in group["params"]]
        kept = {number: {key: _beside(each, params[number]) for key, each in found.items()}
                for number, found in state["state"].items()}  # fmt: skip
        return {**state, "state": kept}


def _beside(value: Any, parameter: Tensor) -> Any:
    alike = isinstance(value, Tensor) and value.shape == parameter.shape
    return _parted(value, parameter) if alike else value


def _parted(values: Tensor, like: Tensor) -> Tensor:
    """All ranks have the same values: each keeps its part."""
    if not isinstance(like, DTensor):
        return values
    there = values.to(like.device)
    with torch.no_grad():
        return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)

"""What optimizers, schedulers and their like remember, as plain values beside vectors of numbers.

Floating-point tensors go into vectors, one for each name that an optimizer gives them (`exp_avg`), where those of
several members can be averaged. All else is one member's: numbers, words, and small tensors of whole numbers.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.run_config import UserError

_MOST = 4096  # whole numbers that are carried among plain values
Read = Callable[[Tensor], Tensor]  # all of a tensor, of which several ranks may have parts


def plain_tensor(tensor: Tensor) -> Tensor:
    return tensor


class Packed:
    """A tree of plain values, and the vectors that its tensors lie in."""

    def __init__(self, read: Read = plain_tensor) -> None:
        self.parts: dict[str, list[Tensor]] = defaultdict(list)
        self._read = read

    @property
    def vectors(self) -> dict[str, Tensor]:
        return {key: torch.cat([part.flatten() for part in parts]) for key, parts in sorted(self.parts.items())}

    def pack(self, value: Any, where: str, key: str = "") -> Any:
        """`key` is the last name on the way here, by which numbers belong together."""
        match value:
            case Tensor():
                return self._tensor(value, where, key)
            case bool() | int() | str() | None:
                return value
            case float():
                return value if math.isfinite(value) else {"float": str(value)}
            case dict():
                items = [*value.items()]
                if all(isinstance(each, int) for each in value):
                    items = sorted(items)  # the order in which parameters had their first gradients says nothing
                return {"map": [[k, self.pack(v, f"{where}.{k}", k if isinstance(k, str) else key)] for k, v in items]}
            case tuple() | list():
                packed = [self.pack(each, f"{where}.{n}", key) for n, each in enumerate(value)]
                return {"tuple": packed} if isinstance(value, tuple) else packed
        raise UserError(f"{where} is a {type(value).__name__}: only numbers, words and tensors go from round to round")

    def _tensor(self, tensor: Tensor, where: str, key: str) -> Any:
        about = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if tensor.is_floating_point():
            self.parts[key or "numbers"].append(self._read(tensor.detach()).float().cpu())
            return {"vector": key or "numbers", **about}
        if tensor.is_complex() or tensor.numel() > _MOST:
            raise UserError(f"{where} has {tensor.numel():,} numbers of {tensor.dtype}, which cannot be averaged")
        return {"whole": tensor.detach().cpu().flatten().tolist(), **about}


class Unpacker:
    """The other way: the next numbers of each vector, one tensor after the other."""

    def __init__(self, vectors: Mapping[str, Tensor]) -> None:
        self._vectors, self._at = vectors, defaultdict[str, int](int)

    def unpack(self, value: Any) -> Any:
        match value:
            case {"map": items}:
                return {key: self.unpack(each) for key, each in items}
            case {"tuple": items}:
                return tuple(self.unpack(each) for each in items)
            case {"float": text}:
                return float(text)
            case {"vector": key, "dtype": dtype, "shape": shape}:
                begin = self._at[key]
                self._at[key] += math.prod(shape)
                part = self._vectors[key][begin : self._at[key]]
                return part.view(shape).to(getattr(torch, dtype), copy=True)
            case {"whole": numbers, "dtype": dtype, "shape": shape}:
                return torch.tensor(numbers, dtype=getattr(torch, dtype)).view(shape)
            case list():
                return [self.unpack(each) for each in value]
        return value


def first_difference(one: Any, other: Any, where: str = "") -> str:
    """Where two trees differ first, with what stands there; nothing where they do not."""
    if type(one) is type(other):
        if isinstance(one, dict) and "map" in one and "map" in other:
            return _between({str(k): v for k, v in one["map"]}, {str(k): v for k, v in other["map"]}, where)
        if isinstance(one, dict):
            return _between(one, other, where)
        if isinstance(one, list):
            return _between(dict(enumerate(one)), dict(enumerate(other)), where)
    return "" if one == other else f"{where} is {one!r}, not {other!r}"


def _between(one: Mapping[Any, Any], other: Mapping[Any, Any], where: str) -> str:
    for key in {**one, **other}:
        here = f"{where}.{key}" if where else str(key)
        if found := first_difference(one.get(key), other.get(key), here):
            return found
    return ""

"""The user's model, and what learns beside it, as vectors and plain values: read, compared, and put back.

What learns are the parameters that require a gradient; they and buffers of floating-point numbers are averaged. What is
frozen is never touched, and only looked at once, since all processes must have the same.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fleet.run_config import UserError
from merge.tensor_files import bytes_of
from train.own_loop.state_tree import Packed, Unpacker, plain_tensor
from train.vector_layout import VectorLayout
from train.verdicts import NotFinite

_SMALL = 4096  # whole numbers in a buffer that counts something; larger ones are tables
Evaluate = Callable[[], Any]  # the user's: a loss, or several named numbers
Beside = tuple[Any, dict[str, Tensor]]  # plain values, and the vectors that belong to them


class OwnModel:
    read: Callable[[Tensor], Tensor] = staticmethod(plain_tensor)  # all of a tensor

    def __init__(self, model: torch.nn.Module, learning: Sequence[Any], evaluate: Evaluate | None = None) -> None:
        self.module, self.learning, self._evaluate = unwrapped(model), learning, evaluate
        named = dict(self.module.named_parameters())  # tied ones once
        self.parameters = {name: p for name, p in named.items() if p.requires_grad}
        kept = self.module.state_dict(keep_vars=True).keys()
        buffers = {name: each for name, each in self.module.named_buffers() if name in kept}
        self.buffers = {name: each for name, each in buffers.items() if each.is_floating_point()}
        others = {name: each for name, each in buffers.items() if name not in self.buffers}
        self.counters = {name: each for name, each in others.items() if each.numel() <= _SMALL}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self.constants = {**frozen, **{name: each for name, each in others.items() if name not in self.counters}}
        check(self.parameters, learning)
        # such as are free of a schedule: they train other weights than those to be looked at
        self.of_two_modes = [each for each in learning if trains(each) is not None]
        self.layout = VectorLayout({name: tuple(p.shape) for name, p in self.parameters.items()}, 0, (), 0)
        self.described = self._described()  # as it comes: all ranks that share it are here

    # -- what is averaged ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def weights(self) -> Tensor:
        return self._flat(self.parameters)

    @torch.no_grad()
    def load_weights(self, vector: Tensor) -> None:
        for name, view in self.layout.views(vector).items():
            self.write(self.parameters[name], view)

    @torch.no_grad()
    def buffer_vector(self) -> Tensor:
        return self._flat(self.buffers)

    @torch.no_grad()
    def load_buffers(self, vector: Tensor) -> None:
        begin = 0
        for each in self.buffers.values():
            self.write(each, vector[begin : begin + each.numel()].view(each.shape))
            begin += each.numel()

    @property
    def evaluates(self) -> bool:
        return self._evaluate is not None

    def beside(self, forget: bool = False) -> Beside:
        """What optimizers and schedulers remember, and what the model counts; or without what optimizers have learned
        about the gradient."""
        packed = Packed(self.read)
        found = [each.state_dict() for each in self.learning]
        found = [{**each, "state": {}} if forget and "param_groups" in each else each for each in found]
        states = [packed.pack(each, name_of(owner)) for each, owner in zip(found, self.learning, strict=True)]
        return {"states": states, "counters": packed.pack(self.counters, "buffer")}, packed.vectors

    def load_beside(self, plain: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> None:
        unpacker = Unpacker(vectors)
        for each, state in zip(self.learning, plain["states"], strict=True):
            each.load_state_dict(self.spread(each, unpacker.unpack(state)))
        self.load_counters(plain["counters"])

    @torch.no_grad()
    def load_counters(self, plain: Any) -> None:
        for name, value in Unpacker({}).unpack(plain).items():
            self.write(self.counters[name], value)

    def check_finite(self) -> None:
        """Nothing that is not a number leaves a worker: it would be in every average from then on."""
        for vector in (self.weights(), self.buffer_vector(), *self.beside()[1].values()):
            if not bool(vector.isfinite().all()):
                raise NotFinite("the weights, or what the optimizer remembers, are not finite after training")

    # -- what is seen of it -------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """By the user's own function: the same random numbers each time, and no gradients."""
        if self._evaluate is None:
            return {}
        with torch.no_grad(), self._shown():
            found = self._evaluate()
        return finite(numbers_of(found if isinstance(found, Mapping) else {"loss": found}))

    @contextmanager
    def _shown(self) -> Iterator[None]:
        modes = [(each, each.training) for each in self.module.modules()]
        self.module.eval()
        self.show()
        try:
            yield
        finally:
            for each, training in modes:
                each.training = training
            for optimizer in self.of_two_modes:
                optimizer.train()

    def show(self) -> None:
        """What optimizers have the model be for whoever looks at it."""
        for optimizer in self.of_two_modes:
            optimizer.eval()

    def seed(self, value: int) -> None:
        """Whatever the loop draws from."""
        torch.default_generator.manual_seed(value)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(value)
        random.seed(value)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(value & 0xFFFFFFFF)

    # -- inside: what all processes have alike ------------------------------------------------------------------------

    def _described(self) -> dict[str, Any]:
        """What all processes have alike: shapes and kinds of numbers, what is frozen, how optimizers begin."""
        frozen = {name: digest_of(self.read(each.detach())) for name, each in self.constants.items()}
        return {
            "parameters": {name: _said(p) for name, p in self.parameters.items()},
            "buffers": {name: _said(each) for name, each in self.buffers.items()},
            "names": self._names(),
            "frozen": frozen,
            "first": {name: digest_of(self.read(p.detach())) for name, p in self.parameters.items()},
            "beside": self.beside()[0],
            "of_two_modes": [name_of(each) for each in self.of_two_modes],
        }

    def _names(self) -> dict[str, str]:
        """Of what a state dict holds, by which name each tensor is exchanged: tied ones have several."""
        mine = {id(each): name for name, each in {**self.parameters, **self.buffers, **self.counters}.items()}
        there = self.module.state_dict(keep_vars=True)
        return {name: mine[id(each)] for name, each in there.items() if id(each) in mine}

    # -- inside: otherwise where several ranks have parts of tensors ------------------------------------------------

    def write(self, into: Tensor, values: Tensor) -> None:
        into.data.copy_(values)

    def spread(self, owner: Any, state: Any) -> Any:
        """A state as this rank's optimizer has it."""
        return state

    def _flat(self, named: Mapping[str, Tensor]) -> Tensor:
        parts = [self.read(each.detach()).float().flatten().cpu() for each in named.values()]
        return torch.cat(parts) if parts else torch.empty(0)


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Without what DDP and torch.compile put around it: names of tensors are the user's own."""
    while inner := getattr(model, "_orig_mod", None) or (
        model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else None
    ):
        model = inner
    return model


def check(parameters: Mapping[str, Tensor], learning: Sequence[Any]) -> None:
    """Complain of what cannot be trained together."""
    if not parameters:
        raise UserError("the model has nothing that learns: no parameter requires a gradient")
    for name, each in parameters.items():
        if not each.is_floating_point():
            raise UserError(f"parameter {name} is of {each.dtype}: only floating-point numbers can be averaged")
    if not learning:
        raise UserError("no optimizer was given: join(settings, model, optimizer)")
    mine, held = {id(each) for each in parameters.values()}, set[int]()
    for each in learning:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise UserError(f"{name_of(each)} has no state_dict and load_state_dict: what it remembers cannot go along")
        groups = getattr(each, "param_groups", ())
        ours = {id(p) for group in groups for p in group["params"]}
        if groups and not ours & mine:
            raise UserError(f"{name_of(each)} has no parameter of this model: was it made for another one?")
        if trains(each) is False:
            raise UserError(f"{name_of(each)} is not in train mode: call its train() before join")
        held |= ours
    if left := [name for name, each in parameters.items() if id(each) not in held]:
        raise UserError(
            f"parameter {left[0]} is in no optimizer ({len(left)} of {len(parameters)}): give it to one, or "
            "requires_grad_(False)"
        )


def trains(owner: Any) -> bool | None:
    """Whether an optimizer is in its train mode; nothing where it has none."""
    modes = [bool(group["train_mode"]) for group in getattr(owner, "param_groups", ()) if "train_mode" in group]
    return all(modes) if modes else None


def name_of(owner: Any) -> str:
    return type(owner).__name__


def digest_of(tensor: Tensor) -> str:
    """Of its numbers, whatever their kind."""
    return hashlib.sha256(bytes_of(tensor.cpu().contiguous().flatten())).hexdigest()[:16]


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """As plain numbers."""
    return {name: float(value.detach() if torch.is_tensor(value) else value) for name, value in values.items()}


def finite(found: dict[str, float]) -> dict[str, float]:
    if bad := [name for name, value in found.items() if value != value or abs(value) == float("inf")]:
        raise NotFinite(f"{bad[0]} is {found[bad[0]]}")
    return found


def _said(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

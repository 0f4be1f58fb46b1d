"""The cross entropy of next tokens. Where tokens times words would be large, the logits are never there all at once:
the last hidden states are compared with the vocabulary a few rows at a time."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear, log_softmax
from transformers import PreTrainedModel

from train import kernels
from train.verdicts import works

MOST = 1 << 28  # numbers that a batch's answers may have and be asked for whole: a gigabyte of fp32
IGNORE_INDEX = -100  # in a token's place, where nothing counts
PART = 1 << 27  # numbers beyond that: few enough for memory, enough to keep a device busy

Model = Callable[..., Any]  # answers with logits


@dataclass(frozen=True)
class ModelForward:
    """The forward pass of a model: in a precision, compiled, or shared by several ranks."""

    module: Any
    run: Model
    device: torch.device
    dtype: torch.dtype | None = None

    def __call__(self, **asked: Any) -> Any:
        with self._precision(), self._told("position_ids" in asked and "text_bounds" not in asked):
            return self.run(**asked)

    def _told(self, packed: bool) -> AbstractContextManager[Any]:
        """A CPU looks for itself: where a row has one text, it needs no mask."""
        there = self.device.type == "cuda"
        return kernels.told_where_texts_begin(packed) if there else contextlib.nullcontext()

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype) if self.dtype else contextlib.nullcontext()


def token_nll(model: Model, wanted: Tensor, **asked: Any) -> Tensor:
    """Of each token that is wanted behind one of those that are asked; zero where none is."""
    if head := _bare_head(model, wanted):
        return head.said(model, asked, lambda *pair: compared(*_flat(pair, wanted)))
    return cross_entropy(_whole(model, wanted, asked), wanted.flatten(), ignore_index=IGNORE_INDEX, reduction="none")


def summed_nll(model: Model, wanted: Tensor, z: float = 0.0, **asked: Any) -> Tensor:
    """Their sum, and `z` times the sum of their logits' squared logarithmic sums of exponentials. Whatever it is made
    to count, its gradient counts as much: it is there as soon as the sum is."""
    if head := _bare_head(model, wanted):
        return head.said(model, asked, lambda *pair: summed(*_flat(pair, wanted), z))
    return token_nll(model, wanted, **asked).sum()


def mean_nll(model: Model, wanted: Tensor, z: float = 0.0, **asked: Any) -> Tensor:
    """Of all tokens, each wanted."""
    if _bare_head(model, wanted):
        return summed_nll(model, wanted, z, **asked) / wanted.numel()
    logits = _whole(model, wanted, asked)
    loss = cross_entropy(logits, wanted.flatten())
    return loss + z * logits.logsumexp(-1).square().mean() if z else loss


def _whole(model: Model, wanted: Tensor, asked: dict[str, Any]) -> Tensor:
    logits: Tensor = model(**asked).logits
    return logits[:, : wanted.shape[1]].float().flatten(0, 1)


def _flat(pair: tuple[Tensor, Tensor], wanted: Tensor) -> tuple[Tensor, Tensor, Tensor, torch.dtype]:
    """Hidden states, a row a token; the head's weight; the words; and what they are multiplied in."""
    hidden, kind = pair[0][:, : wanted.shape[1]].flatten(0, 1), pair[0].device.type
    narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return hidden, pair[1], wanted.flatten(), narrow


# -- the head of a model -----------------------------------------------------------------------------------------------


class _Head:
    """A model's head, of which something else can be asked than all logits, of the hidden states that it is given and
    of its weight: here, where the weight is whole, however many ranks share it."""

    def __init__(self, head: torch.nn.Linear) -> None:
        self.layer = head
        self._instead: Callable[[Tensor, Tensor], Tensor] | None = None
        self._hidden: Tensor | None = None
        head.register_forward_pre_hook(self._before)
        head.register_forward_hook(self._after)

    def said(self, model: Model, asked: dict[str, Any], instead: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        self._instead = instead
        try:
            said: Tensor = model(**asked).logits
            return said
        finally:
            self._instead = self._hidden = None

    def _before(self, head: torch.nn.Linear, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self._instead is None:
            return given
        (self._hidden,) = given
        return (given[0][:, :1],)

    def _after(self, head: torch.nn.Linear, given: Any, logits: Tensor) -> Tensor:
        if self._instead is None or self._hidden is None:
            return logits
        return self._instead(self._hidden, head.weight)


_KNOWN: WeakKeyDictionary[PreTrainedModel, _Head | None] = WeakKeyDictionary()


def try_out(module: Any) -> None:
    """Find out whether a model says what its head says; once, and where several ranks share it, all together."""
    model = _unwrapped(module)
    if isinstance(model, PreTrainedModel) and model not in _KNOWN:
        head = head_of(model)
        _KNOWN[model] = _tried(model, head) if head else None


def may_be_large(module: Any, tokens: int) -> bool:
    """Whether so many tokens' logits are more than a batch may be asked for whole."""
    head = head_of(module)
    return head is not None and tokens * head.out_features > MOST


def head_of(module: Any) -> torch.nn.Linear | None:
    """What compares hidden states with the vocabulary, if that is all that it does."""
    model = _unwrapped(module)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return head if type(head) is torch.nn.Linear and head.bias is None else None


def _unwrapped(module: Any) -> Any:
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _bare_head(model: Model, wanted: Tensor) -> _Head | None:
    """Where a batch is too large to be asked whole, and the model need not be."""
    module = model.module if isinstance(model, ModelForward) else model
    head = head_of(module)
    if head is None or wanted.numel() * head.out_features <= MOST:
        return None
    try_out(module)
    known = _KNOWN[_unwrapped(module)]
    return known if known and known.layer is head else None  # a model may have been given another one


def _tried(model: PreTrainedModel, layer: torch.nn.Linear) -> _Head | None:
    """Some models do more with their logits: they bound them, or scale them."""
    head, training, tokens = _Head(layer), model.training, torch.arange(8, device=model.device)[None]
    logits = (torch.arange(8 * layer.out_features, device=model.device) % 199 - 99).float().view(1, 8, -1)

    def unchanged() -> bool:
        asked = {"input_ids": tokens % layer.out_features, "use_cache": False}
        return torch.equal(head.said(model, asked, lambda hidden, weight: logits.to(hidden.dtype)).float(), logits)

    model.eval()
    try:
        with torch.no_grad():
            return head if works(unchanged) else None
    finally:
        model.train(training)


# -- a few rows at a time ----------------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def compared(hidden: Tensor, weight: Tensor, wanted: Tensor, dtype: torch.dtype) -> Tensor:
    """Nats of the word that each row wants, multiplied in this dtype; compared again on the way back. No compiler may
    see all rows at once, and give them back the memory that they are to save."""
    found: Tensor = _Compared.apply(hidden, weight, wanted, dtype)  # type: ignore[no-untyped-call]
    return found


@torch.compiler.disable  # type: ignore[untyped-decorator]
def summed(hidden: Tensor, weight: Tensor, wanted: Tensor, dtype: torch.dtype, z: float = 0.0) -> Tensor:
    """The sum over all rows; with `z` times their squared logarithmic sums of exponentials, compared once."""
    found: Tensor
    if torch.is_grad_enabled():
        found = _Summed.apply(hidden, weight, wanted, dtype, z)  # type: ignore[no-untyped-call]
    else:
        found = compared(hidden, weight, wanted, dtype).sum()
    return found


class _Compared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight, wanted)
        ctx.dtype = dtype
        narrow = weight.to(dtype)
        return torch.cat([_beside(place, hidden, narrow, wanted).nats for place in _places(hidden, weight)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, counts: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, wanted = ctx.saved_tensors
        slopes, narrow = _Slopes(hidden, weight, ctx.needs_input_grad[1]), weight.to(ctx.dtype)
        for place in _places(hidden, weight):
            slopes.add(_beside(place, hidden, narrow, wanted), counts[place])
        return slopes.of_hidden, slopes.of_weight, None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor, dtype: torch.dtype, z: float) -> Tensor:
        ctx.slopes = slopes = _Slopes(hidden, weight, ctx.needs_input_grad[1])
        total, narrow = hidden.new_zeros((), dtype=_wide(dtype)), weight.to(dtype)
        for place in _places(hidden, weight):
            each = _beside(place, hidden, narrow, wanted)
            total += each.nats.sum() + z * each.sums.square().sum()
            slopes.add(each, each.there.to(total.dtype), z)
            del each  # before there are more of them
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, count: Tensor) -> tuple[Tensor | None, ...]:
        slopes, ctx.slopes = ctx.slopes, None
        of_weight = None if slopes.of_weight is None else slopes.of_weight.mul_(count)
        return slopes.of_hidden.mul_(count), of_weight, None, None, None


@dataclass
class _Rows:
    """A few tokens beside the whole vocabulary."""

    place: slice
    hidden: Tensor
    weight: Tensor
    words: Tensor
    there: Tensor  # whether a word is wanted
    said: Tensor  # the logarithm of each word's probability
    nats: Tensor
    sums: Tensor  # the logarithm of the logits' sum of exponentials


def _places(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, PART // len(weight))
    return (slice(begin, begin + size) for begin in range(0, len(hidden), size))


def _beside(place: slice, hidden: Tensor, weight: Tensor, wanted: Tensor) -> _Rows:
    part, words, there = (
        hidden[place].to(weight.dtype),
        wanted[place].clamp(min=0)[:, None],
        wanted[place] != IGNORE_INDEX,
    )
    with torch.autocast(hidden.device.type, enabled=False):
        logits = linear(part, weight).to(_wide(weight.dtype))
    said = log_softmax(logits, -1)
    nats = -said.gather(1, words)[:, 0]
    sums = logits.gather(1, words)[:, 0] + nats
    return _Rows(place, part, weight, words, there, said, nats.where(there, 0), sums)


class _Slopes:
    """The gradient, with what the rows so far have in it."""

    def __init__(self, hidden: Tensor, weight: Tensor, learns: bool) -> None:
        self.of_hidden = torch.empty_like(hidden)
        self.of_weight = torch.zeros_like(weight) if learns else None

    def add(self, rows: _Rows, counts: Tensor, z: float = 0.0) -> None:
        """Of a row's nats, which count so many times, and of `z` times its squared sum."""
        found = rows.said.exp_()
        if z:
            found.mul_(1 + 2 * z * rows.sums[:, None])
        found[torch.arange(len(found), device=found.device), rows.words[:, 0]] -= 1
        found, counts = found.to(rows.weight.dtype), (counts * rows.there)[:, None]
        self.of_hidden[rows.place] = found @ rows.weight * counts
        if self.of_weight is None:
            return
        part = (rows.hidden * counts).to(found.dtype)
        if self.of_weight.dtype == found.dtype:
            self.of_weight.addmm_(found.T, part)
        else:
            self.of_weight += found.T @ part


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

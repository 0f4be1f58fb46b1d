"""Several examples in one row, so that little of a batch is filling. Each example sees itself only: where positions
begin again, transformers begins again too, in every kind of attention. Whether a model does so is tried out on it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fleet.run_config import UserError
from train.chat_examples import Example
from train.chunked_loss import Model, ModelForward
from train.kernels import MIXED, sent
from train.model import reach
from train.verdicts import works

_OPEN = 32  # rows that an example is tried in
_CLOSE = {torch.float32: 1e-5, torch.float64: 1e-5}  # of the largest answer; rounding is far below, a leak above
_ROUGH = 0.05  # of narrow numbers, whose leaks may be smaller than rounding is
_FILLING = -1
_NARROWEST = 32  # tokens
_BOUNDS, _TRIED = 16, 64
_BY_BOUNDS: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Batch:
    """Rows of tokens; all fields have the same shape."""

    tokens: Tensor
    positions: Tensor  # within the example
    learned: Tensor  # where a token counts that is to be predicted
    example: Tensor  # the number of the example that it belongs to, or -1
    examples: int  # how many were given numbers
    packed: bool  # whether a row may hold several
    bounds: Tensor | None = None  # where examples begin and end, all rows behind each other, for who attends by them

    @property
    def count(self) -> int:
        """Tokens that are learned."""
        return int(self.learned.sum())

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model is asked. What fills a row's end stands behind all that counts, and nobody looks ahead."""
        bounds = {} if self.bounds is None else {"text_bounds": self.bounds}
        return {"input_ids": self.tokens, **({"position_ids": self.positions, **bounds} if self.packed else {})}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        names = ("tokens", "positions", "learned", "example", *(() if self.bounds is None else ("bounds",)))
        there: dict[str, Any] = {name: sent(getattr(self, name), device, non_blocking) for name in names}
        return replace(self, **there)


def plan(lengths: Sequence[int], length: int, packed: bool = True) -> list[tuple[int, ...]]:
    """Which examples stand in which row, by their numbers: each in the first row that has room for it, of the last few
    that were begun. Without packing, each by itself."""
    rows: list[list[int]] = []
    room: list[int] = []
    for number, size in enumerate(lengths):
        if size > length:
            raise UserError(f"example {number} has {size} tokens, and a row {length}; cut examples at {length}")
        begin = max(0, len(rows) - _OPEN) if packed else len(rows)
        place = next((n for n in range(begin, len(rows)) if room[n] >= size), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(number)
        room[place] -= size
    return [tuple(row) for row in rows]


def batch(examples: Sequence[Example], rows: Rows, packed: bool = True) -> Batch:
    """These rows of a plan, as wide as the longest of them. In what fills the others, every token is alone."""
    width = max(sum(len(examples[number].tokens) for number in row) for row in rows)
    tokens, positions, example = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(3))
    learned = np.zeros((len(rows), width), dtype=np.bool_)
    example.fill(_FILLING)
    for y, row in enumerate(rows):
        x = 0
        for number in row:
            place = (y, slice(x, x := x + len(examples[number].tokens)))
            tokens[place], learned[place] = examples[number].tokens, examples[number].learned
            positions[place], example[place] = np.arange(len(examples[number].tokens)), number
    made = torch.from_numpy
    return Batch(made(tokens), made(positions), made(learned), made(example), len(examples), packed)


def chosen_rows(examples: Sequence[Example], rows: Rows, packed: bool) -> Batch:
    """A batch knows its own examples only, which are numbered anew."""
    anew = count()
    return batch([examples[n] for row in rows for n in row], [[next(anew) for _ in row] for row in rows], packed)


def one_of_few(width: int, most: int, device: torch.device) -> int:
    """At least as wide, if that is not beyond the most: on a GPU two widths to an octave, since cuDNN and compilers
    make something new for each that they meet."""
    step = max(_NARROWEST, 1 << max(0, (width - 1).bit_length() - 2))
    return max(width, min(most, math.ceil(width / step) * step)) if device.type == "cuda" else width


def widened(batch: Batch, most: int, device: torch.device) -> Batch:
    """With as much more filling."""
    more = one_of_few(width := batch.tokens.shape[1], most, device) - width
    filling = {"tokens": 0, "positions": 0, "learned": False, "example": _FILLING}
    wide: dict[str, Any] = {name: pad(getattr(batch, name), (0, more), value=it) for name, it in filling.items()}
    return replace(batch, **wide)


def bounded(batch: Batch) -> Batch:
    """With where its examples, and the filling of each row, begin and end. Of a few counts, as with widths: what is
    behind the last one is empty."""
    begins = torch.ones_like(batch.example, dtype=torch.bool)
    begins[:, 1:] = batch.example.diff() != 0
    (places,) = begins.flatten().nonzero(as_tuple=True)
    more = -len(places) % _BOUNDS + 1
    return replace(batch, bounds=pad(places, (0, more), value=begins.numel()).to(torch.int32))


def single(examples: Sequence[Example]) -> Batch:
    """Each in a row of its own."""
    return batch(examples, [(number,) for number in range(len(examples))], packed=False)


def can_pack(model: Any, length: int) -> bool:
    """Ask a model in both ways. Recurrent states go on where another example begins, and some models have positions of
    their own: they say something else, or what stands before changes what they say."""
    return _tried(model, model, length)


def attends_by_bounds(forward: ModelForward, width: int) -> bool:
    """Whether a model that can be packed needs no mask for it. Flash attention of several texts knows neither fp32 nor
    dropout nor layers that see less, and some models do not hand on where texts begin."""
    module, narrow = forward.module, forward.dtype or forward.module.dtype
    if forward.device.type != "cuda" or narrow not in MIXED.values() or reach(module.config, width) < width:
        return False
    if module not in _BY_BOUNDS:  # asked anew for each step of a training
        _BY_BOUNDS[module] = _tried(module, replace(forward, run=module), min(_TRIED, width), bounded, training=True)
    return _BY_BOUNDS[module]


def telling_apart(forward: ModelForward, batches: Sequence[Batch]) -> Callable[[Batch], Batch]:
    """How a model tells these rows' examples apart: by their bounds, where it needs no mask, else as they are."""
    widths = [each.tokens.shape[1] for each in batches if each.packed]
    bounds = bool(widths) and attends_by_bounds(forward, max(widths))
    return lambda batch: bounded(batch) if bounds and batch.packed else batch


@torch.no_grad()
def _tried(
    module: Any, model: Model, length: int, also: Callable[[Batch], Batch] = lambda batch: batch, training: bool = False
) -> bool:
    """As it is while it trains, or not."""

    def logits(asked: Batch) -> Tensor:
        found: Tensor = model(**also(asked).to(module.device).inputs, use_cache=False).logits
        return found

    before, words = module.training, int(module.config.get_text_config().vocab_size)
    module.train(training)
    try:
        return works(lambda: _alike(logits, words, max(8, length)))
    finally:
        module.train(before)


def _alike(logits: Callable[[Batch], Tensor], words: int, length: int) -> bool:
    """Of two rows of two examples; the fifth is another one in the place of the first."""
    rng, first = np.random.default_rng(1), length // 3
    sizes = (first, length - first, length - first, first, first)
    tokens = (rng.integers(0, words, size).astype(np.int32) for size in sizes)
    examples = [Example(each, np.ones(len(each), dtype=np.bool_)) for each in tokens]
    rows: Rows = [(0, 1), (2, 3)]

    def said(rows: Rows, packed: bool) -> Tensor:
        return logits(batch(examples, rows, packed))

    together = said(rows, True)
    after_another, largest = said([(4, 1), rows[1]], True)[0, len(examples[0].tokens) :], together.abs().max()
    # a GPU may round otherwise where a mixture's experts are asked for other tokens beside these
    if (after_another - together[0, len(examples[0].tokens) :]).abs().max() > _CLOSE.get(together.dtype, 0.0) * largest:
        return False
    close = _CLOSE.get(together.dtype, _ROUGH) * largest
    alone = torch.stack([torch.cat([said([(number,)], False)[0] for number in row]) for row in rows])
    return bool((together - alone).abs().max() <= close)

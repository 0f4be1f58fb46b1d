"""A model that lm-eval asks: it says what HFLM says, and spends its time in the model.

Texts are made tokens once, not once a model. Continuations of one context share it: context and all continuations are
one row, in which a continuation sees the context and itself, but not the others. Only tokens that are asked for are
compared with the vocabulary. Whether a model can be asked in this way is tried out on it; others are asked one
continuation a row.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from train.chunked_loss import MOST
from train.model import reach
from train.packing import one_of_few
from train.verdicts import works

_TOKENS = {"cpu": 1024, "cuda": 32768}  # of a batch, where nobody says how many it has, or how many requests
LikelihoodRequest = tuple[Any, list[int], list[int]]  # lm-eval's: the texts, the context's tokens, the continuation's


@dataclass(frozen=True)
class PackedRow:
    """A context with its continuations, which may be several or one."""

    context: list[int]
    continuations: list[list[int]]
    places: list[int]  # which requests they are

    @property
    def packed(self) -> bool:
        """Whether several continuations stand in it; of those of one token nothing does."""
        return sum(len(each) > 1 for each in self.continuations) > 1

    @property
    def tokens(self) -> list[int]:
        """What the model reads: nobody asks what comes after a continuation's last token."""
        return self.context + [token for each in self.continuations for token in each[:-1]]

    def ends(self) -> Iterator[tuple[int, int]]:
        """Where each continuation's tokens begin and end in the row."""
        begin = len(self.context)
        for each in self.continuations:
            yield begin, begin + len(each) - 1
            begin += len(each) - 1


class PackedHFLM(HFLM):  # type: ignore[misc]
    """HFLM with its log-likelihoods computed in another way; the rest is HFLM's."""

    def __init__(self, model: Any, tokenizer: Any, batch_size: int | None = None, tokens: int = 0) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size or 8)
        self._encode_pair = cache(super()._encode_pair)  # texts are made tokens once
        self._most, self._tokens = batch_size, tokens
        self.shares = True  # contexts
        self._tried = False

    def ask(self, model: Any) -> None:
        """Another model of the same kind and tokenizer; none, to let go of the last one."""
        self._model = model

    def _loglikelihood_tokens(self, requests: Sequence[LikelihoodRequest], **more: Any) -> list[tuple[float, bool]]:
        if self.backend != "causal" or not requests:
            return super()._loglikelihood_tokens(requests, **more)  # type: ignore[no-any-return]
        if not self._tried:
            self._try(requests)
        rows = _rows(requests, self._reach() if self.shares else 0, int(self.max_length))
        found = dict[int, tuple[float, bool]]()
        for batch in self._batches(rows):
            for row, answers in zip(batch, self._answers(batch), strict=True):
                found |= zip(row.places, answers, strict=True)
        return [found[place] for place in range(len(requests))]

    def _batches(self, rows: Sequence[PackedRow]) -> Iterator[list[PackedRow]]:
        """Rows of about the same length, the longest first: if memory does not suffice, it is known at once."""
        most = self._tokens or _TOKENS.get(self.device.type, _TOKENS["cuda"])
        most = min(most, MOST // int(self.model.config.get_text_config().vocab_size))
        batch: list[PackedRow] = []
        for row in sorted(rows, key=lambda row: (row.packed, -len(row.tokens), row.tokens)):
            if self._most:
                full = sum(len(each.places) for each in batch) + len(row.places) > self._most
            else:
                full = (len(batch) + 1) * len((batch or [row])[0].tokens) > most
            if batch and (full or row.packed != batch[0].packed):
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch

    @torch.inference_mode()
    def _answers(self, batch: list[PackedRow]) -> list[list[tuple[float, bool]]]:
        width = one_of_few(max(len(row.tokens) for row in batch), int(self.max_length), self.device)
        tokens = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in batch], device=self.device)
        more: dict[str, Any] = {}
        if batch[0].packed:
            seen, places = (each.to(tokens.device) for each in _seen(batch, width))
            least = torch.finfo(self.model.dtype).min
            mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=tokens.device).masked_fill_(~seen, least)
            more = {"attention_mask": mask, "position_ids": places}
        first = min(len(row.context) for row in batch) - 1
        can_keep = "logits_to_keep" in inspect.signature(type(self.model).forward).parameters
        kept = width - first if can_keep else width
        if kept < width:
            more["logits_to_keep"] = kept
        logits = self.model(tokens, use_cache=False, **more).logits
        return [list(_of_row(row, each, width - kept)) for row, each in zip(batch, logits, strict=True)]

    def _try(self, requests: Sequence[LikelihoodRequest]) -> None:
        """Ask one question in both ways; where they differ by more than rounding, contexts are not shared."""
        rows = [row for row in _rows(requests, self._reach(), int(self.max_length)) if row.packed]
        if not rows:
            return
        longest = max(rows, key=lambda row: len(row.tokens))
        alone = [PackedRow(longest.context, [each], [n]) for n, each in enumerate(longest.continuations)]
        wanted = [answer for (answer,) in self._answers(alone)]
        wide = self.model.dtype == torch.float32 and not torch.is_autocast_enabled(self.device.type)
        close = 1e-3 if wide else 0.05

        def alike() -> bool:
            pairs = zip(self._answers([longest])[0], wanted, strict=True)
            return all(abs(a - b) <= close * max(1, abs(b)) for (a, _), (b, _) in pairs)

        self.shares, self._tried = works(alike), True

    def _reach(self) -> int:
        """A mask of one's own would let some layers see farther than theirs."""
        return reach(self.model.config, int(self.max_length))


def _rows(requests: Sequence[LikelihoodRequest], reach: int, most: int) -> list[PackedRow]:
    """Continuations of one context together, as far as they fit. What does not fit the model by itself loses tokens at
    its left, as in lm-eval."""
    open_rows: dict[tuple[int, ...], PackedRow] = {}
    rows: list[PackedRow] = []
    for place, (_, context, continuation) in enumerate(requests):
        surplus = max(0, len(context) + len(continuation) - most - 1)
        row = open_rows.get(tuple(context))
        if row is None or surplus or len(row.tokens) + len(continuation) - 1 > reach:
            row = PackedRow(context[surplus:], [], [])
            rows.append(row)
            if not surplus:
                open_rows[tuple(context)] = row
        row.continuations.append(continuation)
        row.places.append(place)
    return rows


def _of_row(row: PackedRow, logits: Tensor, cut: int) -> Iterator[tuple[float, bool]]:
    """The sum of a continuation's log-probabilities, and whether each of its tokens is the likeliest."""
    last = len(row.context) - 1
    for (begin, end), tokens in zip(row.ends(), row.continuations, strict=True):
        said = torch.cat([logits[last - cut : last + 1 - cut], logits[begin - cut : end - cut]])
        wanted = torch.tensor(tokens, device=logits.device)[:, None]
        chosen = F.log_softmax(said, dim=-1, dtype=torch.float32).gather(1, wanted)
        likely = bool((said.gather(1, wanted) >= said.amax(-1, keepdim=True)).all())  # quicker than to look where
        yield float(chosen.sum()), likely and bool((said.argmax(-1, keepdim=True) == wanted).all())


def _seen(batch: Sequence[PackedRow], width: int) -> tuple[Tensor, Tensor]:
    """Which tokens each token sees, the context and its own continuation before it; and the places of all tokens."""
    mask = torch.ones(width, width, dtype=torch.bool).tril().repeat(len(batch), 1, 1, 1)
    places = torch.arange(width).repeat(len(batch), 1)
    for seen, place, row in zip(mask, places, batch, strict=True):
        for begin, end in row.ends():
            seen[0, begin:end, len(row.context) : begin] = False
            place[begin:end] -= begin - len(row.context)
    return mask, places

"""How well a model predicts pieces of text, each by itself: the same pieces for all, whatever their tokens are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fleet.run_config import UserError
from train.chunked_loss import MOST, token_nll

_TOKENS = {"cpu": 2048, "cuda": 32768}  # of a batch
_LONGEST = 4096  # tokens that are read at a time where a model says nothing about it


@dataclass(frozen=True)
class Losses:
    """Of each passage, or of several together: nats, tokens that were predicted, their bytes; nothing of one that is a
    single token."""

    nats: tuple[float, ...]
    tokens: tuple[int, ...]
    bytes: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        return math.exp(min(700.0, sum(self.nats) / sum(self.tokens)))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between models of different tokens."""
        return sum(self.nats) / math.log(2) / sum(self.bytes)

    def together(self, group: Sequence[int]) -> "Losses":
        """Of all passages of a group as one: neighbours say the same of a model, and are no independent samples."""
        sums = {each: [0.0, 0, 0] for each in sorted({*group})}
        for each, *numbers in zip(group, self.nats, self.tokens, self.bytes, strict=True):
            sums[each] = [a + b for a, b in zip(sums[each], numbers, strict=True)]
        nats, tokens, bytes = zip(*sums.values(), strict=True)
        return Losses(nats, tokens, bytes)


class PassageReader:
    """Passages as a tokenizer's tokens, made once, read by many models."""

    def __init__(self, tokenizer: Any, passages: Sequence[str], longest: int | None = None, batch: int = 0) -> None:
        self.passages, self.batch = passages, batch
        self._longest = max(2, min(longest or _LONGEST, _LONGEST))
        said = tokenizer(list(passages), verbose=False, return_offsets_mapping=True)
        tokens, places = said["input_ids"], said["offset_mapping"]
        there = zip(passages, places, strict=True)  # what the first token stands for is predicted by nothing
        self._sizes = tuple(len(text[each[0][1] :].encode()) if len(each) > 1 else 0 for text, each in there)
        if not any(self._sizes):
            raise UserError("no passage of the text has two tokens: there is nothing to predict")
        self._pieces = [(n, piece) for n, each in enumerate(tokens) for piece in self._cut(each)]
        self._pieces.sort(key=lambda each: (-len(each[1]), each[0]))  # rows of a batch are about equally long

    def losses(self, model: Any) -> Losses:
        nats, counts = [0.0] * len(self.passages), [0] * len(self.passages)
        with torch.inference_mode():
            for rows in self._batches(model):
                for (n, piece), loss in zip(rows, _losses(model, [piece for _, piece in rows]), strict=True):
                    nats[n], counts[n] = nats[n] + loss, counts[n] + len(piece) - 1
        if not all(map(math.isfinite, nats)):
            raise UserError("the loss on a passage of the text is not finite")
        return Losses(tuple(nats), tuple(counts), self._sizes)

    def _cut(self, tokens: list[int]) -> list[list[int]]:
        """Each piece begins with the last token of the one before."""
        step = self._longest - 1
        return [tokens[begin : begin + self._longest] for begin in range(0, len(tokens) - 1, step)]

    def _batches(self, model: Any) -> list[list[tuple[int, list[int]]]]:
        most = self.batch or _TOKENS.get(model.device.type, _TOKENS["cpu"])
        most = min(most, MOST // max(1, int(getattr(model.config, "vocab_size", 1) or 1)))
        found: list[list[tuple[int, list[int]]]] = []
        for piece in self._pieces:
            if not found or (len(found[-1]) + 1) * len(found[-1][0][1]) > most:
                found.append([])
            found[-1].append(piece)
        return found


def _losses(model: Any, rows: Sequence[list[int]]) -> list[float]:
    """What stands behind a row's end has no effect on it: nobody looks ahead."""
    wide = max(map(len, rows))
    tokens = torch.tensor([[*row, *[row[-1]] * (wide - len(row))] for row in rows], device=model.device)
    nats = token_nll(model, tokens[:, 1:], input_ids=tokens[:, :-1], use_cache=False).view(len(rows), -1)
    return [float(each[: len(row) - 1].double().sum()) for each, row in zip(nats, rows, strict=True)]


def mean_and_error(losses: Losses) -> tuple[float, float]:
    """Nats a token, and their standard error over the passages, or over what they are together."""
    mean, count = sum(losses.nats) / sum(losses.tokens), len(losses.nats)
    off = sum((nats - mean * tokens) ** 2 for nats, tokens in zip(losses.nats, losses.tokens, strict=True))
    return mean, math.sqrt(off * count / max(1, count - 1)) / sum(losses.tokens)


def as_metrics(losses: Losses) -> Mapping[str, Any]:
    mean, error = mean_and_error(losses)
    return {"perplexity": losses.perplexity, "error": error, "nats": mean}

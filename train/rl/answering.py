"""A model's own answers, batched, each drawn by numbers of its own: whoever else is in a batch has no part in them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from fleet.run_config import UserError
from train.chat_examples import ChatWriter
from train.rl.checkers import Said

_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15)  # of splitmix64, and the golden ratio
_BITS = 23  # of a draw: so many as fp32 tells apart
Prompt = Sequence[int]  # tokens


@dataclass(frozen=True)
class Asking:
    """How a model answers. Of a temperature of 0 it says what is likeliest."""

    temperature: float
    longest: int  # tokens of an answer
    ends: tuple[int, ...]
    tokens: int  # of a batch, questions and answers


def ends_of(tokenizer: Any, config: Any, more: Any = None) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's own, those of the configuration and more that the model's folder
    names, and the chat template's mark."""
    found = [tokenizer.eos_token_id]
    for said in (getattr(config, "eos_token_id", None), more, ChatWriter(tokenizer).end):
        found += said if isinstance(said, (list, tuple)) else [said]
    if not (ends := tuple(dict.fromkeys(each for each in found if isinstance(each, int)))):
        raise UserError("the tokenizer has no end token, so that no answer would ever end; give it an eos_token")
    return ends


def batches(prompts: Sequence[Prompt], how: Asking) -> Iterator[range]:
    """Neighbours that are answered together: as many as have room, and one at least."""
    begin = 0
    while begin < len(prompts):
        end, width = begin, 0
        while end < len(prompts):
            width = max(width, len(prompts[end]))
            if end > begin and (end + 1 - begin) * (width + how.longest) > how.tokens:
                break
            end += 1
        yield range(begin, end)
        begin = end


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: Sequence[Prompt], seeds: Sequence[int], how: Asking) -> list[Said]:
    """To prompts of one batch."""
    device, width = model.device, max(map(len, prompts))
    rows = [[how.ends[0]] * (width - len(each)) + list(each) for each in prompts]
    there = [[0] * (width - len(each)) + [1] * len(each) for each in prompts]
    draw = _Draw(torch.tensor(seeds, dtype=torch.int64, device=device), how.temperature, width)
    config = GenerationConfig(
        max_new_tokens=how.longest,
        eos_token_id=list(how.ends),
        pad_token_id=how.ends[0],
        do_sample=False,
        use_cache=True,
    )
    found = model.generate(
        input_ids=torch.tensor(rows, device=device),
        attention_mask=torch.tensor(there, device=device),
        generation_config=config,
        logits_processor=LogitsProcessorList([draw]),
    )
    pairs = zip(found[:, width:].tolist(), draw.logprobs().tolist(), strict=True)
    return [_said(tokenizer, how.ends, tokens, logprobs) for tokens, logprobs in pairs]


class _Draw(LogitsProcessor):
    """Draws each next token, and leaves transformers no choice: its own draws are of all rows together."""

    def __init__(self, seeds: Tensor, temperature: float, width: int) -> None:
        self._seeds, self._temperature, self._width = seeds, temperature, width
        self._found = list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logprobs = torch.log_softmax(scores.float() / (self._temperature or 1.0), -1)
        step = input_ids.shape[1] - self._width
        drawn = logprobs + gumbel(self._seeds, step, scores.shape[-1]) if self._temperature else logprobs
        chosen = drawn.argmax(-1, keepdim=True)
        self._found.append(logprobs.gather(1, chosen))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def logprobs(self) -> Tensor:
        return torch.cat(self._found, 1)


def gumbel(seeds: Tensor, step: int, words: int) -> Tensor:
    """Noise that makes the largest a draw: of each seed, step and word its own."""
    counter = torch.arange(words, dtype=torch.int64, device=seeds.device) + step * words + 1
    bits = _mixed(seeds[:, None] + counter * _signed(_MIX[2]))
    uniform = ((bits >> (64 - _BITS)) & ((1 << _BITS) - 1)).float().add_(0.5).div_(1 << _BITS)
    return -torch.log(-torch.log(uniform))


def _mixed(x: Tensor) -> Tensor:
    """splitmix64, whose shifts fill with zeros."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def seed_of(*key: int) -> int:
    """Of one answer: where in a run it is given."""
    return int(np.random.SeedSequence([*key]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _said(tokenizer: Any, ends: Sequence[int], tokens: list[int], logprobs: list[float]) -> Said:
    """Up to the token that ends it."""
    end = next((n + 1 for n, token in enumerate(tokens) if token in ends), 0)
    kept = tokens[:end] if end else tokens
    text = cast(str, tokenizer.decode(kept, skip_special_tokens=True))
    return Said(text, kept, [round(x, 6) for x in logprobs[: len(kept)]], bool(end))

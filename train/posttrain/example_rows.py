"""Rows to learn from as tokens in one file: written once, mapped by whoever learns from them."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from transformers import PreTrainedTokenizerBase

from fleet.config import UserError
from train import text
from train.chat import ChatExamples, Example
from train.objectives import objective_of
from train.posttrain.posttrain_config import DatasetSource, PosttrainConfig
from train.skills import PREFIX
from train.skills import rows as skill_rows
from train.tasks import validation_count

_HELD = 10  # about one row of so many is never learned from
_BUFFER = 10_000  # rows of a hub's data set that are shuffled at a time
_LOOK = 100  # rows
_FEWEST = 2  # different rows that are held out, however few there are
_MOST = 1_000_000  # rows of one data set that a run keeps


@dataclass(frozen=True)
class ExampleRows:
    """Each row is one example, or two: the better answer, then the worse."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.uint8]
    ends: NDArray[np.int64]  # where each example ends
    each: int  # examples of a row
    held: int  # so many rows, the last ones, are never learned from

    @classmethod
    def open(cls, path: Path) -> "ExampleRows":
        there = load_file(path)
        return cls(there["tokens"], there["learned"], there["ends"], int(there["each"][0]), int(there["held"][0]))

    @property
    def train(self) -> int:
        return len(self.ends) // self.each - self.held

    def get(self, number: int, held: bool = False) -> list[Example]:
        row = number + (self.train if held else 0)
        return [self._example(n) for n in range(row * self.each, (row + 1) * self.each)]

    def _example(self, n: int) -> Example:
        begin, end = int(self.ends[n - 1]) if n else 0, int(self.ends[n])
        return Example(self.tokens[begin:end], self.learned[begin:end].astype(bool))


def written(made: Sequence[Sequence[Example]], held: int) -> bytes:
    """Rows as a file, of which the last ones are held out."""
    examples = [example for row in made for example in row]
    return save(
        {
            "tokens": np.concatenate([example.tokens for example in examples]).astype(np.int32),
            "learned": np.concatenate([example.learned for example in examples]).astype(np.uint8),
            "ends": np.cumsum([len(example.tokens) for example in examples]).astype(np.int64),
            "each": np.array([len(made[0])], dtype=np.int64),
            "held": np.array([held], dtype=np.int64),
        }
    )


def tokenised(c: PosttrainConfig, source: DatasetSource, tokenizer: PreTrainedTokenizerBase) -> ChatExamples:
    """As many rows as the run can make use of."""
    return _learnable(c, source, _drawn(c, source), tokenizer)


def _learnable(
    c: PosttrainConfig, source: DatasetSource, there: list[text.Row], tokenizer: PreTrainedTokenizerBase
) -> ChatExamples:
    made = objective_of(c).examples(there, tokenizer, c.seq_length, source.source)
    if len(made.kept) < 2:
        lost = f" ({made.empty} were left out: no answer in them, or none in their first {c.seq_length} tokens)"
        few = f"{len(made.kept)} rows have something to learn{lost if made.empty else ''}"
        raise UserError(f"data set {source.source}: {few}; at least 2 are needed")
    return made


def parted(
    c: PosttrainConfig, source: DatasetSource, kept: Sequence[Sequence[Example]]
) -> tuple[list[Sequence[Example]], int]:
    """Rows to learn from, then those that are held out, and how many these are. What is in a row decides, so that
    wherever the same row stands, be it in another data set, it is on one side; unless a set is so small that hardly any
    would be held out."""
    marks = [_mark(row) for row in kept]
    limit = max((1 << 64) // _HELD, sorted({*marks})[min(_FEWEST, len({*marks})) - 1])
    held = [row for row, mark in zip(kept, marks, strict=True) if mark <= limit]
    learned = [row for row, mark in zip(kept, marks, strict=True) if mark > limit]
    if not learned:
        raise UserError(f"data set {source.source}: {len({*marks})} different rows are too few to hold some out")
    if c.asks_loss:
        validation_count(f"data set {source.source}, whose held-out rows are asked,", len(held), c.holdout)
    return [*learned, *held], len(held)


def _mark(row: Sequence[Example]) -> int:
    digest = hashlib.sha256(b"".join(example.tokens.tobytes() + b"/" for example in row)).digest()
    return int.from_bytes(digest[:8], "big")


def check_first_rows(c: PosttrainConfig, source: DatasetSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Before a run begins."""
    there = [*islice(_checked(c, source), _LOOK)]
    if not there:
        raise UserError(f"data set {source.source}: no rows in it")
    _learnable(c, source, there, tokenizer)


def wanted(c: PosttrainConfig) -> int:
    """With so many rows no child sees one twice in an epoch."""
    return min(_MOST, max(1000, 2 * c.sft_examples) + _HELD * c.questions)


def _drawn(c: PosttrainConfig, source: DatasetSource) -> list[text.Row]:
    """As many as are wanted, from anywhere in a file, in an order that the seed decides; of a hub's data set, which may
    be endless, from its beginning."""
    dice, kept, most = np.random.default_rng([c.seed, 11]), list[text.Row](), wanted(c)
    there = _checked(c, source)
    for n, row in enumerate(there if source.source.endswith(text.ROW_FILES) else islice(there, max(most, _BUFFER))):
        place = int(dice.integers(n + 1))  # each of those so far is as likely to be kept as any other
        if n < most:
            kept.append(row)
        elif place < most:
            kept[place] = row
    return [kept[int(n)] for n in dice.permutation(len(kept))]


def _checked(c: PosttrainConfig, source: DatasetSource) -> Iterator[text.Row]:
    check = objective_of(c).check
    if source.source.startswith(PREFIX):
        built_in = enumerate(skill_rows(source.source, c.seed, wanted(c)), 1)
        return (text.located(check, row, f"{source.source}, row {number}") for number, row in built_in)
    return text.read(source.source, source.name, source.split, check)

"""Rows to learn from as tokens in one file: written once, mapped by whoever learns from them."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save
from transformers import PreTrainedTokenizerBase

from fleet.plain import several
from fleet.run_config import UserError
from train import text_sources
from train.chat_examples import ChatExamples, Example
from train.objectives import objective_of
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import DatasetSource
from train.skills import PREFIX
from train.skills import rows as skill_rows
from train.splits import SPLITS, Split, SplitName, parts_of

HELD = 0.1  # the share of rows that is never learned from
_BUFFER = 10_000  # rows of a hub's data set that are shuffled at a time
_LOOK = 100  # rows
_MOST = 1_000_000  # rows of one data set that a run keeps


@dataclass(frozen=True)
class ExampleRows:
    """Each row is one example, or two: the better answer, then the worse."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.uint8]
    ends: NDArray[np.int64]  # where each example ends
    each: int  # examples of a row
    parts: Mapping[SplitName, range]  # the numbers of rows to learn from, for validation, for the test

    @classmethod
    def open(cls, path: Path) -> "ExampleRows":
        there = load_file(path)
        begins = [0, *np.cumsum(there["parts"]).tolist()]
        parts = {part: range(*begins[n : n + 2]) for n, part in enumerate(SPLITS)}
        return cls(there["tokens"], there["learned"], there["ends"], int(there["each"][0]), parts)

    def get(self, row: int) -> list[Example]:
        return [self._example(n) for n in range(row * self.each, (row + 1) * self.each)]

    def _example(self, n: int) -> Example:
        begin, end = int(self.ends[n - 1]) if n else 0, int(self.ends[n])
        return Example(self.tokens[begin:end], self.learned[begin:end].astype(bool))


def written(made: Sequence[Sequence[Example]], parts: Sequence[SplitName]) -> bytes:
    """Rows as a file, one part after the other."""
    pairs = [*zip(made, parts, strict=True)]
    examples = [example for part in SPLITS for row, its in pairs if its == part for example in row]
    return save(
        {
            "tokens": np.concatenate([example.tokens for example in examples]).astype(np.int32),
            "learned": np.concatenate([example.learned for example in examples]).astype(np.uint8),
            "ends": np.cumsum([len(example.tokens) for example in examples]).astype(np.int64),
            "each": np.array([len(made[0])], dtype=np.int64),
            "parts": np.array([parts.count(part) for part in SPLITS], dtype=np.int64),
        }
    )


def _learnable(
    c: PosttrainConfig, source: DatasetSource, there: list[text_sources.PlacedRow], tokenizer: PreTrainedTokenizerBase
) -> ChatExamples:
    made = objective_of(c).examples(there, tokenizer, c.seq_length)
    if len(made.kept) < 2:
        lost = f" ({made.empty} were left out: no answer in them, or none in their first {c.seq_length} tokens)"
        few = f"{several(len(made.kept), 'row')} with something to learn{lost if made.empty else ''}"
        raise UserError(f"data set {source.source}: {few}; at least 2 are needed")
    return made


def made_rows(
    c: PosttrainConfig, source: DatasetSource, tokenizer: PreTrainedTokenizerBase
) -> tuple[ChatExamples, list[SplitName], bytes]:
    """As many rows as the run can make use of, the parts that they belong to, and their file."""
    there = drawn(source, _checked(c, source), wanted(c), c.seed)
    made = _learnable(c, source, there, tokenizer)
    parts = _parts(c, source, [there[n][1] for n in made.rows])
    return made, parts, written(made.kept, parts)


def _parts(c: PosttrainConfig, source: DatasetSource, rows: Sequence[text_sources.Row]) -> list[SplitName]:
    return divided(f"data set {source.source}", rows, Split(HELD, HELD * c.holdout))


def divided(what: str, rows: Sequence[text_sources.Row], split: Split) -> list[SplitName]:
    """How a conversation begins decides, so that all its turns and its copies, be they in another data set, lie on one
    side. Where most begin alike, or few are there, all of a row decides."""
    with contextlib.suppress(UserError):
        found = parts_of(what, [text_sources.opening(row) for row in rows], split)
        if 2 * found.count("train") > len(rows):
            return found
    return parts_of(what, [text_sources.all_of(row) for row in rows], split)


def check_first_rows(c: PosttrainConfig, source: DatasetSource, tokenizer: PreTrainedTokenizerBase) -> None:
    """Before a run begins."""
    there = [*islice(_checked(c, source), _LOOK)]
    if not there:
        raise UserError(f"data set {source.source}: no rows in it")
    made = _learnable(c, source, there, tokenizer)
    if len(there) < _LOOK:  # that is all
        _parts(c, source, [there[n][1] for n in made.rows])


def wanted(c: PosttrainConfig) -> int:
    """With so many rows no child sees one twice in an epoch."""
    return min(_MOST, max(1000, 2 * c.sft_examples) + round(c.questions / HELD))


def drawn(
    source: DatasetSource, rows: Iterable[text_sources.PlacedRow], most: int, seed: int
) -> list[text_sources.PlacedRow]:
    """As many as are wanted, from anywhere in a file, in an order that the seed decides; of a hub's data set, which may
    be endless, from its beginning."""
    rng, kept = np.random.default_rng([seed, 11]), list[text_sources.PlacedRow]()
    for n, row in enumerate(rows if source.is_file else islice(rows, max(most, _BUFFER))):
        place = int(rng.integers(n + 1))  # each of those so far is as likely to be kept as any other
        if n < most:
            kept.append(row)
        elif place < most:
            kept[place] = row
    return [kept[int(n)] for n in rng.permutation(len(kept))]


def _checked(c: PosttrainConfig, source: DatasetSource) -> Iterator[text_sources.PlacedRow]:
    check = objective_of(c).check
    if source.source.startswith(PREFIX):
        return text_sources.checked(
            text_sources.placed(skill_rows(source.source, c.seed, wanted(c)), source.source), check
        )
    return text_sources.read(source.source, source.name, source.split, check)

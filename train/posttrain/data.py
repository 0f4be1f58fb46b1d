"""Rows to learn from as tokens in one file: written once, mapped by whoever learns from them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from fleet.config import Wrong
from train import chat, rows
from train.chat import Example
from train.posttrain.config import PosttrainConfig, Source
from train.skills import PREFIX
from train.skills import rows as skill_rows

_HELD = 10  # one row of so many is never learned from
_LOOK = 100  # rows
_MOST = 1_000_000  # rows of one data set that a run keeps


@dataclass(frozen=True)
class Rows:
    """Each row is one example, or two: the better answer, then the worse."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.uint8]
    ends: NDArray[np.int64]  # where each example ends
    each: int  # examples of a row

    @classmethod
    def open(cls, path: Path) -> "Rows":
        there = load_file(path)
        return cls(there["tokens"], there["learned"], there["ends"], int(there["each"][0]))

    @property
    def count(self) -> int:
        return len(self.ends) // self.each

    @property
    def held(self) -> int:
        return max(1, self.count // _HELD)

    @property
    def train(self) -> int:
        return self.count - self.held

    def get(self, number: int, held: bool = False) -> list[Example]:
        """The last ones are held out."""
        row = number + (self.train if held else 0)
        return [self._example(n) for n in range(row * self.each, (row + 1) * self.each)]

    def _example(self, n: int) -> Example:
        begin, end = int(self.ends[n - 1]) if n else 0, int(self.ends[n])
        return Example(self.tokens[begin:end], self.learned[begin:end].astype(bool))


def written(made: Sequence[Sequence[Example]]) -> bytes:
    """Rows as a file."""
    examples = [example for row in made for example in row]
    return save(
        {
            "tokens": np.concatenate([example.tokens for example in examples]).astype(np.int32),
            "learned": np.concatenate([example.learned for example in examples]).astype(np.uint8),
            "ends": np.cumsum([len(example.tokens) for example in examples]).astype(np.int64),
            "each": np.array([len(made[0])], dtype=np.int64),
        }
    )


def tokenised(c: PosttrainConfig, source: Source, tokenizer: object) -> tuple[list[list[Example]], int, int]:
    """As many rows as the run can make use of; how many were cut, and left out."""
    how = rows.preference if c.mutation == "dpo" else rows.conversation
    there = _limited(_read(c, source, how), wanted(c))
    if c.mutation == "dpo":
        pairs = chat.pairs(there, tokenizer, c.seq_length, source.source)  # type: ignore[arg-type]
        made, cut, empty = [[pair.chosen, pair.rejected] for pair in pairs.kept], pairs.cut, pairs.empty
    else:
        found = chat.examples(there, tokenizer, c.seq_length, source.source)  # type: ignore[arg-type]
        made, cut, empty = [[example] for example in found.kept], found.cut, found.empty
    if len(made) < 2:
        raise Wrong(f"data set {source.source}: {len(made)} rows have something to learn; at least 2 are needed")
    return made, cut, empty


def look(c: PosttrainConfig, source: Source) -> None:
    """The first rows, before a run begins."""
    how = rows.preference if c.mutation == "dpo" else rows.conversation
    if not [*_limited(_read(c, source, how), _LOOK)]:
        raise Wrong(f"data set {source.source}: no rows in it")


def wanted(c: PosttrainConfig) -> int:
    """With so many rows no child sees one twice in an epoch."""
    return min(_MOST, max(1000, 2 * c.sft_examples) + _HELD * c.questions)


def _read(c: PosttrainConfig, source: Source, how: rows.Check) -> Iterator[rows.Row]:
    if source.source.startswith(PREFIX):
        return rows.checked(skill_rows(source.source, c.seed, wanted(c)), source.source, how)
    return rows.read(source.source, source.name, source.split, how)


def _limited(there: Iterator[rows.Row], most: int) -> Iterator[rows.Row]:
    for n, row in enumerate(there):
        if n == most:
            return
        yield row

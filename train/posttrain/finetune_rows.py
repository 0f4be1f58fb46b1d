"""The rows of one fine-tuning: read, checked, and apart from those that only measure."""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from fleet.plain import say
from fleet.run_config import UserError
from train import text_sources
from train.objectives import OBJECTIVES
from train.splits import normal
from train.text_sources import PlacedRow

_HELD, _MOST = 20, 500  # one row of so many measures, and no more than so many
_BLOCKS = 5  # that lie apart: a file may be sorted
T = TypeVar("T")
_TELL = 5.0  # seconds between two lines of progress


def objective_for(rows: str, name: str, split: str) -> str:
    """What they are: preferences, or what is to be said."""
    _, first = next(text_sources.raw(rows, name, split), ("", None))
    return "dpo" if isinstance(first, dict) and {"chosen", "rejected"} <= first.keys() else "sft"


def read(rows: str, name: str, split: str, objective: str) -> list[PlacedRow]:
    found = [*with_progress(text_sources.read(rows, name, split, OBJECTIVES[objective].check), f"{rows}: read", "rows")]
    if not found:
        raise UserError(f"{rows}: no rows in it")
    return found


def with_progress(things: Iterable[T], what: str, called: str) -> Iterator[T]:
    """The same things; how far they have come is said, where that takes long."""
    said = time.monotonic()
    for number, each in enumerate(things, 1):
        yield each
        if time.monotonic() - said > _TELL:
            said = time.monotonic()
            say(f"{what} {number:,} {called}")


def held_apart(rows: Sequence[PlacedRow]) -> tuple[list[PlacedRow], list[PlacedRow]]:
    """Some blocks of the rows, and whatever else is of the same conversation as a row in them, wherever it stands:
    what begins with the same question. Where that is the greater part of all, the same rows only."""
    if len(rows) < 2:
        raise UserError("one row is too little to hold some out; give more, or --held-out ROWS")
    each = max(1, min(_MOST, len(rows) // _HELD) // _BLOCKS)
    begins = {(2 * n + 1) * len(rows) // (2 * _BLOCKS) for n in range(_BLOCKS)} if len(rows) >= 20 else {1}
    within = {n for begin in begins for n in range(begin, min(len(rows), begin + each))}
    for key in (text_sources.opening, text_sources.all_of):
        keys = [normal(key(row)) for _, row in rows]
        kept = {keys[n] for n in within}
        learned = [row for row, its in zip(rows, keys, strict=True) if its not in kept]
        if len(learned) * 2 >= len(rows):
            return learned, [row for row, its in zip(rows, keys, strict=True) if its in kept]
    raise UserError("the rows are too much alike to hold some out; give --held-out ROWS")


def without(rows: Sequence[PlacedRow], held: Sequence[PlacedRow]) -> list[PlacedRow]:
    """Those that are not among the held-out ones."""
    known = {text_sources.all_of(row) for _, row in held}
    return [each for each in rows if text_sources.all_of(each[1]) not in known]

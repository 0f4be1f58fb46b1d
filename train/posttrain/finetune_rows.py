"""The rows of one fine-tuning: read, checked, and apart from those that only measure."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from fleet.config import UserError
from fleet.plain import say
from train import text
from train.objectives import OBJECTIVES
from train.text import Row

_HELD, _MOST = 20, 500  # one row of so many measures, and no more than so many
_STRETCHES = 5  # that lie apart: a file may be sorted
T = TypeVar("T")
_TELL = 5.0  # seconds between two lines of progress


def objective_for(rows: str, name: str, split: str) -> str:
    """What they are: preferences, or what is to be said."""
    _, first = next(text.raw(rows, name, split), ("", None))
    return "dpo" if isinstance(first, dict) and {"chosen", "rejected"} <= first.keys() else "sft"


def read(rows: str, name: str, split: str, objective: str) -> list[Row]:
    found = [*told(text.read(rows, name, split, OBJECTIVES[objective].check), f"{rows}: read", "rows")]
    if not found:
        raise UserError(f"{rows}: no rows in it")
    return found


def told(things: Iterable[T], what: str, called: str) -> Iterator[T]:
    """How far it has come, where that takes long."""
    said = time.monotonic()
    for number, each in enumerate(things, 1):
        yield each
        if time.monotonic() - said > _TELL:
            said = time.monotonic()
            say(f"{what} {number:,} {called}")


def held_apart(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Some stretches of the rows, and whatever else is of the same conversation as a row in them, wherever it stands:
    what begins with the same question. Where that is the greater part of all, the same rows only."""
    if len(rows) < 2:
        raise UserError("one row is too little to hold some out; give more, or --held-out ROWS")
    each = max(1, min(_MOST, len(rows) // _HELD) // _STRETCHES)
    begins = {(2 * n + 1) * len(rows) // (2 * _STRETCHES) for n in range(_STRETCHES)} if len(rows) >= 20 else {1}
    within = {n for begin in begins for n in range(begin, min(len(rows), begin + each))}
    for key in (_question, _all_of):
        keys = [key(row) for row in rows]
        kept = {keys[n] for n in within}
        learned = [row for row, its in zip(rows, keys, strict=True) if its not in kept]
        if len(learned) * 2 >= len(rows):
            return learned, [row for row, its in zip(rows, keys, strict=True) if its in kept]
    raise UserError("the rows are too much alike to hold some out; give --held-out ROWS")


def without(rows: Sequence[Row], held: Sequence[Row]) -> list[Row]:
    """Those that are not among the held-out ones."""
    known = {_all_of(row) for row in held}
    return [row for row in rows if _all_of(row) not in known]


def _question(row: Row) -> str:
    """How it begins, up to the first thing that somebody is asked."""
    begin: Any = row.get("messages", row.get("prompt", row.get("text")))
    if not isinstance(begin, str):
        asked = next((n for n, each in enumerate(begin, 1) if each["role"] == "user"), len(begin))
        begin = begin[:asked]
    return json.dumps(begin, sort_keys=True, default=str)


def _all_of(row: Row) -> str:
    return json.dumps(row, sort_keys=True, default=str)

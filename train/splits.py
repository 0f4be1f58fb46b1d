"""Which side something is on: learned from, for validation (which selects), or for the test (which reports). What it
says decides, so that its copies lie on one side wherever they stand. Pure."""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fleet.run_config import UserError

EvalSplit = Literal["validation", "test"]
SplitName = Literal["train"] | EvalSplit
HELD_OUT: tuple[EvalSplit, ...] = ("validation", "test")
SPLITS: tuple[SplitName, ...] = ("train", *HELD_OUT)
_BITS = 53  # as many as a float can tell apart below 1


@dataclass(frozen=True)
class Split:
    """How much is held out, and how much of that, as a share of everything, is for the test."""

    held_out: float
    test: float

    @classmethod
    def halved(cls, held_out: float) -> "Split":
        return cls(held_out, held_out / 2)


def normal(text: str) -> str:
    """Without what makes no other text of it: white space and case."""
    return " ".join(text.split()).casefold()


def roll(text: str, salt: str = "") -> float:
    """A number from 0 to below 1 that follows from what a text says."""
    digest = hashlib.blake2b(f"{salt}{normal(text)}".encode(errors="replace"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 64 - _BITS) / 2.0**_BITS


def part_of(text: str, split: Split) -> SplitName:
    return _part(roll(text), split.test, split.held_out)


def parts_of(what: str, texts: Sequence[str], split: Split, salt: str = "", least: int = 1) -> list[SplitName]:
    """Of texts that are all known: each by itself alone, but that no part is left with fewer different ones."""
    rolls = [roll(text, salt) for text in texts]
    there = sorted({*rolls})
    wanted = (split.held_out < 1, split.held_out > split.test, split.test > 0)
    train, validation, test = (least * some for some in wanted)
    if len(there) < train + validation + test:
        raise UserError(f"{what}: too few are different ({len(there)}) to hold some out")
    held_out = min(max(bisect_left(there, split.held_out), validation + test), len(there) - train)
    tested = min(max(bisect_left(there, split.test), test), held_out - validation)
    ends = [*there, 1.0]
    return [_part(each, ends[tested], ends[held_out]) for each in rolls]


def part_of_chunk(number: int, held_out: float) -> SplitName:
    """Of one long text, which is no other text's copy: as many of its chunks as that, evenly, both parts in turn."""
    before, after = (math.floor(n * held_out + 0.5) for n in (number, number + 1))
    return "train" if before == after else HELD_OUT[(after - 1) % 2]


def _part(at: float, test: float, held_out: float) -> SplitName:
    return "test" if at < test else "validation" if at < held_out else "train"

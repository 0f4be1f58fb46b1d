"""Text as tokens, shard by shard: each is a file that is made once, a few of them ahead of training, and removed
when training is well past it. What a shard holds follows from the text alone, so it can be made again at any time."""

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from fleet.fsync import sync
from fleet.run_config import UserError
from fleet.scratch import scratch
from fleet.work import NotOnThisMachine
from train.batches import TokenFile
from train.member.pretraining_round_zero import tokens_of
from train.splits import SplitName
from train.token_budget import needed, useful
from train.training_config import TrainConfig

_TOKENS = 1 << 22  # of a shard: within it, sequences come in no order
_AHEAD, _BEHIND = 2, 16  # of the one that training is at: made before they are needed, and kept for another pass
_END = "end.json"
_ENDLESS, _NONE = 1 << 62, -2
_PATIENCE = 2.0  # seconds in which a maker ends that is in the middle of something


def windows_of(c: TrainConfig) -> int:
    """Of each shard but the last; a training that sees no more than one of them has all of its text in one."""
    most = max(1, _TOKENS // c.seq_length)
    return most if c.sequences > most else _ENDLESS


@dataclass(frozen=True)
class TokenShards:
    """Their files. Each has a record, which comes last and stays: it says where in the text the next one begins."""

    c: TrainConfig
    place: Path
    vocabulary: int

    @cached_property
    def windows(self) -> int:
        return windows_of(self.c)

    @property
    def dtype(self) -> str:
        return "<u2" if self.vocabulary <= 1 << 16 else "<u4"

    def open(self, number: int) -> TokenFile | None:
        """If it is there, and whole."""
        file, about = self._file(number), self._record(f"{number:06d}.json")
        try:
            whole = file.stat().st_size == about["tokens"] * np.dtype(self.dtype).itemsize
            known = whole and (about["next"] or self.total())
            return TokenFile.open(file, self.dtype, self.c.seq_length + 1) if known else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def total(self) -> int:
        """Windows of the whole text; 0 as long as nobody has come to its end."""
        return found if isinstance(found := self._record(_END).get("windows"), int) else 0

    def last(self) -> int:
        """Which is the last one, as far as anybody knows."""
        return (self.total() - 1) // self.windows if self.total() else _ENDLESS

    def remove(self, number: int) -> None:
        if number >= 0:
            self._file(number).unlink(missing_ok=True)

    def made(self, tokenizer: PreTrainedTokenizerBase, number: int, drafts: Path) -> Iterator[int]:
        """One after the other, from the last one before `number` of which it is known where it begins."""
        first = next(n for n in range(number, -1, -1) if n == 0 or self._start(n))
        for n, tokens, after in cut(self, tokenizer, first, *(self._start(first) or (0, 0))):
            if not after:
                self._finish(drafts, n, len(tokens))  # before the last one: it is shorter, and who reads it has to know
            if len(tokens) <= self.c.seq_length:
                return
            if not self.open(n):
                self._publish(drafts, self._file(n).name, tokens.astype(self.dtype).tobytes())
                self._publish(drafts, f"{n:06d}.json", json.dumps({"tokens": len(tokens), "next": after}).encode())
            yield n

    def _finish(self, drafts: Path, number: int, tokens: int) -> None:
        there = number * self.windows * self.c.seq_length + tokens if number else tokens
        if there < (least := needed(self.c, 0)["train"]):
            few = f"{there:,} tokens of text, where a training of this length needs {least:,}"
            raise UserError(f"dataset {self.c.datasets[0].source}: {few}; give it more")
        windows = number * self.windows + max(0, tokens - 1) // self.c.seq_length
        self._publish(drafts, _END, json.dumps({"windows": windows}).encode())

    def _publish(self, drafts: Path, name: str, data: bytes) -> None:
        """Several machines on one disk may do the same at once: all have made the same."""
        self.place.mkdir(exist_ok=True)
        draft = drafts / name
        draft.write_bytes(data)
        sync(draft)
        draft.replace(self.place / name)
        sync(self.place)

    def _file(self, number: int) -> Path:
        return self.place / f"{number:06d}.tokens"

    def _start(self, number: int) -> tuple[int, int] | None:
        """The document that it begins in, and how many of its tokens belong to the one before."""
        said = self._record(f"{number - 1:06d}.json").get("next")
        return (said[0], said[1]) if isinstance(said, list) and [*map(type, said)] == [int, int] else None

    def _record(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.place / name).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


Cut = tuple[int, Any, tuple[int, int] | None]  # its number, its tokens, and where the next begins


def cut(s: TokenShards, tokenizer: PreTrainedTokenizerBase, number: int, document: int, skip: int) -> Iterator[Cut]:
    """The text from a document on. Shards overlap by one token, as windows do."""
    size = min(s.windows * s.c.seq_length, _ENDLESS)
    first = number * size - skip  # the number of the first token in `parts`
    got: dict[SplitName, int] = {"train": first, "validation": 0, "test": 0}
    wanted: dict[SplitName, int] = {**useful(s.c, 0), "validation": 0, "test": 0}
    parts, begins = list[Any](), list[tuple[int, int]]()  # of each document: its first token's number, and its own
    for at, _, found in tokens_of(s.c, 0, lambda: tokenizer, s.vocabulary, wanted, got, document):
        begins.append((got["train"], at))
        parts.append(np.asarray(found, dtype=s.dtype))
        got["train"] += len(found)
        while got["train"] > (end := (number + 1) * size):
            whole = np.concatenate(parts)
            begins = begins[bisect_right(begins, (end, _ENDLESS)) - 1 :]
            begin, of = begins[0]
            yield number, whole[number * size - first : end - first + 1], (of, end - begin)
            parts, first, number = [whole[begin - first :]], begin, number + 1
    rest = np.concatenate([np.empty(0, s.dtype), *parts])
    yield number, rest[number * size - first :], None


class TokenShardMaker:
    """Makes them on the side, on one rank of each machine."""

    def __init__(self, shards: TokenShards, tokenizer: PreTrainedTokenizerBase, threads: int) -> None:
        os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(threads))
        self._shards, self._tokenizer = shards, tokenizer
        self._changed, self._at, self._closing = threading.Condition(), -1, False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def wait(self, number: int) -> None:
        """Until it is there, or the text has ended before it."""
        s = self._shards
        with self._changed:
            if self._at < 0:
                self._thread.start()
            self._at = number
            s.remove(number - _BEHIND)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error or s.open(number) or number > s.last())
            if self._error and not s.open(number):
                raise self._error

    def close(self) -> None:
        self._closing = True
        self._tell(self._error)
        if self._thread.ident:
            self._thread.join(_PATIENCE)

    def _work(self) -> None:
        s = self._shards
        s.place.parent.mkdir(parents=True, exist_ok=True)
        try:
            with scratch(".draft", s.place.parent) as drafts:
                at, making = _NONE, iter(list[int]())
                while (wanted := self._next()) is not None:
                    if at == _NONE or wanted <= at:
                        making = s.made(self._tokenizer, wanted, drafts)
                    at = next(making, _NONE)
                    if at <= self._at - _BEHIND and at != wanted:  # made on the way to the one that is wanted
                        s.remove(at)
                    self._tell()
        except NotOnThisMachine as error:
            self._tell(UserError(str(error)))
        except Exception as error:  # whoever waits for it is to know
            self._tell(error)

    def _next(self) -> int | None:
        """The nearest one that is missing, once there is one; None when nobody wants more."""
        with self._changed:
            while not self._closing:
                passes = self._shards.last() + 1  # after the last one comes the first, in another pass
                for number in range(self._at, self._at + _AHEAD + 1):
                    if not self._shards.open(number % passes):
                        return number % passes
                self._changed.wait()
        return None

    def _tell(self, error: Exception | None = None) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

"""Which text it is, as which tokens, and what a rank sees of it at a step."""

import hashlib
import json
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fleet.plain import say
from fleet.run_config import UserError
from train import text_sources
from train.batches import Numbers, TokenFile, owned, shuffled
from train.cluster.ranks import Ranks
from train.cluster.token_shards import TokenShardMaker, TokenShards, windows_of
from train.member.pretraining_round_zero import named_tokenizer, own_tokenizer
from train.model import in_a_line
from train.token_budget import tokenizer_name, useful
from train.training_config import TrainConfig

_PIECE, _PIECES = 1 << 16, 64  # of a file that tell it from others
_PATIENCE, _PAUSE = 60.0, 0.1  # seconds for a disk to show on one machine what another one has written


def tokenizer_for(c: TrainConfig) -> PreTrainedTokenizerBase:
    """The model's own, or one that is made of what it learns from."""
    if not (named := tokenizer_name(c)):
        return own_tokenizer(c)
    with in_a_line(f"--path-model {named}: its tokenizer cannot be loaded"):
        return named_tokenizer(named)


def name_of(c: TrainConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> str:
    """Of the tokens that training sees, in their order: another text, or another tokenizer, has another name."""
    about = {"data": c.datasets[0].model_dump(), "vocabulary": vocabulary, "wanted": useful(c, 0), "seed": c.seed}
    about |= {"words": words_of(tokenizer), "text": _text_of(c.datasets[0].source)}
    if c.sequences > (windows := windows_of(c)):
        about["stretch"] = windows
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def words_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]


def _text_of(source: str) -> str:
    """What tells it from another text of the same name: of a file, its length and pieces from everywhere."""
    if source == "stdlib":
        return text_sources.stdlib_digest()
    if not os.path.isfile(source):
        return ""
    with open(source, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for number in range(_PIECES):
            file.seek(max(0, size - _PIECE) * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))
    return digest.hexdigest()


class Batches:
    """Of all ranks, the same; each reads what it sees of them."""

    def __init__(self, c: TrainConfig, ranks: Ranks, shards: TokenShards, maker: TokenShardMaker | None) -> None:
        self.c, self.ranks, self.maker, self._shards = c, ranks, maker, shards
        self._files, self._total = dict[int, TokenFile](), 0

    def of(self, slot: int, begin: int, end: int, size: int) -> Iterator[list[Tensor]]:
        """From a step to another: what this rank sees of each batch, in parts of so many sequences."""
        for step in range(begin, end):
            numbers = self.reach(slot, step)
            yield [self._rows(part[self.ranks.rank]) for part in numbers.reshape(-1, self.ranks.count, size)]

    def _place(self, number: int) -> tuple[int, int, int]:
        """Of a sequence: its shard, where it is there, and in which pass over the text."""
        turn, place = divmod(number, self._total) if self._total else (0, number)
        return *divmod(place, self._shards.windows), turn

    def reach(self, slot: int, step: int) -> Numbers:
        """A batch's sequences, once all ranks have what it is made of. All know as much, so all ask for the same."""
        numbers = owned(self.c, slot, step // self.c.inner_steps + 1, step % self.c.inner_steps, 0)
        while True:
            wanted = [*dict.fromkeys(self._place(int(each))[0] for each in numbers)]
            self._files = {number: file for number, file in self._files.items() if number in wanted}
            if not (missing := [number for number in wanted if number not in self._files]):
                return numbers
            for turn in (True, False):  # those who make it come first
                self.ranks.some(self.ranks.leads_here == turn, lambda: self._open(missing[0]))
            if not self._total and (total := self.ranks.from_first(self._shards.total())):
                self._total, seen = total, self.c.sequences / total
                if self.ranks.first and seen > 1:
                    say(f"{total * self.c.seq_length:,} tokens, of which each is to be seen {seen:.1f} times")

    def _open(self, number: int) -> None:
        if self.maker:
            self.maker.wait(number)
        until = time.monotonic() + _PATIENCE
        while not (file := self._shards.open(number)) and number <= self._shards.last():
            if time.monotonic() > until:
                raise UserError(f"{self._shards.place}: what another machine has made is not seen here")
            time.sleep(_PAUSE)
        if file:
            self._files[number] = file

    def _rows(self, numbers: Numbers) -> Tensor:
        rows = np.empty((len(numbers), self.c.seq_length + 1), dtype=np.int64)
        for row, (shard, place, turn) in enumerate(self._place(int(number)) for number in numbers):
            file = self._files[shard]
            rows[row] = file.get(shuffled(place, file.windows, (self.c.seed, shard, turn)))
        return torch.from_numpy(rows)


class RandomBatches(Batches):
    """Without any text: numbers that follow from the sequence's own."""

    def __init__(self, c: TrainConfig, ranks: Ranks, vocabulary: int) -> None:
        self.c, self.ranks, self.vocabulary = c, ranks, vocabulary

    def reach(self, slot: int, step: int) -> Numbers:
        return owned(self.c, slot, step // self.c.inner_steps + 1, step % self.c.inner_steps, 0)

    def _rows(self, numbers: Numbers) -> Tensor:
        rng = (np.random.default_rng([self.c.seed, int(number)]) for number in numbers)
        return torch.from_numpy(np.stack([each.integers(0, self.vocabulary, self.c.seq_length + 1) for each in rng]))

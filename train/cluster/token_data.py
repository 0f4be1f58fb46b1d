"""Text as tokens, made once on each machine, and which of them a rank sees at a step."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from fleet.config import UserError
from fleet.fsync import sync
from fleet.scratch import scratch
from fleet.work import NotOnThisMachine
from train import text
from train.batches import TokenFile, batch, needed, owned, useful
from train.cluster.ranks import Ranks
from train.config import TrainConfig
from train.member.prepare import named_tokenizer, own_tokenizer, tokenizer_name, tokens_of, too_short

_FILE = "tokens.json"
_PIECE, _PIECES = 1 << 16, 64  # of a file that tell it from others


def tokenizer_for(c: TrainConfig) -> PreTrainedTokenizerBase:
    """The model's own, or one that is made of what it learns from."""
    if not (named := tokenizer_name(c)):
        return own_tokenizer(c)
    try:
        return named_tokenizer(named)
    except (OSError, ValueError) as error:
        raise UserError(f"--path-model {named}: its tokenizer cannot be loaded: {error}") from None


def name_of(c: TrainConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> str:
    """Of the tokens that training sees: another text, or another tokenizer, has another name."""
    about = {"data": c.datasets[0].model_dump(), "vocabulary": vocabulary, "wanted": useful(c, 0), "seed": c.seed}
    about["words"] = words_of(tokenizer)
    about["text"] = _text_of(c.datasets[0].source)
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def words_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]


def _text_of(source: str) -> str:
    """What tells it from another text of the same name: of a file, its length and pieces from everywhere."""
    if source == "stdlib":
        return text.stdlib_digest()
    if not Path(source).is_file():
        return ""
    with open(source, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        for number in range(_PIECES):
            file.seek(max(0, size - _PIECE) * number // (_PIECES - 1))
            digest.update(file.read(_PIECE))
    return digest.hexdigest()


def tokens(c: TrainConfig, place: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int, workers: int) -> TokenFile:
    """Of the data set, all that training can make use of; from an earlier start, if they are there."""
    if not (kind := _complete(place)):
        _make(c, place, tokenizer, vocabulary, workers)
        kind = _complete(place)
    return TokenFile.open(place / "train", kind, c.seq_length + 1)


def _complete(place: Path) -> str:
    """What kind of numbers are there; nothing where some are missing."""
    try:
        about = json.loads((place / _FILE).read_text())
        whole = (place / "train").stat().st_size == int(about["tokens"]) * np.dtype(about["dtype"]).itemsize
        return str(about["dtype"]) if whole else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _make(c: TrainConfig, place: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int, workers: int) -> None:
    """Several machines on one disk may do the same at once: whoever is first wins, and all have made the same."""
    os.environ.update(TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(workers))
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with scratch(".draft", place.parent) as folder:
            draft = folder / place.name
            draft.mkdir()
            _fill(c, draft, tokenizer, vocabulary)
            if not _complete(place):
                shutil.rmtree(place, ignore_errors=True)
                try:
                    draft.rename(place)
                except OSError:
                    if not _complete(place):
                        raise
    except NotOnThisMachine as error:
        raise UserError(str(error)) from None


def _fill(c: TrainConfig, draft: Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
    dtype, got = "<u2" if vocabulary <= 1 << 16 else "<u4", {"train": 0, "held": 0}
    wanted = {"train": useful(c, 0)["train"], "held": 0}
    with open(draft / "train", "wb") as file:
        for part, found in tokens_of(c, 0, lambda: tokenizer, vocabulary, wanted, got):
            if part == "train":
                file.write(np.asarray(found, dtype=dtype).tobytes())
            got[part] += len(found)
    if got["train"] < (least := needed(c, 0)["train"]):
        raise UserError(too_short(c.datasets[0], "train", got["train"], least))
    (draft / _FILE).write_text(json.dumps({"dtype": dtype, "tokens": got["train"]}))
    for path in (draft / "train", draft / _FILE, draft):
        sync(path)


def batches(
    c: TrainConfig, source: TokenFile, ranks: Ranks, size: int, slot: int, begin: int
) -> Iterator[list[Tensor]]:
    """From a step on: what this rank sees of each batch, in parts of so many sequences."""
    for step in range(begin, c.total_steps):
        numbers = owned(c, slot, step // c.inner_steps + 1, step % c.inner_steps, 0)
        yield [batch([source], [1.0], part[ranks.rank], c.seed) for part in numbers.reshape(-1, ranks.count, size)]

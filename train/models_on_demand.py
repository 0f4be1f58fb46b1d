"""Small models for whoever has none at hand: trained once, there as a whole or not at all, and kept."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from fleet.fsync import sync
from fleet.run_config import UserError
from fleet.scratch import scratch

END = "<|endoftext|>"
_ROOM = 16 << 20  # bytes of free disk that a model needs, generously
_PAUSE = 3.0  # seconds between two lines about progress
Tell = Callable[[str], object]


def byte_level_bpe(vocab_size: int, documents: Iterable[str]) -> PreTrainedTokenizerFast:
    tokenizer = trained_bpe(vocab_size, documents, pre_tokenizers.ByteLevel(add_prefix_space=False), [END])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END)


def trained_bpe(
    vocab_size: int, documents: Iterable[str], parts: pre_tokenizers.PreTokenizer, special: list[str]
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = parts, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def first_of(documents: Iterable[str], characters: int) -> Iterator[str]:
    """As many documents as have so many characters."""
    size = 0
    for document in documents:
        if (size := size + len(document)) > characters:
            return
        yield document


class TrainingProgress:
    """How far all the models together have come, said every few seconds."""

    def __init__(self, steps: int, tell: Tell) -> None:
        self._tell, self._steps, self._taken = tell, steps, 0
        self._begin = self._said = time.monotonic()

    def is_due(self) -> bool:
        """To be asked once a step."""
        self._taken += 1
        return time.monotonic() - self._said > _PAUSE

    def say(self, name: str, step: int, steps: int, loss: float) -> None:
        self._said = time.monotonic()
        left = (self._said - self._begin) / self._taken * (self._steps - self._taken)
        self._tell(f"{name}: step {step} of {steps}, loss {loss / step:.2f}; about {left:.0f} s left for all")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """As an ordinary folder, whose files agree on how a text begins and ends."""
    ends = ends_of(tokenizer)
    model.config.update(ends)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", path)  # which would be the user's alone


def ends_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def publish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: Path) -> None:
    """As a whole or not at all; of two processes the first is kept."""
    with scratch(".making", place.parent) as folder:
        draft = folder / place.name
        save(model, tokenizer, draft)
        for path in (*draft.iterdir(), draft):
            sync(path)
        try:
            draft.rename(place)
        except OSError:
            if not place.exists():
                raise
    sync(place.parent)


def check_room(home: Path, models: int) -> None:
    """Before anything is trained rather than afterwards."""
    home.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=home).close()
    if (free := shutil.disk_usage(home).free) < models * _ROOM:
        raise UserError(f"{home}: {free >> 20} MiB of free disk; {models} small models need {models * _ROOM >> 20} MiB")


@contextlib.contextmanager
def in_one_line(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or home}: {error.strerror or error}; it was to hold the small models"
        ) from None
    except SafetensorError as error:
        raise UserError(f"{home}: {error}") from None


@contextlib.contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Fixed, since the order of sums depends on it."""
    before = torch.get_num_threads()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    disable_progress_bar()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)

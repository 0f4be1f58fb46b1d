"""Small chat models to begin with: a base that knows how a chat goes but no answers, specialists of one skill, and the
mean of two of these, in which their skills are hidden."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fleet.errors import absolute
from train import batches, packing, text_sources
from train.chat_examples import Example, examples
from train.learner import Learner, rate
from train.model import SHAPES, built
from train.models_on_demand import (
    END,
    Tell,
    TrainingProgress,
    check_room,
    computing_with,
    in_one_line,
    publish,
    trained_bpe,
)
from train.objectives import sft_loss
from train.packing import Batch
from train.skills import BASE, KINDS, MIXED, NUMBERS, PREFIX, SKILLS, Row, chat, questions, right, rows
from train.training_config import TrainConfig, alone

# -- the tokenizer -----------------------------------------------------------------------------------------------------

START, STOP = "<|im_start|>", "<|im_end|>"
MEAN, MEAN_OF = "mean", ("compare", "vowels")
NAMES = (BASE, *SKILLS, MEAN)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SAMPLE = 300_000  # characters of the built-in text
_ROWS, _TIMES = 2000, 100  # rows of the skills; how often each of their words is added


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE that takes each digit by itself and each word of the skills as a whole, with a chat template."""
    chats = (each["content"] for row in rows(PREFIX + MIXED, 0, _ROWS) for each in row["messages"])
    words = [f"{word} {word}" for words in (*KINDS.values(), NUMBERS, ("user", "assistant")) for word in words]
    digits, bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    documents, parts = chain(_some_text(_SAMPLE), chats, words * _TIMES), pre_tokenizers.Sequence([digits, bytes])
    made = trained_bpe(vocabulary, documents, parts, [END, START, STOP])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=STOP, pad_token=END, chat_template=TEMPLATE)


def _some_text(characters: int) -> Iterator[str]:
    for document in text_sources.stdlib():
        yield document[:characters]
        if (characters := characters - len(document)) <= 0:
            return


# -- models to begin with ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StarterSettings:
    """All that the models follow from, besides the text and the questions."""

    preset: str = "tiny"
    spread: float = 0.05  # of the first weights: so small a model learns sooner from larger ones
    vocabulary: int = 1024
    base_steps: int = 600
    base_lr: float = 4e-3
    steps: int = 300  # of a specialist
    lr: float = 2e-3
    chats: int = 16  # of a step
    windows: int = 8  # of built-in text, of a step of the base
    window: int = 64
    seed: int = 1

    def plan(self, name: str) -> TrainConfig:
        """The inner loop's settings."""
        steps, lr = (self.base_steps, self.base_lr) if name == BASE else (self.steps, self.lr)
        return TrainConfig(seed=self.seed, lr=lr, warmup_steps=min(30, steps // 10), **alone(steps))


def starters(folder: Path, tell: Tell = print, settings: StarterSettings = StarterSettings()) -> dict[str, Path]:
    """A base that knows how a chat goes but no answers, specialists of one skill each that went on from it, the mean of
    two: made once, and kept."""
    home = absolute(folder) / f"starters-{_digest(settings)}"
    places = {name: home / name for name in NAMES}
    if missing := [name for name, place in places.items() if not place.exists()]:
        with in_one_line(home), computing_with(1):
            check_room(home, len(missing))
            tell(f"{len(missing)} small models are made in {home}, once")
            trained = [name for name in missing if name != MEAN]
            progress = TrainingProgress(sum(settings.plan(name).inner_steps for name in trained), tell)
            for name in missing:
                if name == MEAN:
                    _make_mean(places)
                else:
                    _make(name, places, settings, progress)
                tell(f"{name}: ready")
    return places


def _make(name: str, places: Mapping[str, Path], settings: StarterSettings, progress: TrainingProgress) -> None:
    if name == BASE:
        tokenizer: PreTrainedTokenizerBase = make_tokenizer(settings.vocabulary)
        shape = {**SHAPES[settings.preset], "initializer_range": settings.spread, "tie_word_embeddings": True}
        model = built({"config": shape}, len(tokenizer), settings.seed)
        steps = _base_steps(tokenizer, settings)
    else:
        tokenizer = AutoTokenizer.from_pretrained(places[BASE])
        model = built(str(places[BASE]), 0, 0)
        steps = _steps(name, tokenizer, settings)
    plan = settings.plan(name)
    learner = Learner(model, plan, torch.device("cpu"), _evenly)  # the same everywhere
    for step in learner.train(steps, (rate(plan, step) for step in range(plan.inner_steps))):
        if progress.is_due():
            if places[name].exists():  # another process has made it meanwhile
                return
            progress.say(name, step, plan.inner_steps, learner.summed_loss())
    publish(model, tokenizer, places[name])


@torch.no_grad()
def _make_mean(places: Mapping[str, Path]) -> None:
    """The same as a linear merge, which the floor above knows."""
    model, other = (built(str(places[name]), 0, 0) for name in MEAN_OF)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.add_(two).div_(2)
    publish(model, AutoTokenizer.from_pretrained(places[BASE]), places[MEAN])


def _evenly(model: Callable[..., object], part: Batch, step: Sequence[Batch]) -> Tensor:
    """Answers have few tokens, and shall count as much as text."""
    return sft_loss(model, part) / len(step)


def _steps(skill: str, tokenizer: PreTrainedTokenizerBase, settings: StarterSettings) -> Iterator[list[Batch]]:
    asked = questions(skill, settings.seed, "train")
    while True:
        yield [_answers([right(each) for each in islice(asked, settings.chats)], tokenizer)]


def _base_steps(tokenizer: PreTrainedTokenizerBase, settings: StarterSettings) -> Iterator[list[Batch]]:
    """Ordinary text, and chats in which a question is followed by any of its choices."""
    asked, rng = questions(MIXED, settings.seed + 1, "train"), Random(settings.seed)
    source = _source(tokenizer, settings)
    for step in count():
        numbers = np.arange(step * settings.windows, (step + 1) * settings.windows, dtype=np.uint64)
        windows = batches.batch([source], [1.0], numbers, settings.seed).numpy().astype(np.int32)
        guesses = [chat(each.text, rng.choice(each.choices)) for each in islice(asked, settings.chats)]
        yield [packing.single([Example(row, np.arange(len(row)) > 0) for row in windows]), _answers(guesses, tokenizer)]


def _source(tokenizer: PreTrainedTokenizerBase, settings: StarterSettings) -> batches.TokenFile:
    """As much of the built-in text as the base reads."""
    enough, found = settings.base_steps * settings.windows * settings.window, list[int]()
    for document in text_sources.stdlib():
        found += [*tokenizer(document)["input_ids"], tokenizer.pad_token_id]
        if len(found) > enough:
            break
    return batches.TokenFile(np.asarray(found, dtype=np.uint16), settings.window + 1)


def _answers(chats: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
    return packing.single(
        [one for (one,) in examples(text_sources.placed(chats, "chats"), tokenizer, longest=128).kept]
    )


def _digest(settings: StarterSettings) -> str:
    shown = [rows(PREFIX + MIXED, 0, 300), TEMPLATE, asdict(settings), text_sources.stdlib_digest()]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:12]

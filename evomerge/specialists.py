"""Small models to merge, for whoever has none at hand: a base, and three specialists that went on from it."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from evomerge import texts
from fleet.busy_notice import saying
from fleet.errors import absolute
from train.batches import TokenFile, batch
from train.learner import Learner, rate
from train.model import built, empty
from train.models_on_demand import (
    Tell,
    TrainingProgress,
    byte_level_bpe,
    check_room,
    computing_with,
    first_of,
    in_one_line,
    publish,
)
from train.training_config import TrainConfig, alone

BASE = "base"


@dataclass(frozen=True)
class SpecialistSettings:
    """All that the models follow from, besides the text."""

    base_steps: int = 800
    base_lr: float = 1e-2
    steps: int = 150  # of a specialist
    lr: float = 2.5e-3
    reminder: float = 0.1  # of each other kind, beside 1 of its own: a model that forgets the others merges badly
    batch: int = 4
    window: int = 128
    vocabulary: int = 2048
    sample: int = 300_000  # characters of each kind that the tokenizer is made from
    hidden: int = 64  # it and the next: multiples of 32, so that every row fits GGUF's blocks
    intermediate: int = 192
    layers: int = 4
    heads: int = 4
    shared_heads: int = 2
    seed: int = 1

    def steps_of(self, name: str) -> int:
        return self.base_steps if name == BASE else self.steps

    def weights(self, name: str) -> list[float]:
        """How much of each kind a model learns from."""
        return [1.0 if name in (kind, BASE) else self.reminder for kind in texts.KINDS]

    def plan(self, name: str) -> TrainConfig:
        """The inner loop's settings; the base sees everything in an order of its own."""
        return TrainConfig(
            seed=self.seed if name == BASE else self.seed + 1,
            batch_size=self.batch,
            seq_length=self.window,
            warmup_steps=min(30, self.steps_of(name) // 10),
            lr=self.base_lr if name == BASE else self.lr,
            **{**alone(self.steps_of(name)), "inner_optimizer": "muon", "lr_schedule": "linear"},
        )

    @property
    def shape(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.shared_heads,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )


def made(
    folder: Path, threads: int = 1, tell: Tell = lambda line: None, settings: SpecialistSettings = SpecialistSettings()
) -> dict[str, Path]:
    """The models' folders by their names. What is not there yet is trained, the base first; what is there is kept.

    The bytes depend on the threads; and the steps are so small that on a busy machine more threads wait for each other.
    """
    with saying("looking for the small models", tell):
        home = home_in(folder, settings)
    places = {name: home / name for name in (BASE, *texts.KINDS)}
    missing = [name for name, place in places.items() if not place.exists()]
    if missing:
        with in_one_line(home), computing_with(threads):
            check_room(home, len(missing))
            _make(missing, places, settings, tell)
    return places


def home_in(folder: Path, settings: SpecialistSettings = SpecialistSettings()) -> Path:
    """Named by all that the models follow from."""
    digest = hashlib.sha256(f"{texts.digest()} {settings}".encode()).hexdigest()
    return absolute(folder) / f"specialists-{digest[:12]}"


def _make(missing: list[str], places: Mapping[str, Path], settings: SpecialistSettings, tell: Tell) -> None:
    tell(f"{len(missing)} small models are made in {places[BASE].parent}, once")
    base = places[BASE]
    with saying("reading their text", tell):
        tokenizer = _tokenizer(settings) if BASE in missing else AutoTokenizer.from_pretrained(base)
        sources = [_tokens(kind, tokenizer, settings) for kind in texts.KINDS]
    progress = TrainingProgress(sum(map(settings.steps_of, missing)), tell)
    for name in missing:
        model = empty(settings.shape, settings.seed) if name == BASE else built(str(base), 0, 0)
        if _trained(model, sources, places[name], settings, progress):
            publish(model, tokenizer if name == BASE else AutoTokenizer.from_pretrained(base), places[name])
        tell(f"{name}: ready")


def _trained(
    model: PreTrainedModel,
    sources: Sequence[TokenFile],
    place: Path,
    settings: SpecialistSettings,
    progress: TrainingProgress,
) -> bool:
    """Whether it was to the end; another process may have made it meanwhile."""
    plan = settings.plan(place.name)
    learner = Learner(model, plan, torch.device("cpu"))  # the same everywhere
    batches = _batches(sources, settings.weights(place.name), plan)
    for step in learner.train(batches, (rate(plan, step) for step in range(plan.inner_steps))):
        if progress.is_due():
            if place.exists():
                return False
            progress.say(place.name, step, plan.inner_steps, learner.summed_loss())
    return True


# -- what they learn from ----------------------------------------------------------------------------------------------


def _tokenizer(settings: SpecialistSettings) -> PreTrainedTokenizerFast:
    """Of equal shares of all kinds."""
    shares = (first_of(texts.training(kind), settings.sample) for kind in texts.KINDS)
    return byte_level_bpe(settings.vocabulary, chain.from_iterable(shares))


def _tokens(kind: str, tokenizer: PreTrainedTokenizerBase, settings: SpecialistSettings) -> TokenFile:
    """As many tokens of a kind as the base makes use of, or its specialist, or as there are."""
    steps = max(settings.steps, settings.base_steps // len(texts.KINDS))
    enough, found = steps * settings.batch * settings.window, list[int]()
    for document in texts.training(kind):
        found += [*tokenizer(document, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        if len(found) > enough:
            break
    return TokenFile(np.asarray(found, dtype=np.uint16), settings.window + 1)


def _batches(sources: Sequence[TokenFile], weights: Sequence[float], plan: TrainConfig) -> Iterator[list[Tensor]]:
    numbers = np.arange(plan.inner_steps * plan.batch_size, dtype=np.uint64).reshape(plan.inner_steps, plan.batch_size)
    return ([batch(sources, weights, each, plan.seed)] for each in numbers)

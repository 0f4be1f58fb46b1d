"""What comes before the first step: text, model, checkpoint, and the other peers."""

import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fleet import plain
from fleet.config import UserError
from fleet.errors import first_line
from fleet.scratch import sweep
from train.cluster import token_data
from train.cluster.checkpoints import CheckpointKeeper
from train.cluster.options import TrainingOptions
from train.cluster.ranks import Agreed, Ranks
from train.cluster.shared import OuterState, Shared
from train.cluster.stretches import Stretches, StretchMaker
from train.cluster.token_data import Batches, RandomBatches
from train.config import TrainConfig
from train.model import built, described, has_vocabulary, skeleton, structure
from train.optimizers import WEIGHTS


@contextlib.contextmanager
def opened(folder: Path, option: str = "--ckpt.path") -> Iterator[None]:
    """For this training alone, as long as it goes on: two in one folder would destroy each other's checkpoints."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    except OSError as error:
        raise UserError(f"{option} {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise UserError(f"{option} {folder}: another training is at work there ({lock.read(200)})") from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}")
        lock.flush()
        sweep(folder / "data", ".draft-")
        yield


@dataclass(frozen=True)
class Material:
    """What a training learns from, and in which words; `bound` is what decides the numbers."""

    words: int
    tokenizer: PreTrainedTokenizerBase | None  # random tokens are no words
    batches: Batches
    bound: dict[str, Any]


def prepared(options: TrainingOptions, c: TrainConfig, ranks: Ranks, stack: ExitStack) -> Material:
    """The first rank of each machine makes tokens of the text while all train."""
    if options.fake_data:
        words = embeddings(c) or c.vocab_size
        known = {"tokenizer": "", "text": f"random, below {words}"}
        return Material(words, None, RandomBatches(c, ranks, words), {**options.bound(), **known})
    tokenizer = ranks.same(lambda: token_data.tokenizer_for(c))
    words = len(tokenizer)
    if 0 < (fixed := embeddings(c)) < words:
        raise UserError(f"--path-model: {fixed} embeddings for a tokenizer of {words} words")
    known = {"tokenizer": ranks.alike(token_data.words_of(tokenizer), "the tokenizer")}
    name = ranks.same(lambda: token_data.name_of(c, tokenizer, words))
    known["text"] = ranks.alike(name, "the text")
    stretches = Stretches(c, options.ckpt.path / "data" / name, words)
    say(ranks, f"the text as tokens: {stretches.place}")
    maker = StretchMaker(stretches, tokenizer, options.num_workers) if ranks.leads_here else None
    if maker:
        stack.callback(maker.close)
    return Material(words, tokenizer, Batches(c, ranks, stretches, maker), {**options.bound(), **known})


def embeddings(c: TrainConfig) -> int:
    """No token may have a greater number; 0: as many as the tokenizer has words."""
    entry = c.initial_population[0]
    return getattr(described(entry), "vocab_size", 0) if has_vocabulary(entry) else 0


def model_of(options: TrainingOptions, c: TrainConfig, words: int, ranks: Ranks) -> PreTrainedModel:
    """On the first rank with its weights, which the others get from there: a machine has room for one of it, not for
    one of each rank. Where weights say what the configuration does not (heads that are not tied), each loads them."""
    model = ranks.same(lambda: _model(options, c, words, ranks.first))
    if len({*ranks.each(structure(model))}) > 1:
        model = ranks.same(lambda: _model(options, c, words, True))
        ranks.alike(structure(model), "the model")
    learning: PreTrainedModel = model.train()
    return learning


def _model(options: TrainingOptions, c: TrainConfig, words: int, weights: bool) -> PreTrainedModel:
    """Fresh weights follow from the seed."""
    entry = c.initial_population[0]
    try:
        model = built(entry, words, c.seed) if weights else skeleton(entry, words)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged file makes a library say
        raise UserError(f"--path-model {options.path_model}: cannot be loaded: {first_line(error)}") from None
    try:
        model.set_attn_implementation(options.attn_implementation)
    except (ValueError, ImportError) as error:
        raise UserError(f"--attn-implementation {options.attn_implementation}: {first_line(error)}") from None
    return model


# -- going on ----------------------------------------------------------------------------------------------------------


def outer_of(learner: Shared) -> OuterState:
    """Before the first round: it begins where the model is."""
    start = learner.vector.detach().cpu().clone()
    return OuterState(0, start, torch.zeros_like(start))


def tensors_of(learner: Shared, outer: OuterState | None = None) -> dict[str, Tensor]:
    kinds = {kind: learner.named(kind, vector) for kind, vector in learner.vectors.items()}
    if outer:  # on the model's device for this moment
        there = {"start": outer.start.to(learner.device), "momentum": outer.momentum.to(learner.device)}
        kinds |= {kind: learner.named(WEIGHTS, vector) for kind, vector in there.items()}
    return {f"{kind}.{name}": each for kind, named in kinds.items() for name, each in named.items()}


def resumed(options: TrainingOptions, keeper: CheckpointKeeper, learner: Shared, outer: OuterState | None) -> int:
    """The step from which on it goes."""
    if not (place := keeper.chosen(options.ckpt.resume)):
        if there := keeper.complete():
            raise Agreed(
                f"{there[-1]} is of an earlier training: --ckpt.resume true goes on from it; "
                "to begin anew, give another --ckpt.path"
            )
        return 0
    tensors = tensors_of(learner, outer)
    state = keeper.load(place, tensors, options.total_steps)
    if outer:
        outer.round = state.round
        for vector, kind in ((outer.start, "start"), (outer.momentum, "momentum")):
            vector.copy_(learner.joined({name: tensors[f"{kind}.{name}"] for name in learner.layout.shapes}))
    learner.recall(state.optimizer.model_dump())
    learner.loaded()
    keeper.begin(state.step)
    say(learner.ranks, f"going on from {place}")
    return state.step


# -- peers -------------------------------------------------------------------------------------------------------------


def met(
    options: TrainingOptions, learner: Shared, outer: OuterState, bound: Mapping[str, Any], stack: ExitStack
) -> Any:
    assert options.hv
    spec = {"model": digest_of(learner), "tokenizer": bound["tokenizer"], "seq_length": options.seq_length}
    spec |= {"strategy": options.sharding_strategy, "ranks": learner.ranks.count, "outer_lr": options.hv.outer_lr}
    spec |= {"total_steps": options.total_steps, "max_steps": options.last_step, "seed": options.seed}
    say(learner.ranks, f"waiting for {options.hv.galaxy_size} peers")
    peer = peers().Peer(options.hv, {**spec, "galaxy_size": options.hv.galaxy_size}, learner, outer)
    stack.callback(peer.close)
    return peer


def peers() -> Any:
    """Hivemind is only needed by those who ask for it."""
    try:
        from train.cluster import hivemind_peers
    except ImportError as error:
        raise UserError(f"--hv.*: {error}: {sys.executable} -m pip install -r requirements-hivemind.txt") from None
    return hivemind_peers


def digest_of(learner: Shared) -> str:
    """Of the shapes of all tensors: those who meet have the same."""
    shapes = {name: list(each.shape) for name, each in learner.named(WEIGHTS, learner.vector).items()}
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]


def say(ranks: Ranks, line: str) -> None:
    if ranks.first:
        plain.say(line)

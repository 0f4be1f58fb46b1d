"""What comes before the first step: text, model, checkpoint, and the other peers."""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fleet import plain
from fleet.plain import several
from fleet.run_config import UserError
from fleet.scratch import sweep
from train.cluster import token_data
from train.cluster.checkpoints import CheckpointKeeper
from train.cluster.options import TrainingOptions
from train.cluster.ranks import Agreed, Ranks
from train.cluster.shared_learner import OuterState, SharedLearner
from train.cluster.token_data import Batches, RandomBatches
from train.cluster.token_shards import TokenShardMaker, TokenShards
from train.model import built, described, has_vocabulary, in_a_line, skeleton, structure
from train.optimizers import WEIGHTS
from train.training_config import TrainConfig


@contextmanager
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
    fixed, bound = embeddings(c), options.bound()
    if options.fake_data:
        words = fixed or c.vocab_size
        bound |= {"tokenizer": "", "text": f"random, below {words}"}
        return Material(words, None, RandomBatches(c, ranks, words), bound)
    tokenizer = ranks.same(lambda: token_data.tokenizer_for(c))
    words = len(tokenizer)
    if 0 < fixed < words:
        raise UserError(f"--path-model: {fixed} embeddings for a tokenizer of {words} words")
    bound["tokenizer"] = ranks.alike(token_data.words_of(tokenizer), "the tokenizer")
    name = ranks.same(lambda: token_data.name_of(c, tokenizer, words))
    bound["text"] = ranks.alike(name, "the text")
    shards = TokenShards(c, options.ckpt.path / "data" / name, words)
    say(ranks, f"the text as tokens: {shards.place}")
    maker = TokenShardMaker(shards, tokenizer, options.num_workers) if ranks.leads_here else None
    if maker:
        stack.callback(maker.close)
    return Material(words, tokenizer, Batches(c, ranks, shards, maker), bound)


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
    model.train()
    return model


def _model(options: TrainingOptions, c: TrainConfig, words: int, weights: bool) -> PreTrainedModel:
    """Fresh weights follow from the seed."""
    entry = c.initial_population[0]
    with in_a_line(f"--path-model {options.path_model}: cannot be loaded"):
        model = built(entry, words, c.seed) if weights else skeleton(entry, words)
    with in_a_line(f"--attn-implementation {options.attn_implementation}"):
        model.set_attn_implementation(options.attn_implementation)
    return model


# -- going on ----------------------------------------------------------------------------------------------------------


def outer_of(learner: SharedLearner) -> OuterState:
    """Before the first round: it begins where the model is."""
    start = learner.vector.detach().cpu().clone()
    return OuterState(0, start, torch.zeros_like(start))


def tensors_of(learner: SharedLearner, outer: OuterState | None = None) -> dict[str, Tensor]:
    kinds = {kind: learner.named(kind, vector) for kind, vector in learner.vectors.items()}
    if outer:  # on the model's device for this moment
        there = {"start": outer.start.to(learner.device), "momentum": outer.momentum.to(learner.device)}
        kinds |= {kind: learner.named(WEIGHTS, vector) for kind, vector in there.items()}
    return {f"{kind}.{name}": each for kind, named in kinds.items() for name, each in named.items()}


def resumed(
    options: TrainingOptions, keeper: CheckpointKeeper, learner: SharedLearner, outer: OuterState | None
) -> int:
    """The step from which on it goes."""
    if not (place := keeper.chosen(options.ckpt.resume)):
        if there := keeper.complete():
            raise Agreed(
                f"{there[-1]} is of an earlier training: --ckpt.resume true goes on from it; "
                "to begin anew, give another --ckpt.path"
            )
        return 0
    return restored(keeper, place, learner, options.total_steps, outer)


def restored(
    keeper: CheckpointKeeper, place: Path, learner: SharedLearner, steps: int, outer: OuterState | None = None
) -> int:
    """Of a checkpoint, all that it has; and its step."""
    tensors = tensors_of(learner, outer)
    state = keeper.load(place, tensors, steps)
    if outer:
        outer.round = state.round
        for vector, kind in ((outer.start, "start"), (outer.momentum, "momentum")):
            vector.copy_(learner.joined({name: tensors[f"{kind}.{name}"] for name in learner.layout.shapes}))
    learner.load_optimizer_state(state.optimizer.model_dump())
    learner.loaded()
    keeper.begin(state.step)
    say(learner.ranks, f"going on from {place}")
    return state.step


def save(
    keeper: CheckpointKeeper,
    step: int,
    learner: SharedLearner,
    last: bool,
    advice: str,
    outer: OuterState | None = None,
) -> None:
    if not learner.finite():
        raise Agreed(f"step {step}: weights are not finite any more, and are not saved; {advice}")
    known = {"optimizer": learner.state(), **({"round": outer.round} if outer else {})}
    keeper.save(step, tensors_of(learner, outer), known, last, writes=learner.leads_part)


# -- peers -------------------------------------------------------------------------------------------------------------


def met(
    options: TrainingOptions, learner: SharedLearner, outer: OuterState, bound: Mapping[str, Any], stack: ExitStack
) -> Any:
    assert options.hv
    spec = {
        **{key: getattr(options, key) for key in ("seq_length", "total_steps", "seed")},
        **{"model": digest_of(learner), "tokenizer": bound["tokenizer"], "strategy": options.sharding_strategy},
        **{"ranks": learner.ranks.count, "outer_lr": options.hv.outer_lr, "max_steps": options.last_step},
        "galaxy_size": options.hv.galaxy_size,
    }
    say(learner.ranks, f"waiting for {several(options.hv.galaxy_size, 'peer')}")
    peer = peers().Peer(options.hv, spec, learner, outer)
    stack.callback(peer.close)
    return peer


def peers() -> Any:
    """Hivemind is only needed by those who ask for it."""
    try:
        from train.cluster import hivemind_peers
    except ImportError as error:
        raise UserError(f"--hv.*: {error}: {sys.executable} -m pip install -r requirements-hivemind.txt") from None
    return hivemind_peers


def digest_of(learner: SharedLearner) -> str:
    """Of the shapes of all tensors: those who meet have the same."""
    shapes = {name: list(each.shape) for name, each in learner.named(WEIGHTS, learner.vector).items()}
    return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]


def say(ranks: Ranks, line: str) -> None:
    if ranks.first:
        plain.say(line)

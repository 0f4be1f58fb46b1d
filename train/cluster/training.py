"""One training from its first step to its last: what all ranks do together."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fleet import lm_eval_command
from fleet.busy_notice import saying
from fleet.plain import several
from fleet.run_config import UserError
from merge.atomic_output import atomic_folder, free_for
from train.cluster.checkpoints import CheckpointKeeper
from train.cluster.logs import MetricsLog, log_of
from train.cluster.options import TrainingOptions
from train.cluster.ranks import Ranks
from train.cluster.shared_learner import SharedLearner, layers_of, learner_of
from train.cluster.startup import met, model_of, opened, outer_of, peers, prepared, resumed, save, say
from train.cluster.token_data import Batches
from train.kernels import in_fixed_order
from train.learner import rate
from train.model import can_be_built
from train.models_on_demand import ends_of
from train.training_config import TrainConfig

_ADVICE = "try a lower --lr, or --precision bf16-mixed"
_TELL = 5.0  # seconds between two lines of progress


def train(options: TrainingOptions, ranks: Ranks) -> int:
    """0: all steps are taken; 130: told to stop, with a checkpoint."""
    options = options.on(ranks.device.type)
    with ExitStack() as stack:
        c = ranks.same(lambda: checked(options, ranks, stack))
        in_fixed_order(torch.get_num_threads(), c.deterministic, c.precision)
        material = prepared(options, c, ranks, stack)
        learner = learner_of(model_of(options, c, material.words, ranks), c, ranks, options.sharding_strategy)
        keeper = CheckpointKeeper(options.ckpt.path, ranks, material.bound, options.ckpt.topk)
        stack.callback(keeper.close)
        outer = outer_of(learner) if options.hv else None
        begin = resumed(options, keeper, learner, outer)
        if begin < options.last_step:  # what cannot be had is known now, and Ctrl-C ends the wait for it at once
            material.batches.reach(options.hv.world_rank if options.hv else 0, begin)
        held = f"{learner.layout.size:,} numbers" + (f" on each of {ranks.count} ranks" if ranks.count > 1 else "")
        until = f", and no more than {options.last_step} now" if options.last_step < options.total_steps else ""
        say(ranks, f"{held}; step {begin} of {options.total_steps}{until}")
        kind = options.metric_logger_type if ranks.first else "dummy"
        lines = stack.enter_context(closing(log_of(kind, options.ckpt.path, options.project, begin)))
        peer = met(options, learner, outer, material.bound, stack) if outer else None
        ranks.listen()
        step = Steps(options, c, learner, keeper, lines, peer).run(material.batches, begin)
        keeper.wait(last=True)
    if step < options.last_step:
        say(ranks, f"stopped at step {step}" + ("; --ckpt.resume true goes on from there" if options.keeps else ""))
        return 130
    if material.tokenizer:
        export(learner, material.tokenizer, options, options.ckpt.path / "model")
        say(ranks, f"the model: {options.ckpt.path / 'model'}\n{lm_eval_command.hint(options.ckpt.path / 'model')}")
    return 0


def checked(options: TrainingOptions, ranks: Ranks, stack: ExitStack) -> TrainConfig:
    """What can be known before anything that takes long. Nobody else writes to the same place."""
    options.check(ranks.count)
    if options.hv:
        peers()
    if ranks.first:
        stack.enter_context(opened(options.ckpt.path))
        free_for(options.ckpt.path / "model", overwrite=True)
    if doubts := options.doubts():
        say(ranks, f"Note: {doubts}.")
    c = options.settings()
    can_be_built(c.initial_population[0])
    return c


@dataclass
class Steps:
    """The inner loop, with all that is done between two steps."""

    options: TrainingOptions
    c: TrainConfig
    learner: SharedLearner
    keeper: CheckpointKeeper
    log: MetricsLog
    peer: Any = None  # among others, where there are any

    def run(self, batches: Batches, begin: int) -> int:
        """The step at which it ended."""
        if self.options.hv and begin and self.peer.round < begin // self.options.hv.local_steps:
            self._exchange(begin)  # it ended before that meeting was over
        done, stopped, activations = self._later(begin), False, Activations(self.learner.model)
        while done < self.options.last_step and not stopped:
            done, stopped = self._steps(batches, done, activations)
        activations.watch(False)
        return done

    def _steps(self, batches: Batches, begin: int, activations: "Activations") -> tuple[int, bool]:
        """Until the end, or until it is told to stop, or has taken the state of others who are further."""
        o, learner, told, done = self.options, self.learner, 0.0, begin
        seen, tokens = time.monotonic(), o.total_batch_size * o.seq_length
        for done in self._taken(batches, begin, activations):
            loss, before, seen = learner.step_loss(done, _ADVICE), seen, time.monotonic()
            values = {"loss": loss, "lr": rate(self.c, done - 1), "tokens": float(done * tokens)}
            values["tokens_per_second"] = tokens / (seen - before)
            if seen - told > _TELL or done == o.last_step:
                told = seen
                say(learner.ranks, f"step {done}: loss {loss:.4f}, {values['tokens_per_second']:,.0f} tokens/s")
            if o.hv and done % o.hv.local_steps == 0:
                values |= self._exchange(done)
            self.log.write(done, {**values, **activations.taken()})
            stopped, later = learner.ranks.told_to_stop(), self._later(done)
            last = stopped or later >= o.last_step
            if last or (o.ckpt.interval and done % o.ckpt.interval == 0):
                self._save(later, last)
            if last or later > done:
                return later, stopped
            seen = time.monotonic()
        return done, False

    def _taken(self, batches: Batches, begin: int, activations: "Activations") -> Iterator[int]:
        """Each step's number once it is taken. The first one takes long, above all where the model is compiled."""
        rates = (rate(self.c, step) for step in range(begin, self.options.last_step))
        steps = self.learner.train(self._batches(batches, begin, activations), rates)
        compiled = ", for which the model is compiled" if self.options.torch_compile else ""
        with saying(f"taking step {begin + 1}{compiled}", partial(say, self.learner.ranks)):
            first = next(steps)
        yield begin + first
        yield from (begin + count for count in steps)

    def _exchange(self, step: int) -> dict[str, float]:
        """With the other peers. Where they cannot be met, what was learned is kept, and the next start tries again."""
        try:
            return dict(self.peer.exchange())
        except UserError:
            self._save(step, True)
            raise

    def _save(self, step: int, last: bool) -> None:
        if self.options.keeps:
            advice = "go on from an older checkpoint with a lower --lr"
            save(self.keeper, step, self.learner, last, advice, self.peer.state if self.peer else None)

    def _later(self, done: int) -> int:
        """Where others are further, that is where this peer goes on."""
        return max(done, self.peer.round * self.options.hv.local_steps) if self.peer and self.options.hv else done

    def _batches(self, batches: Batches, begin: int, activations: "Activations") -> Iterator[list[Tensor]]:
        o, ranks = self.options, self.learner.ranks
        slot, every = o.hv.world_rank if o.hv else 0, o.log_activations_steps
        there = batches.of(slot, begin, o.last_step, o.per_device_train_batch_size)
        for step in range(begin, o.last_step):
            try:
                parts = next(there)
            except UserError:
                if step > begin:  # whatever has become of the text, what was learned from it stays
                    self._save(step, True)
                raise
            self.learner.seed(int(np.random.default_rng([o.seed, slot, step, ranks.rank]).integers(1 << 31)))
            activations.watch(bool(every) and (step + 1) % (every or 1) == 0)
            yield parts


class Activations:
    """How large the numbers are that each layer passes on, at the steps at which somebody asks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers, self._hooks, self._found = layers_of(model), list[Any](), dict[str, float]()

    def watch(self, wanted: bool) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if wanted:
            hooks = (partial(self._note, number) for number in range(len(self._layers)))
            self._hooks = [each.register_forward_hook(hook) for each, hook in zip(self._layers, hooks, strict=True)]

    def taken(self) -> dict[str, float]:
        found, self._found = self._found, {}
        return found

    def _note(self, number: int, layer: Any, given: Any, said: Any) -> None:
        values = said[0] if isinstance(said, tuple) else said
        self._found[f"activations/layer{number}"] = float(values.detach().float().square().mean().sqrt())


def export(learner: SharedLearner, tokenizer: PreTrainedTokenizerBase, options: TrainingOptions, out: Path) -> None:
    """A folder that transformers loads, written by the first rank."""
    state, model = dict(learner.state_dict()), learner.model

    def write() -> None:
        tied = getattr(model, "all_tied_weights_keys", {}) if model.config.tie_word_embeddings else {}
        kept = {name: each.contiguous() for name, each in state.items() if name not in tied}
        name = type(model).__name__.removeprefix("FSDP")
        config = model.config.to_dict() | ends_of(tokenizer) | {"architectures": [name]}
        with atomic_folder(out, sum(each.nbytes for each in kept.values()), overwrite=True) as draft:
            save_file(kept, draft / "model.safetensors", {"format": "pt"})
            tokenizer.save_pretrained(draft)
            (draft / "README.md").write_text(card(options, out), encoding="utf-8")
            (draft / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
            shutil.copymode(draft / "config.json", draft / "model.safetensors")  # which would be the user's alone

    learner.ranks.some(learner.ranks.first, write)


def card(options: TrainingOptions, out: Path) -> str:
    """README.md, with the fields that the hub reads."""
    how = json.dumps(options.bound(), indent=2)
    return (
        f"---\nlibrary_name: transformers\n---\n# {out.parent.name}\n\nTrained by `train_fsdp` from "
        f"`{options.path_model}` on `{options.dataset_name_or_path}`, for {several(options.last_step, 'step')}.\n\n"
        f"{lm_eval_command.section(out)}\n\n## How it was made\n\n```json\n{how}\n```\n"
    )

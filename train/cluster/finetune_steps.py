"""The steps of one fine-tuning: what each rank makes of them, and what is done between them."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.run_config import UserError
from train import objectives
from train.cluster.checkpoints import CheckpointKeeper, step_of
from train.cluster.finetune_options import FinetuneOptions
from train.cluster.logs import MetricsLog
from train.cluster.shared_learner import SharedLearner
from train.cluster.startup import restored, save, say
from train.learner import MicroBatch, Objective, rate
from train.packing import Batch
from train.posttrain import finetune_rows
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_config import TrainConfig
from train.verdicts import NotFinite

_TELL = 5.0  # seconds between two lines of progress
_LOOKS = 10  # at the held-out rows, besides the first
Steps = Sequence[Sequence[Batch]]


# -- what several ranks make of a step ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """A batch of a rank's share in a step; where there are too few, one more that does not weigh."""

    part: Any
    count: float  # of the step, on the average of all ranks: what DDP and FSDP make of the ranks' gradients
    weight: float

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Share":
        return replace(self, part=self.part.to(device, non_blocking=non_blocking))


def objective_of(c: PosttrainConfig) -> Objective:
    loss = objectives.objective_of(c).loss(c)

    def shared(model: Any, share: Share, step: Sequence[Share] = ()) -> Tensor:
        return loss(model, share.part, [share]) * share.weight

    return shared


def shares(c: PosttrainConfig, learner: SharedLearner, steps: Steps) -> list[list[Share]]:
    """Of each step, this rank's, which is as many batches as any other's; with what the model says before it learns."""
    rank, count, found = learner.ranks.rank, learner.ranks.count, list[list[Share]]()
    for step in finetune_rows.with_progress(steps, "what the model says before it learns, of", "steps"):
        own, turns = step[rank::count], math.ceil(len(step) / count)
        (parts,) = objectives.with_first_logprobs(c, learner, [[*own, *step[:1]][:turns]])
        whole = sum(batch.count if not objectives.objective_of(c).pairs else batch.examples // 2 for batch in step)
        found.append([Share(part, whole / count, float(n < len(own))) for n, part in enumerate(parts)])
    return found


# -- the steps ---------------------------------------------------------------------------------------------------------


class Training:
    """All steps, and what is done between them."""

    def __init__(
        self,
        o: FinetuneOptions,
        c: PosttrainConfig,
        config: TrainConfig,
        learner: SharedLearner,
        keeper: CheckpointKeeper,
    ) -> None:
        self.o, self.c, self.config, self.learner, self.keeper = o, c, config, learner, keeper
        self.first_held = self.last_held = math.nan
        self._looked = dict[str, float]()
        self._advice = f"the learning rate is {c.lr:g}: begin anew, in another --out, with a lower --lr"

    def prepare(self, steps: Steps, held: Sequence[Batch]) -> int:
        """The step from which on it goes. Preferences are compared with the model as it was given, so that comes
        before a checkpoint is loaded."""
        learner, place = self.learner, self.keeper.chosen("true")
        begin = step_of(place) if place else 0
        self._steps = len(steps)
        self._held = shares(self.c, learner, [held])[0]
        self._shares = dict(enumerate(shares(self.c, learner, steps[begin:]), begin))
        self.first_held = self.look()
        say(learner.ranks, f"step 0 of {len(steps)}: {self._seen()}")
        if place:
            restored(self.keeper, place, learner, len(steps))
            self.look()
        return begin

    def run(self, begin: int, lines: MetricsLog) -> int:
        """The step after which it ended."""
        learner, ranks, steps = self.learner, self.learner.ranks, self._steps
        if begin == 0:
            lines.write(0, self._looked)
        started = saved = told = time.monotonic()
        every, done = max(1, math.ceil(steps / _LOOKS)), begin
        try:
            for count in learner.train(self._batches(begin), (rate(self.config, n) for n in range(begin, steps))):
                done, looked = begin + count, {}
                loss = learner.step_loss(done, self._advice)
                if done % every == 0 or done == steps:
                    self.look()
                    looked = self._looked
                lines.write(done, {"loss": loss, "lr": rate(self.config, done - 1), **looked})
                now = time.monotonic()
                if looked or now - told > _TELL:
                    told, left = now, (now - started) / count * (steps - done)
                    span = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
                    said = f", {self._seen()}" if looked else ""
                    say(ranks, f"step {done} of {steps}: loss {loss:.4f}{said}; {span} left")
                stopped = ranks.told_to_stop()
                if stopped or done == steps or ranks.any(ranks.first and now - saved > 60 * self.o.save_minutes):
                    saved = now
                    self._save(done, stopped or done == steps)
                if stopped:
                    break
        except NotFinite as error:
            raise UserError(f"after step {done}: {error}; {self._advice}") from None
        self.keeper.wait(last=True)
        return done

    def look(self) -> float:
        """At the held-out rows, for their loss: nats a learned token; or that of a preference, and beside it how often
        and by how much the better answer is ahead."""
        learner = self.learner
        learner.model.eval()
        with torch.no_grad():
            each = [self._measured(share) for share in self._held]
        learner.model.train()
        totals = {name: torch.stack([one[name] for one in each]).double().sum() for name in each[0]}
        self._looked = {name: float(learner.ranks.mean(total)) for name, total in totals.items()}
        self.last_held = self._looked["held_out"]
        return self.last_held

    def _measured(self, share: Share) -> Mapping[str, Tensor]:
        if not objectives.objective_of(self.c).pairs:
            return {"held_out": self.learner.loss(share)}
        part = share.part.to(self.learner.device)
        sums = objectives.preference_measures(self.learner.answer, part, self.c.dpo_beta)
        return {name: value / share.count * share.weight for name, value in sums.items()}

    def _seen(self) -> str:
        words = {"held_out": "held out", "reward_accuracy": "reward accuracy", "reward_margin": "margin"}
        return ", ".join(f"{words[name]} {value:.4f}" for name, value in self._looked.items())

    def _batches(self, begin: int) -> Iterator[list[MicroBatch]]:
        for step in range(begin, self._steps):
            numbers = [self.c.seed, step, self.learner.ranks.rank, 7]
            self.learner.seed(int(np.random.default_rng(numbers).integers(1 << 31)))
            yield self._shares.pop(step)

    def _save(self, step: int, last: bool) -> None:
        save(self.keeper, step, self.learner, last, self._advice)

"""The steps of one fine-tuning: what each rank makes of them, and what is done between them."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.config import UserError
from train import objectives
from train.cluster.before import say, tensors_of
from train.cluster.checkpoints import CheckpointKeeper
from train.cluster.finetune_options import FinetuneOptions
from train.cluster.logs import Log
from train.cluster.ranks import Agreed
from train.cluster.shared import Shared
from train.config import TrainConfig
from train.loop import NotFinite, Objective, Part, rate
from train.packing import Batch
from train.posttrain import finetune_rows
from train.posttrain.posttrain_config import PosttrainConfig

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


def shares(c: PosttrainConfig, learner: Shared, steps: Steps) -> list[list[Share]]:
    """Of each step, this rank's, which is as many batches as any other's; with what the model says before it learns."""
    rank, count, found = learner.ranks.rank, learner.ranks.count, list[list[Share]]()
    for step in finetune_rows.told(steps, "what the model says before it learns, of", "steps"):
        turns = math.ceil(len(step) / count)
        mine = [*step[rank::count], *step[:1]][:turns]
        (parts,) = objectives.begun(c, learner, [mine])
        whole = sum(batch.count if not objectives.objective_of(c).pairs else batch.examples // 2 for batch in step)
        own = len(step[rank::count])
        found.append([Share(part, whole / count, float(n < own)) for n, part in enumerate(parts)])
    return found


# -- the steps ---------------------------------------------------------------------------------------------------------


class Training:
    """All steps, and what is done between them."""

    def __init__(
        self, o: FinetuneOptions, c: PosttrainConfig, config: TrainConfig, learner: Shared, keeper: CheckpointKeeper
    ) -> None:
        self.o, self.c, self.config, self.learner, self.keeper = o, c, config, learner, keeper
        self.first_held = self.last_held = math.nan

    def prepare(self, steps: Steps, held: Sequence[Batch]) -> int:
        """The step from which on it goes. Preferences are compared with the model as it was given, so that comes
        before a checkpoint is loaded."""
        learner, place = self.learner, self.keeper.chosen("true")
        begin = int(place.name.removeprefix("step-")) if place else 0
        self._steps = len(steps)
        self._held = shares(self.c, learner, [held])[0]
        self._shares = dict(enumerate(shares(self.c, learner, steps[begin:]), begin))
        self.first_held = self.last_held = self.held_loss()
        say(learner.ranks, f"step 0 of {len(steps)}: held out {self.first_held:.4f}")
        if place:
            tensors = tensors_of(learner)
            state = self.keeper.load(place, tensors, len(steps))
            learner.recall(state.optimizer.model_dump())
            learner.loaded()
            say(learner.ranks, f"going on from {place}")
            self.last_held = self.held_loss()
        return begin

    def run(self, begin: int, lines: Log) -> int:
        """The step after which it ended."""
        learner, ranks, steps = self.learner, self.learner.ranks, self._steps
        if begin == 0:
            lines.write(0, {"held_out": self.first_held})
        started = saved = told = time.monotonic()
        every = max(1, math.ceil(steps / _LOOKS))
        done = begin
        try:
            for count in learner.train(self._batches(begin), (rate(self.config, n) for n in range(begin, steps))):
                done, looked = begin + count, {}
                loss = self._loss(done)
                if done % every == 0 or done == steps:
                    self.last_held = self.held_loss()
                    looked = {"held_out": self.last_held}
                lines.write(done, {"loss": loss, "lr": rate(self.config, done - 1), **looked})
                now = time.monotonic()
                if looked or now - told > _TELL:
                    told, left = now, (now - started) / count * (steps - done)
                    said = f", held out {self.last_held:.4f}" if looked else ""
                    say(ranks, f"step {done} of {steps}: loss {loss:.4f}{said}; {_span(left)} left")
                stopped = ranks.told_to_stop()
                if stopped or done == steps or ranks.any(ranks.first and now - saved > 60 * self.o.save_minutes):
                    saved = now
                    self._save(done, stopped or done == steps)
                if stopped:
                    break
        except NotFinite as error:
            raise UserError(f"after step {done}: {error}; {_advice(self.c)}") from None
        self.keeper.wait(last=True)
        return done

    def held_loss(self) -> float:
        """On the held-out rows: nats a learned token, or the loss of a preference."""
        learner = self.learner
        learner.model.eval()
        with torch.no_grad():
            total = torch.stack([learner.loss(share) for share in self._held]).double().sum()
        learner.model.train()
        return float(learner.ranks.mean(total))

    def _batches(self, begin: int) -> Iterator[list[Part]]:
        for step in range(begin, self._steps):
            numbers = [self.c.seed, step, self.learner.ranks.rank, 7]
            self.learner.seed(int(np.random.default_rng(numbers).integers(1 << 31)))
            yield self._shares.pop(step)

    def _loss(self, step: int) -> float:
        """Of the step that was just taken."""
        loss = float(self.learner.ranks.mean(self.learner.total))
        self.learner.total.zero_()
        if not math.isfinite(loss):
            raise Agreed(f"step {step}: the loss became {loss}; {_advice(self.c)}")
        return loss

    def _save(self, step: int, last: bool) -> None:
        if not self.learner.finite():
            raise Agreed(f"step {step}: weights are not finite any more, and are not saved; {_advice(self.c)}")
        self.keeper.save(step, tensors_of(self.learner), {"optimizer": self.learner.state()}, last)


def _advice(c: PosttrainConfig) -> str:
    return f"the learning rate is {c.lr:g}: begin anew, in another --out, with a lower --lr"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

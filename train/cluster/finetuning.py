"""One model learns from rows, by as many ranks as there are: the loop, the objectives and the adapters of a child."""

import hashlib
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.config import UserError, whole
from merge.output import free_for
from train import objectives, packing, text
from train.adapters import adapted
from train.chat import Example
from train.cluster.before import opened, say, tensors_of
from train.cluster.checkpoints import CheckpointKeeper
from train.cluster.finetune_options import FinetuneOptions, Size, longest, model_named, settings
from train.cluster.finetuned_folder import Finetuned, Opened, write
from train.cluster.logs import Log, log_of
from train.cluster.ranks import Agreed, Ranks
from train.cluster.shared import Shared, learner_of
from train.config import TrainConfig
from train.loop import NotFinite, Objective, Part, in_fixed_order, rate
from train.member.posttrained import in_epochs, inner
from train.posttrain import finetune_rows
from train.posttrain.posttrain_config import PosttrainConfig

_TELL = 5.0  # seconds between two lines of progress
_LOOKS = 10  # at the held-out rows, besides the first
_TRIED = 64  # tokens of a row in which it is tried out whether a model can read several examples in one


def finetune(model: str, rows: str, out: Path, o: FinetuneOptions, ranks: Ranks) -> int:
    """0: the model is written; 130: told to stop, with a checkpoint."""
    with ExitStack() as stack:
        model, rows, state = ranks.same(lambda: checked(model, rows, out, o, ranks, stack))
        in_fixed_order(torch.get_num_threads())
        donor = ranks.same(lambda: Opened(model, o.trust_remote_code))
        data = ranks.same(lambda: data_of(donor, rows, o, ranks))
        device = "cpu" if o.sharding_strategy != "NO_SHARD" else str(ranks.device)
        child = ranks.same(lambda: donor.loaded(device))
        c, steps, held = ranks.same(lambda: planned(donor, child.live.model, model, rows, data, o, ranks))
        learns = adapted(child.live.model, c.adapter, c.seed, ranks.device) if c.adapter else child.live.model
        config = inner(c, len(steps), 1.0)
        learner = learner_of(learns, config, ranks, o.sharding_strategy, objective_of(c))
        bound = {**o.bound(), "model": model, "rows": data.digest, "ranks": ranks.count, "objective": data.objective}
        keeper = CheckpointKeeper(state, ranks, bound, 1)
        stack.callback(keeper.close)
        training = Training(o, c, config, learner, keeper)
        begin = training.prepare(steps, held)
        lines = log_of(o.metrics if ranks.first else "dummy", state, "finetune", begin)
        stack.callback(lines.close)
        ranks.listen()
        step = training.run(begin, lines)
        ranks.deaf()
        if step < len(steps):
            say(ranks, f"stopped after step {step} of {len(steps)}; the same command goes on from there")
            return 130
        say(ranks, f"writing {out}")
        losses = training.first_held, training.last_held
        chats = bool(donor.tokenizer.chat_template)
        about = Finetuned(model, Path(rows).name, c, len(steps), *losses, o.merge, chats)
        write(out, donor, child, learner, about, o.overwrite)
        ranks.same(lambda: _cleared(state, out), ranks.first)
        for line in about.next_commands(out):
            say(ranks, line)
    return 0


def checked(
    model: str, rows: str, out: Path, o: FinetuneOptions, ranks: Ranks, stack: ExitStack
) -> tuple[str, str, Path]:
    """What can be known before anything that takes long, and where checkpoints go. Nobody else writes there."""
    model, rows = model_named(model), whole(rows, Path(), text.ROW_FILES)
    if o.full and (o.merge or o.four_bits or o.target):
        raise UserError("--full: all weights learn; --merge, --four-bits and --target are for adapters")
    if o.sharding_strategy != "NO_SHARD" and not o.full:
        raise UserError(f"--sharding-strategy {o.sharding_strategy} is for --full; with an adapter each device has all")
    if not o.full and not o.merge and ("+" in model or model.endswith(".gguf")):
        raise UserError(
            f"MODEL {model}: an adapter is loaded beside a folder or a hub's model, which this is not; give --merge, "
            "or make a folder of it first: python -m merge.gguf (or python -m merge)"
        )
    if not (0 < o.epochs <= 1000 and o.save_minutes > 0):
        raise UserError("--epochs (at most 1000) and --save-minutes are above 0")
    state = out.with_name(out.name + ".training")
    if ranks.first:
        free_for(out, o.overwrite)
        stack.enter_context(opened(state, "--out"))
    return model, rows, state


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FinetuneData:
    """Examples to learn from, and to measure by: of each row one, or two."""

    objective: str
    learned: Sequence[Sequence[Example]]
    held: Sequence[Sequence[Example]]
    digest: str


def data_of(donor: Opened, rows: str, o: FinetuneOptions, ranks: Ranks) -> FinetuneData:
    name, split = o.dataset_config, o.split
    objective = o.objective or finetune_rows.objective_for(rows, name, split)
    there = finetune_rows.read(rows, name, split, objective)
    if o.held_out:
        kept = finetune_rows.read(whole(o.held_out, Path(), text.ROW_FILES), name, split, objective)
        there = finetune_rows.without(there, kept)
    else:
        there, kept = finetune_rows.held_apart(there)
    most, found = longest(o, donor.positions), []
    for what, some in (("to learn from", there), ("held out", kept)):
        told = finetune_rows.told(some, f"{what}: tokens of")
        made = objectives.OBJECTIVES[objective].examples(told, donor.tokenizer, most, rows)
        cut = f", {made.cut:,} cut at {most:,} tokens" if made.cut else ""
        lost = f", {made.empty:,} left out, with nothing to learn" if made.empty else ""
        say(ranks, f"{len(made.kept):,} examples {what}{cut}{lost}")
        if not made.kept:
            raise UserError(f"{rows}: no row {what} has anything to learn in its first {most:,} tokens")
        found.append(made.kept)
    digest = hashlib.sha256()
    for example in chain(*found[0], *found[1]):
        digest.update(example.tokens.tobytes() + example.learned.tobytes() + b"/")
    return FinetuneData(objective, *found, digest.hexdigest()[:16])


Steps = Sequence[Sequence[packing.Batch]]


def planned(
    donor: Opened, plain: Any, model: str, rows: str, data: FinetuneData, o: FinetuneOptions, ranks: Ranks
) -> tuple[PosttrainConfig, Steps, Sequence[packing.Batch]]:
    """All settings, the steps, and the batches that measure."""
    packed = not objectives.OBJECTIVES[data.objective].pairs and packing.can_pack(plain, _TRIED)
    size = Size(donor.positions, donor.words, ranks.count, ranks.device.type, packed)
    c = settings(o, model, rows, data.objective, data.learned, size)
    steps = objectives.steps_of(c, plain, in_epochs(data.learned, c.sft_epochs, (c.seed,)))
    held = [*chain(*objectives.steps_of(c, plain, [*chain(*data.held)]))]
    warmup = o.warmup_steps if o.warmup_steps is not None else round(len(steps) / 10)
    c = c.model_copy(update={"warmup_steps": warmup})
    tokens = sum(len(example.tokens) for example in chain(*data.learned)) * c.sft_epochs
    what = f"an adapter of rank {c.adapter.r}" if c.adapter else "all weights"
    say(ranks, f"{what}, {len(steps):,} steps of about {tokens / len(steps):,.0f} tokens, learning rate {c.lr:g}")
    return c, steps, held


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
    for step in steps:
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

    def prepare(self, steps: Steps, held: Sequence[packing.Batch]) -> int:
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
            yield self._shares.pop(step)  # type: ignore[misc]

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


def _cleared(state: Path, out: Path) -> None:
    """What was needed to go on, once there is nothing to go on with. The losses stay beside the model."""
    if (table := state / "metrics.csv").is_file():
        shutil.copyfile(table, out / table.name)
    shutil.rmtree(state, ignore_errors=True)

"""One model learns from rows, by as many ranks as there are: the loop, the objectives and the adapters of a child."""

import hashlib
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from fleet.errors import refuse
from fleet.plain import several
from fleet.run_config import UserError, whole
from merge.atomic_output import free_for
from train import objectives, packing, text_sources
from train.adapters import adapted
from train.chat_examples import Example
from train.cluster.checkpoints import CheckpointKeeper, check_settings
from train.cluster.finetune_options import FinetuneOptions, Size, longest, model_named, settings
from train.cluster.finetune_steps import Steps, Training, objective_of
from train.cluster.finetuned_folder import Finetuned, Opened, write
from train.cluster.logs import log_of
from train.cluster.ranks import Ranks
from train.cluster.shared_learner import learner_of
from train.cluster.startup import opened, say
from train.kernels import in_fixed_order
from train.member.posttraining_tasks import in_epochs, inner
from train.posttrain import finetune_rows
from train.posttrain.posttrain_config import PosttrainConfig

_TRIED = 64  # tokens of a row in which it is tried out whether a model can read several examples in one


def finetune(model: str, rows: str, out: Path, o: FinetuneOptions, ranks: Ranks) -> int:
    """0: the model is written; 130: told to stop, with a checkpoint."""
    with ExitStack() as stack:
        model, rows, state = ranks.same(lambda: checked(model, rows, out, o, ranks, stack))
        in_fixed_order(torch.get_num_threads(), o.deterministic, o.precision or "")
        disable_progress_bar()
        donor = ranks.same(lambda: Opened(model, o.trust_remote_code))
        data = ranks.same(lambda: data_of(donor, rows, o, ranks))
        bound = {**o.bound(), "model": model, "rows": data.digest, "ranks": ranks.count, "objective": data.objective}
        ranks.same(lambda: check_settings(state, bound))
        device = "cpu" if o.sharding_strategy != "NO_SHARD" else str(ranks.device)
        say(ranks, f"loading {model}")
        child = ranks.same(lambda: donor.loaded(device))
        c, steps, held = ranks.same(lambda: planned(donor, child.live.model, model, rows, data, o, ranks))
        learns = adapted(child.live.model, c.adapter, c.seed, ranks.device) if c.adapter else child.live.model
        config = inner(c, len(steps), 1.0)
        learner = learner_of(learns, config, ranks, o.sharding_strategy, objective_of(c))
        keeper = CheckpointKeeper(state, ranks, bound, 1)
        stack.callback(keeper.close)
        training = Training(o, c, config, learner, keeper)
        begin = training.prepare(steps, held)
        with closing(log_of(o.metrics if ranks.first else "dummy", state, "finetune", begin)) as lines:
            ranks.listen()
            step = training.run(begin, lines)
            ranks.deaf()
        if step < len(steps):
            say(ranks, f"stopped after step {step} of {len(steps)}; the same command goes on from there")
            return 130
        say(ranks, f"writing {out}")
        losses, chats = (training.first_held, training.last_held), bool(donor.tokenizer.chat_template)
        about = Finetuned(model, Path(rows).name, c, len(steps), *losses, o.merge, chats)
        write(out, donor, child, learner, about, o.overwrite)
        ranks.some(ranks.first, lambda: _cleared(state, out))
        say(ranks, f"held-out loss {about.before:.4f} before, {about.after:.4f} after: {out}")
        for what, line in zip(("For llama.cpp", "Evaluate it"), about.next_commands(out), strict=True):
            say(ranks, f"{what}: {line}")
    return 0


def checked(
    model: str, rows: str, out: Path, o: FinetuneOptions, ranks: Ranks, stack: ExitStack
) -> tuple[str, str, Path]:
    """What can be known before anything that takes long, and where checkpoints go. Nobody else writes there."""
    model, rows = model_named(model), whole(rows, Path(), text_sources.ROW_FILES)
    beside = not o.full and not o.merge and ("+" in model or model.endswith(".gguf"))
    problems = (
        (
            o.full and (o.merge or o.four_bits or o.target),
            "--full: all weights learn; --merge, --four-bits and --target are for adapters",
        ),
        (
            o.sharding_strategy != "NO_SHARD" and not o.full,
            f"--sharding-strategy {o.sharding_strategy} is for --full; with an adapter each device has all",
        ),
        (
            beside,
            f"MODEL {model}: an adapter is loaded beside a folder or a hub's model, which this is not; give --merge, "
            "or make a folder of it first: python -m merge.gguf (or python -m merge)",
        ),
        (
            not (0 < o.epochs <= 1000 and o.save_minutes > 0),
            "--epochs (at most 1000) and --save-minutes are above 0",
        ),
    )
    refuse(problems)
    state = out.with_name(out.name + ".training")
    if ranks.first:
        free_for(out, o.overwrite)
        stack.enter_context(opened(state, "--out"))
        stack.callback(_tidied, state)
        known = {**o.bound(), "model": model, "ranks": ranks.count}
        known.pop("" if o.objective else "objective", None)  # rows will say it
        check_settings(state, known)
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
        kept = finetune_rows.read(whole(o.held_out, Path(), text_sources.ROW_FILES), name, split, objective)
        there = finetune_rows.without(there, kept)
    else:
        there, kept = finetune_rows.held_apart(there)
    most = longest(o, donor.positions)

    def examples(some: Sequence[text_sources.PlacedRow], what: str) -> Sequence[Sequence[Example]]:
        shown = finetune_rows.with_progress(some, f"{what}: tokens of", "rows")
        made = objectives.OBJECTIVES[objective].examples(shown, donor.tokenizer, most)
        cut = f", {made.cut:,} cut at {most:,} tokens" if made.cut else ""
        lost = f", {made.empty:,} left out, with nothing to learn" if made.empty else ""
        say(ranks, f"{several(len(made.kept), 'example')} {what}{cut}{lost}")
        if not made.kept:
            raise UserError(f"{rows}: no row {what} has anything to learn in its first {most:,} tokens")
        return made.kept

    learned, held, digest = examples(there, "to learn from"), examples(kept, "held out"), hashlib.sha256()
    for example in chain(*learned, *held):
        digest.update(example.tokens.tobytes() + example.learned.tobytes() + b"/")
    return FinetuneData(objective, learned, held, digest.hexdigest()[:16])


def planned(
    donor: Opened, plain: Any, model: str, rows: str, data: FinetuneData, o: FinetuneOptions, ranks: Ranks
) -> tuple[PosttrainConfig, Steps, Sequence[packing.Batch]]:
    """All settings, the steps, and the batches that measure."""
    packed = not objectives.OBJECTIVES[data.objective].pairs and packing.can_pack(plain, _TRIED)
    size = Size(donor.positions, donor.words, ranks.count, ranks.device.type, packed)
    c = settings(o, model, rows, data.objective, data.learned, size)
    steps = objectives.steps_of(c, plain, in_epochs(data.learned, c.sft_epochs, (c.seed,)))
    held_out = [*chain(*data.held)]  # one of them may be longer than all that is learned
    wide = c.model_copy(update={"seq_length": max(c.seq_length, *(len(each.tokens) for each in held_out))})
    held = [*chain(*objectives.steps_of(wide, plain, held_out))]
    if o.warmup_steps is None:
        c = c.model_copy(update={"warmup_steps": round(len(steps) / 10)})
    tokens = sum(len(example.tokens) for example in chain(*data.learned)) * c.sft_epochs
    what = f"an adapter of rank {c.adapter.r}" if c.adapter else "all weights"
    each = f"{several(len(steps), 'step')} of about {tokens / len(steps):,.0f} tokens"
    say(ranks, f"{what}, {each}, learning rate {c.lr:g}")
    return c, steps, held


def _tidied(state: Path) -> None:
    """Where nothing was begun, nothing is left."""
    if state.is_dir() and {path.name for path in state.iterdir()} <= {".lock"}:
        shutil.rmtree(state)


def _cleared(state: Path, out: Path) -> None:
    """What was needed to go on, once there is nothing to go on with. The losses stay beside the model."""
    for kept in (each for each in state.iterdir() if each.name in ("metrics.csv", "tensorboard")):
        (shutil.copytree if kept.is_dir() else shutil.copyfile)(kept, out / kept.name)
    shutil.rmtree(state, ignore_errors=True)

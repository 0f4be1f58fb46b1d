"""What a child of post-training learns: from which rows, in which steps, and what becomes of its weights."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fleet.work import Work
from train import objectives, packing
from train.adapters import adapted
from train.adapters import merged as with_adapter_merged
from train.batches import shuffled
from train.chat import Example
from train.config import TrainConfig, alone
from train.loop import Learner, rate
from train.member import dna, first_members, vectors
from train.member.posttraining_runtime import ChildModel, PosttrainingRuntime
from train.objectives import Comparison
from train.optimizers import MOMENTS, WEIGHTS
from train.packing import Batch
from train.posttrain.example_rows import ExampleRows
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_tasks import BredArgs

Metrics = Mapping[str, Any]
Born = Callable[[], ChildModel]  # a child as its parents made it, before it has learned anything
Finetuned = tuple[ChildModel, dict[str, Any]]


def finetuned(runtime: PosttrainingRuntime, work: Work, args: BredArgs, born: Born) -> Finetuned:
    """The child learns. Whatever breaks in here leaves a model that is half changed, and that nobody may use again."""
    try:
        examples = chosen(runtime.config, work, args, work.recipe.genome)
        child, total, steps = _with_batches(runtime, work, args, born, examples)
    except BaseException:
        runtime.dismiss()
        raise
    runtime.forget()
    tokens = sum(len(example.tokens) for example in examples)
    return child, {"train_loss": total / steps, "tokens": tokens, "steps": steps}


def _with_batches(
    runtime: PosttrainingRuntime, work: Work, args: BredArgs, born: Born, examples: Sequence[Example]
) -> tuple[ChildModel, float, int]:
    """The child afterwards, the losses of all steps, and how many these were."""
    c, child = runtime.config, born()
    model, objective = child.live.model, objectives.sft_loss
    if args.how == "dpo":
        objective = partial(objectives.preference_loss, beta=c.dpo_beta)
    if c.adapter:
        model = adapted(model, c.adapter, c.seed + args.generation * 4096 + args.slot, runtime.device)
    steps = batches_of(c, model, examples)
    config = inner(c, len(steps), work.recipe.genome["rate"])
    if not c.adapter:
        total = _learned(work, args, runtime.learner(child.live, config, objective), config, steps)
        return child, total, len(steps)
    total = _learned(work, args, Learner(model, config, runtime.device, objective), config, steps)
    if c.adapter.four_bits:  # the weights with all their bits have to come from the parents again
        runtime.dismiss()
        child = born()
        with_adapter_merged(model, child.live.model)
    else:
        with_adapter_merged(model)
    return child, total, len(steps)


def _learned(work: Work, args: BredArgs, learner: Learner, config: TrainConfig, steps: Sequence[list[Any]]) -> float:
    """The inner loop, from its beginning or from where an earlier attempt got to; the losses of all steps."""
    done, total = 0, 0.0
    if state := work.resume():
        done, total = state.step, state.state["total"]
        for kind in (WEIGHTS, MOMENTS):
            vectors.load(state, kind, learner.whole(kind))
        learner.recall(state.state["optimizer"])

    def save(saver: Any) -> Metrics:
        total = learner.summed_loss()
        for kind in (WEIGHTS, MOMENTS):
            vectors.save(saver, kind, learner.whole(kind))
        return {"total": total, "optimizer": learner.state()}

    def seeded() -> Iterator[list[Any]]:
        for step in range(done, len(steps)):
            learner.seed(_seed(config, args, step))
            yield steps[step]

    rates = (rate(config, step) for step in range(done, len(steps)))
    for step in learner.train(seeded(), rates, total):
        work.between_steps(done + step, save)
    learner.check()
    return learner.summed_loss()


def _seed(config: TrainConfig, args: BredArgs, step: int) -> int:
    """Of a step's dropout: the child's own, whoever makes it and after whatever else."""
    return int(np.random.default_rng([config.seed, args.generation, args.slot, step, 7]).integers(1 << 31))


def inner(c: PosttrainConfig, steps: int, factor: float) -> TrainConfig:
    """The inner loop's settings: a schedule of its own for every child."""
    return TrainConfig(
        seed=c.seed,
        warmup_steps=min(c.warmup_steps, steps // 2),
        lr=highest(c, factor),
        weight_decay=c.weight_decay,
        clip=c.clip,
        precision=c.precision,
        threads=c.threads,
        **{**alone(steps), "lr_schedule": c.lr_schedule},
    )


def highest(c: PosttrainConfig, factor: float) -> float:
    """What a genome makes of LR."""
    return min(10.0, c.lr * factor)


def chosen(c: PosttrainConfig, work: Work, args: BredArgs, genome: dna.Genome) -> list[Example]:
    """What a child learns from: of each data set its share, as often as it may see them, in an order of its own."""
    wanted_of = dna.portions(dna.mixture(c, genome), c.sft_examples)
    key, found = (c.seed, args.generation, args.slot), list[list[Example]]()
    for n, name in enumerate(dna.names(c)):
        if not (wanted := wanted_of.get(name)):
            continue
        rows = rows_of(work, n)
        numbers = [shuffled(k % rows.train, rows.train, (*key, n, k // rows.train)) for k in range(wanted)]
        found += [rows.get(number) for number in numbers]
    epochs = [np.random.default_rng([*key, 5, n]).permutation(len(found)) for n in range(math.ceil(c.sft_epochs))]
    order = np.concatenate(epochs)[: max(1, round(len(found) * c.sft_epochs))]
    return [example for n in order for example in found[int(n)]]


def batches_of(c: PosttrainConfig, model: Any, examples: Sequence[Example]) -> list[list[Any]]:
    """Steps, each of some batches: rows in which several examples stand, where the model can read such rows."""
    pairs = c.mutation == "dpo"  # each answer has a row of its own, the chosen one before the rejected one
    packed = not pairs and packing.can_pack(model, min(64, c.seq_length))
    rows = packing.plan([len(example.tokens) for example in examples], c.seq_length, packed)
    size = c.batch_size * (2 if pairs else 1)
    batches = [_batch(examples, rows[n : n + size], packed) for n in range(0, len(rows), size)]
    made = [_compared(model, batch) for batch in batches] if pairs else batches
    several = c.gradient_accumulation
    return [made[n : n + several] for n in range(0, len(made), several)]


def _batch(examples: Sequence[Example], rows: Sequence[Sequence[int]], packed: bool) -> Batch:
    """Numbered anew: a batch knows its own examples only."""
    order = [number for row in rows for number in row]
    there = {number: n for n, number in enumerate(order)}
    return packing.batch([examples[number] for number in order], [[there[n] for n in row] for row in rows], packed)


def _compared(model: Any, batch: Batch) -> Comparison:
    """With what the model says before it has learned anything."""
    with torch.no_grad():
        model.eval()
        moved = batch.to(model.device)
        return Comparison(batch, objectives.answer_logprobs(model, moved).cpu())


def rows_of(work: Work, number: int) -> ExampleRows:
    return ExampleRows.open(work.inputs[f"0/data-{number}"].path(first_members.ROWS))

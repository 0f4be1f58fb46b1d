"""What a child of post-training learns: from which rows, in which steps, and what becomes of its weights."""

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from fleet.config import Wrong
from fleet.work import Work
from train import objectives, packing
from train.adapters import adapted
from train.adapters import merged as with_adapter_merged
from train.batches import shuffled
from train.chat import Example
from train.config import TrainConfig
from train.loop import Learner, NotFinite, rate
from train.member import founding, vectors
from train.member.school import Pupil, School
from train.member.studio import named
from train.objectives import Comparison
from train.packing import Batch
from train.posttrain import dna
from train.posttrain.config import PosttrainConfig
from train.posttrain.data import Rows

T = TypeVar("T")
Metrics = Mapping[str, Any]
Born = Callable[[], Pupil]  # a child as its parents made it, before it has learned anything
Taught = tuple[Pupil, dict[str, Any]]
_MOMENTS = ("average", "square")
log = logging.getLogger(__name__)


def taught(school: School, work: Work, born: Born) -> Taught:
    """The child learns. Where that comes to numbers that are none, it stays what its parents made it."""
    try:
        return with_room(school, work, lambda parts: _taught(school, work, born, parts))
    except NotFinite as why:
        log.warning("%s: %s: it stays what its parents made it", work.id, why)
    return born(), {"diverged": True}


def with_room(school: School, work: Work, do: Callable[[int], T]) -> T:
    """A GPU that has no room for a batch gets halves of it, once."""
    c = school.config
    try:
        return do(1)
    except torch.OutOfMemoryError:
        log.warning("%s: no room for a batch of %d rows; halves of it are tried", work.id, c.batch_size)
    gc.collect()
    try:
        return do(2)
    except torch.OutOfMemoryError as error:
        room = ""
        if torch.cuda.is_available():
            room = " ({:.1f} of {:.1f} GB are free)".format(*(size / 1e9 for size in torch.cuda.mem_get_info()))
        raise Wrong(
            f"the GPU has no room for half a batch of {c.batch_size} rows of {c.seq_length} tokens{room}; lower "
            "BATCH_SIZE or SEQ_LENGTH, or use an ADAPTER"
        ) from error


def _taught(school: School, work: Work, born: Born, parts: int) -> Taught:
    """Whatever breaks in here leaves a model that is half changed, and that nobody may use again."""
    try:
        examples = chosen(school.config, work, work.recipe.genome)
        pupil, total, steps = _with_lesson(school, work, born, examples, parts)
    except BaseException:
        school.dismiss()
        raise
    school.forget()
    tokens = sum(len(example.tokens) for example in examples)
    more = {"halved": True} if parts > 1 else {}
    return pupil, {"train_loss": total / steps, "tokens": tokens, "steps": steps, **more}


def _with_lesson(
    school: School, work: Work, born: Born, examples: Sequence[Example], parts: int
) -> tuple[Pupil, float, int]:
    """The child afterwards, the losses of all steps, and how many these were."""
    c, settings, pupil = school.config, work.recipe.train, born()
    model, objective = pupil.live.model, objectives.sft_loss
    if settings["how"] == "dpo":
        objective = partial(objectives.preference_loss, beta=c.dpo_beta)
    if c.adapter:
        model = adapted(model, c.adapter, c.seed + settings["round"] * 4096 + settings["slot"], school.device)
    steps = lesson(c, model, examples, parts)
    config = inner(c, len(steps), work.recipe.genome["rate"])
    if not c.adapter:
        total = _learned(work, school.learner(pupil.live, config, objective), config, steps)
        return pupil, total, len(steps)
    total = _learned(work, Learner(model, config, school.device, objective), config, steps)
    if c.adapter.four_bits:  # the weights with all their bits have to come from the parents again
        school.dismiss()
        pupil = born()
        with_adapter_merged(model, pupil.live.model)
    else:
        with_adapter_merged(model)
    return pupil, total, len(steps)


def _learned(work: Work, learner: Learner, config: TrainConfig, steps: Sequence[list[Any]]) -> float:
    """The inner loop, from its beginning or from where an earlier attempt got to; the losses of all steps."""
    done, total = 0, 0.0
    if state := work.resume():
        done, total = state.step, state.state["total"]
        vectors.load(state, "vector", learner.vector)
        for name, moment in zip(_MOMENTS, learner.moments, strict=True):
            vectors.load(state, name, moment)
        learner.recall(state.state["optimizer"])

    def save(saver: Any) -> Metrics:
        vectors.save(saver, "vector", learner.vector)
        for name, moment in zip(_MOMENTS, learner.moments, strict=True):
            vectors.save(saver, name, moment)
        return {"total": learner.summed_loss(), "optimizer": learner.state()}

    def seeded() -> Iterator[list[Any]]:
        for step in range(done, len(steps)):
            learner.seed(_seed(config, work, step))
            yield steps[step]

    rates = (rate(config, step) for step in range(done, len(steps)))
    for step in learner.train(seeded(), rates, total):
        work.between_steps(done + step, save)
    if not bool(learner.vector.isfinite().all()):
        raise NotFinite("its weights are not finite")
    return learner.summed_loss()


def _seed(config: TrainConfig, work: Work, step: int) -> int:
    """Of a step's dropout: the child's own, whoever makes it and after whatever else."""
    place = work.recipe.train["round"], work.recipe.train["slot"]
    return int(np.random.default_rng([config.seed, *place, step, 7]).integers(1 << 31))


def inner(c: PosttrainConfig, steps: int, factor: float) -> TrainConfig:
    """The inner loop's settings: a schedule of its own for every child."""
    return TrainConfig(
        seed=c.seed,
        max_generations=1,
        warm_start_steps=0,
        inner_steps=steps,
        warmup_steps=min(c.warmup_steps, steps // 2),
        lr=min(10.0, c.lr * factor),
        lr_schedule=c.lr_schedule,
        weight_decay=c.weight_decay,
        clip=c.clip,
        precision=c.precision,
        threads=c.threads,
    )


def chosen(c: PosttrainConfig, work: Work, genome: dna.Genome) -> list[Example]:
    """What a child learns from: of each data set its share, as often as it may see them, in an order of its own."""
    wanted_of, settings = dna.portions(dna.mixture(c, genome), c.sft_examples), work.recipe.train
    key, found = (c.seed, settings["round"], settings["slot"]), list[list[Example]]()
    for n, name in enumerate(dna.names(c)):
        if not (wanted := wanted_of.get(name)):
            continue
        rows = rows_of(work, n)
        numbers = [shuffled(k % rows.train, rows.train, (*key, n, k // rows.train)) for k in range(wanted)]
        found += [rows.get(number) for number in numbers]
    epochs = [np.random.default_rng([*key, 5, n]).permutation(len(found)) for n in range(math.ceil(c.sft_epochs))]
    order = np.concatenate(epochs)[: max(1, round(len(found) * c.sft_epochs))]
    return [example for n in order for example in found[int(n)]]


def lesson(c: PosttrainConfig, model: Any, examples: Sequence[Example], parts: int) -> list[list[Any]]:
    """Steps, each of some batches: rows in which several examples stand, where the model can read such rows."""
    pairs = c.mutation == "dpo"  # each answer has a row of its own, the chosen one before the rejected one
    packed = not pairs and packing.can_pack(model, min(64, c.seq_length))
    rows = packing.plan([len(example.tokens) for example in examples], c.seq_length, packed)
    together = 2 if pairs else 1  # rows that cannot be parted
    size = c.batch_size * together
    part = -(-c.batch_size // parts) * together
    whole = [rows[n : n + size] for n in range(0, len(rows), size)]
    batches = [[_batch(examples, each[n : n + part], packed) for n in range(0, len(each), part)] for each in whole]
    made = [[_compared(model, part) for part in each] for each in batches] if pairs else batches
    several = c.gradient_accumulation
    return [[part for each in made[n : n + several] for part in each] for n in range(0, len(made), several)]


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


def rows_of(work: Work, number: int) -> Rows:
    return Rows.open(named(work, f"data-{number}").path(founding.ROWS))

"""Members of post-training: the given models and the data in one form, children that merge and learn, looks at them."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fleet.config import Wrong
from fleet.work import Failed, Maker, Work
from merge.methods import METHODS
from train import objectives, packing
from train.adapters import adapted
from train.adapters import merged as with_adapter_merged
from train.batches import shuffled
from train.chat import Example
from train.config import TrainConfig
from train.loop import Learner, NotFinite, rate
from train.member import founding, vectors
from train.member.school import Pupil, School, merged, place_of, saved
from train.member.studio import named
from train.objectives import Comparison
from train.packing import Batch
from train.posttrain import dna, fitness
from train.posttrain.config import LOSS, PosttrainConfig
from train.posttrain.data import Rows

Metrics = Mapping[str, Any]
log = logging.getLogger(__name__)


def maker(config: PosttrainConfig) -> Maker:
    """What a worker makes members with."""
    school = School(config)

    def make(work: Work) -> Metrics:
        try:
            return KINDS[work.recipe.merge["kind"]](school, work)
        except (NotFinite, Wrong) as verdict:
            raise Failed(str(verdict)) from None

    return make


# -- children ---------------------------------------------------------------------------------------------------------


def make_child(school: School, work: Work) -> Metrics:
    """Merge the parents, learn from what the genome chooses, publish; then answer."""
    c = school.config
    places = {id: place_of(work.parents[id]) for id in work.recipe.merge["of"]}
    recipe = crossed(c, list(places), work.recipe.genome)
    dtype = getattr(torch, c.dtype or str(named(work, "init-0").metrics["dtype"]))
    if not work.recipe.train:
        merged(work, {**recipe, "out_dtype": str(dtype).removeprefix("torch.")}, places, school.how)
        return look(school, work, school.take_on(recipe, places), dtype)
    pupil = school.take_on(recipe, places)
    learned = taught(school, work, pupil)
    saved(work, pupil, dtype, school.how)
    return {**learned, **look(school, work, pupil, dtype)}


def crossed(c: PosttrainConfig, parents: Sequence[str], genome: dna.Genome) -> dict[str, Any]:
    """The merge engine's recipe: CROSSOVER with its curves, or those of the genome. One parent stays what it is."""
    if len(parents) == 1:
        return {"merge_method": "passthrough", "models": [{"model": parents[0]}]}
    given = {k: v for k, v in c.crossover.items() if k not in ("method", "base_model")}
    parameters, method = genome.get("crossover", given), METHODS[c.crossover["method"]]
    recipe: dict[str, Any] = {"merge_method": c.crossover["method"]}
    if method.base == "required" and method.most == 1:
        return {**recipe, "base_model": parents[0], "models": [{"model": parents[1]}], "parameters": parameters}
    if "weight" in method.params and "weight" not in parameters:
        parameters = {**parameters, "weight": 1 / len(parents)}
    base = {"base_model": c.crossover["base_model"]} if "base_model" in c.crossover else {}
    return {**recipe, **base, "models": [{"model": each} for each in parents], "parameters": parameters}


# -- learning ---------------------------------------------------------------------------------------------------------


def taught(school: School, work: Work, pupil: Pupil) -> dict[str, Any]:
    """The child learns; a GPU that has no room for a batch gets halves of it, once."""
    try:
        return _taught(school, work, pupil, 1)
    except torch.OutOfMemoryError:
        log.warning("%s: no room for a batch of %d rows; halves of it are tried", work.id, school.config.batch_size)
        torch.cuda.empty_cache()
    try:
        return {**_taught(school, work, pupil, 2), "halved": True}
    except torch.OutOfMemoryError as error:
        c, room = school.config, ""
        if torch.cuda.is_available():
            room = " ({:.1f} of {:.1f} GB are free)".format(*(size / 1e9 for size in torch.cuda.mem_get_info()))
        raise Wrong(
            f"the GPU has no room for half a batch of {c.batch_size} rows of {c.seq_length} tokens{room}; lower "
            "BATCH_SIZE or SEQ_LENGTH, or use an ADAPTER"
        ) from error


def _taught(school: School, work: Work, pupil: Pupil, parts: int) -> dict[str, Any]:
    c, settings = school.config, work.recipe.train
    examples = chosen(c, work, work.recipe.genome)
    model = pupil.live.model
    if c.adapter:
        model = adapted(model, c.adapter, c.seed + settings["round"] * 4096 + settings["slot"], school.device)
    steps = lesson(c, model, examples, parts)
    config = inner(c, len(steps), work.recipe.genome["rate"])
    objective = objectives.sft_loss
    if settings["how"] == "dpo":
        objective = partial(objectives.preference_loss, beta=c.dpo_beta)
    if c.adapter:
        learner = Learner(model, config, school.device, objective)
    else:
        learner = school.learner(pupil.live, config, objective)
    total = _learned(work, learner, config, steps)
    if c.adapter:
        with_adapter_merged(model)
    school.forget(bool(c.adapter))
    tokens = sum(len(example.tokens) for example in examples)
    return {"train_loss": total / len(steps), "tokens": tokens, "steps": len(steps)}


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

    rates = (rate(config, step) for step in range(done, len(steps)))
    for step in learner.train(iter(steps[done:]), rates, total):
        work.between_steps(done + step, save)
    return learner.summed_loss() if done < len(steps) else total


_MOMENTS = ("average", "square")


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
    """What a child learns from: of each data set its share, in an order that belongs to the child."""
    shares, settings = dna.mixture(c, genome), work.recipe.train
    count, found = max(1, round(c.sft_examples * c.sft_epochs)), list[list[Example]]()
    for n, name in enumerate(dna.names(c)):
        if not (wanted := round(shares.get(name, 0.0) * count)):
            continue
        rows = rows_of(work, n)
        key = (c.seed, settings["round"], settings["slot"], n)
        numbers = [shuffled(k % rows.train, rows.train, (*key, k // rows.train)) for k in range(wanted)]
        found += [rows.get(number) for number in numbers]
    if not found:
        raise Wrong("the genome's weights leave no data to learn from")
    order = np.random.default_rng([c.seed, settings["round"], settings["slot"], 5]).permutation(len(found))
    return [example for n in order for example in found[int(n)]]


def lesson(c: PosttrainConfig, model: Any, examples: Sequence[Example], parts: int) -> list[list[Any]]:
    """Steps, each of some batches: rows in which several examples stand, where the model can read such rows."""
    pairs = c.mutation == "dpo"  # each answer has a row of its own, the chosen one before the rejected one
    packed = not pairs and packing.can_pack(model, min(64, c.seq_length))
    size = max(1, c.batch_size // parts) * (2 if pairs else 1)
    rows = packing.plan([len(example.tokens) for example in examples], c.seq_length, packed)
    batches = [_batch(examples, rows[n : n + size], packed) for n in range(0, len(rows), size)]
    made = [_compared(model, each) for each in batches] if pairs else batches
    several = c.gradient_accumulation * parts
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


# -- looking ----------------------------------------------------------------------------------------------------------


def look_at(school: School, work: Work) -> Metrics:
    """A member that was made before answers."""
    id = work.recipe.merge["at"]
    places = {id: place_of(work.parents[id])}
    recipe = {"merge_method": "passthrough", "models": [{"model": id}]}
    return look(school, work, school.take_on(recipe, places), None)


def look(school: School, work: Work, pupil: Pupil, dtype: torch.dtype | None) -> Metrics:
    """Tasks, and the loss on held-out rows: of the numbers that were published."""
    c, how, model = school.config, work.recipe.evaluate, pupil.live.model
    if dtype not in (None, torch.float32):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype).float())
    model.eval()
    single, values = dict[str, Sequence[float]](), dict[str, float]()
    if exam := school.exam(pupil.live.tokenizer):
        marks, means = fitness.marks_of(c, exam, model, how)
        single, values = {**marks}, {**means}
    if c.asks_loss:
        single[LOSS] = losses(c, work, model)
        values[LOSS] = math.fsum(single[LOSS]) / len(single[LOSS])
    found = fitness.fitness_of(c, single, values)
    judging = how["on"] == "judging"
    score = {} if judging or work.recipe.merge["kind"] == "look" else {"score": found.value}
    return {**found.metrics(keep=judging), **score}


def losses(c: PosttrainConfig, work: Work, model: Any) -> list[float]:
    """Nats a learned token, row by row, of held-out rows of all data sets."""
    numbers = {str(n): range(rows_of(work, n).held) for n in range(len(c.mutation_datasets))}
    found: list[float] = []
    for name, drawn in fitness.drawn(c, numbers, work.recipe.evaluate).items():
        rows = rows_of(work, int(name))
        examples = [rows.get(number, held=True)[0] for number in drawn]
        for begin in range(0, len(examples), c.batch_size):
            some = examples[begin : begin + c.batch_size]
            batch = packing.batch(some, [(n,) for n in range(len(some))], False).to(model.device)
            with torch.inference_mode():
                nats = -objectives.answer_logprobs(model, batch)
            found += [float(x) / max(1, int(e.learned[1:].sum())) for x, e in zip(nats, some, strict=True)]
    return found


def rows_of(work: Work, number: int) -> Rows:
    return Rows.open(named(work, f"data-{number}").path(founding.ROWS))


KINDS: Mapping[str, Callable[[School, Work], Metrics]] = {
    "init": founding.make_init,
    "data": founding.make_data,
    "child": make_child,
    "look": look_at,
}

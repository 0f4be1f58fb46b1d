"""Members of post-training: the given models and the data in one form, children that merge and learn, looks at them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleet.tasks import Task, making
from fleet.work import Maker, Work
from train import objectives, packing
from train.loop import NotFinite, in_fixed_order
from train.member import first_members
from train.member.crossing import crossed
from train.member.divergence import tried
from train.member.finetune import Finetuned, finetuned, highest, rows_of
from train.member.posttraining_runtime import ChildModel, PosttrainingRuntime, merged, saved
from train.posttrain import posttrain_fitness
from train.posttrain.posttrain_config import LOSS, PosttrainConfig
from train.posttrain.posttrain_tasks import BredArgs, DataArgs, GivenArgs, Questioned
from train.round_zero import FIRST, unique
from train.verdicts import judging

Metrics = Mapping[str, Any]
_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH, or an ADAPTER need less, in a "
    "run with another PROJECT_NAME"
)


def maker(config: PosttrainConfig) -> Maker:
    """What a worker makes members with."""
    in_fixed_order(config.threads)
    return judging(lambda: PosttrainingRuntime(config), making(TASKS), _ADVICE)


# -- children ---------------------------------------------------------------------------------------------------------


def make_child(runtime: PosttrainingRuntime, work: Work, args: BredArgs) -> Metrics:
    """Merge the parents, learn from what the genome chooses, answer; publish. One that diverges stays what its parents
    made it."""
    c = runtime.config
    parents = work.recipe.parents
    places = {id: work.inputs[id].folder for id in unique(*parents, args.base)}
    recipe = crossed(c, parents, work.recipe.genome, args.base)
    dtype = getattr(torch, c.dtype or str(work.inputs[FIRST].metrics["dtype"]))
    if not args.how:
        merged(work, {**recipe, "out_dtype": str(dtype).removeprefix("torch.")}, places, runtime.how)
        return look(runtime, work, args, runtime.take_on(recipe, places), dtype)

    def learned() -> Finetuned:
        child, metrics = finetuned(runtime, work, args, lambda: runtime.take_on(recipe, places))
        if not child.fits(dtype):
            raise NotFinite(f"its weights are too large for {dtype}")
        return child, {**metrics, **look(runtime, work, args, child, dtype)}

    def untrained() -> Finetuned:
        child = runtime.take_on(recipe, places)
        return child, {**look(runtime, work, args, child, dtype)}

    rate = highest(c, work.recipe.genome["rate"])
    (child, metrics), diverged = tried(work, "", rate, learned, untrained)
    saved(work, child, dtype, runtime.how)
    return {**metrics, **diverged}


# -- looking ----------------------------------------------------------------------------------------------------------


def look_at(runtime: PosttrainingRuntime, work: Work, args: Questioned) -> Metrics:
    """A member that was made before answers."""
    (id,) = work.recipe.parents
    places = {id: work.inputs[id].folder}
    recipe = {"merge_method": "passthrough", "models": [{"model": id}]}
    return look(runtime, work, args, runtime.take_on(recipe, places), None)


def look(
    runtime: PosttrainingRuntime, work: Work, asked: Questioned, child: ChildModel, dtype: torch.dtype | None
) -> Metrics:
    """Tasks, and the loss on held-out rows: of the numbers that were published."""
    c, model = runtime.config, child.live.model
    if dtype not in (None, torch.float32):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype).float())
    model.eval()
    single, values = dict[str, Sequence[float]](), dict[str, float]()
    if evaluation := runtime.evaluation(child.live.tokenizer):
        marks, means = posttrain_fitness.marks_of(c, evaluation, model, asked)
        single, values = {**marks}, {**means}
    if c.asks_loss:
        single[LOSS] = losses(c, work, asked, model)
        values[LOSS] = math.fsum(single[LOSS]) / len(single[LOSS])
    if not all(map(math.isfinite, values.values())):
        raise NotFinite(f"what it answers comes to {values}")
    found = posttrain_fitness.fitness_of(c, single, values)
    judging = asked.on == "judging"
    return {**found.metrics(keep=judging), **({} if judging else {"score": found.value})}


def losses(c: PosttrainConfig, work: Work, asked: Questioned, model: Any) -> list[float]:
    """Nats a learned token, row by row, of held-out rows of all data sets."""
    there = {str(n): rows_of(work, n) for n in range(len(c.mutation_datasets))}
    numbers = {name: range(rows.held) for name, rows in there.items()}
    found: list[float] = []
    for name, drawn in posttrain_fitness.drawn(c, numbers, asked).items():
        rows = there[name]
        examples = [rows.get(number, held=True)[0] for number in drawn]
        for begin in range(0, len(examples), c.batch_size):
            some = examples[begin : begin + c.batch_size]
            batch = packing.batch(some, [(n,) for n in range(len(some))], False).to(model.device)
            with torch.inference_mode():
                nats = -objectives.answer_logprobs(model, batch)
            found += [float(x) / max(1, int(e.learned[1:].sum())) for x, e in zip(nats, some, strict=True)]
    return found


TASKS: Mapping[str, Task[PosttrainingRuntime]] = {
    "init": Task(first_members.make_init, GivenArgs),
    "data": Task(first_members.make_data, DataArgs),
    "child": Task(make_child, BredArgs),
    "look": Task(look_at, Questioned),
}

"""Members of post-training: the given models and the data in one form, children that merge and learn, looks at them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fleet.work import Maker, Work
from train import objectives, packing
from train.loop import NotFinite, in_fixed_order
from train.member import first_members
from train.member.crossing import crossed
from train.member.divergence import tried
from train.member.finetune import Finetuned, finetuned, highest, rows_of
from train.member.posttraining_runtime import ChildModel, PosttrainingRuntime, merged, saved
from train.member.pretraining_runtime import named
from train.posttrain import posttrain_fitness
from train.posttrain.posttrain_config import LOSS, PosttrainConfig
from train.verdicts import judging

Metrics = Mapping[str, Any]
_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH, or an ADAPTER need less, in a "
    "run with another PROJECT_NAME"
)


def maker(config: PosttrainConfig) -> Maker:
    """What a worker makes members with."""
    in_fixed_order(config.threads)

    def make(runtime: PosttrainingRuntime, work: Work) -> Metrics:
        return KINDS[work.recipe.merge["kind"]](runtime, work)

    return judging(lambda: PosttrainingRuntime(config), make, _ADVICE)


# -- children ---------------------------------------------------------------------------------------------------------


def make_child(runtime: PosttrainingRuntime, work: Work) -> Metrics:
    """Merge the parents, learn from what the genome chooses, answer; publish. One that diverges stays what its parents
    made it."""
    c = runtime.config
    of, base = work.recipe.merge["of"], work.recipe.merge.get("base", "")
    places = {id: work.parents[id].folder for id in (*of, base) if id}
    recipe = crossed(c, of, work.recipe.genome, base)
    dtype = getattr(torch, c.dtype or str(named(work, "init-0").metrics["dtype"]))
    if not work.recipe.train:
        merged(work, {**recipe, "out_dtype": str(dtype).removeprefix("torch.")}, places, runtime.how)
        return look(runtime, work, runtime.take_on(recipe, places), dtype)

    def learned() -> Finetuned:
        child, metrics = finetuned(runtime, work, lambda: runtime.take_on(recipe, places))
        if not child.fits(dtype):
            raise NotFinite(f"its weights are too large for {dtype}")
        return child, {**metrics, **look(runtime, work, child, dtype)}

    def untrained() -> Finetuned:
        child = runtime.take_on(recipe, places)
        return child, {**look(runtime, work, child, dtype)}

    rate = highest(c, work.recipe.genome["rate"])
    (child, metrics), diverged = tried(work, rate, learned, untrained)
    saved(work, child, dtype, runtime.how)
    return {**metrics, **diverged}


# -- looking ----------------------------------------------------------------------------------------------------------


def look_at(runtime: PosttrainingRuntime, work: Work) -> Metrics:
    """A member that was made before answers."""
    id = work.recipe.merge["at"]
    places = {id: work.parents[id].folder}
    recipe = {"merge_method": "passthrough", "models": [{"model": id}]}
    return look(runtime, work, runtime.take_on(recipe, places), None)


def look(runtime: PosttrainingRuntime, work: Work, child: ChildModel, dtype: torch.dtype | None) -> Metrics:
    """Tasks, and the loss on held-out rows: of the numbers that were published."""
    c, how, model = runtime.config, work.recipe.evaluate, child.live.model
    if dtype not in (None, torch.float32):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype).float())
    model.eval()
    single, values = dict[str, Sequence[float]](), dict[str, float]()
    if evaluation := runtime.evaluation(child.live.tokenizer):
        marks, means = posttrain_fitness.marks_of(c, evaluation, model, how)
        single, values = {**marks}, {**means}
    if c.asks_loss:
        single[LOSS] = losses(c, work, model)
        values[LOSS] = math.fsum(single[LOSS]) / len(single[LOSS])
    if not all(map(math.isfinite, values.values())):
        raise NotFinite(f"what it answers comes to {values}")
    found = posttrain_fitness.fitness_of(c, single, values)
    judging = how["on"] == "judging"
    return {**found.metrics(keep=judging), **({} if judging else {"score": found.value})}


def losses(c: PosttrainConfig, work: Work, model: Any) -> list[float]:
    """Nats a learned token, row by row, of held-out rows of all data sets."""
    there = {str(n): rows_of(work, n) for n in range(len(c.mutation_datasets))}
    numbers = {name: range(rows.held) for name, rows in there.items()}
    found: list[float] = []
    for name, drawn in posttrain_fitness.drawn(c, numbers, work.recipe.evaluate).items():
        rows = there[name]
        examples = [rows.get(number, held=True)[0] for number in drawn]
        for begin in range(0, len(examples), c.batch_size):
            some = examples[begin : begin + c.batch_size]
            batch = packing.batch(some, [(n,) for n in range(len(some))], False).to(model.device)
            with torch.inference_mode():
                nats = -objectives.answer_logprobs(model, batch)
            found += [float(x) / max(1, int(e.learned[1:].sum())) for x, e in zip(nats, some, strict=True)]
    return found


KINDS: Mapping[str, Callable[[PosttrainingRuntime, Work], Metrics]] = {
    "init": first_members.make_init,
    "data": first_members.make_data,
    "child": make_child,
    "look": look_at,
}

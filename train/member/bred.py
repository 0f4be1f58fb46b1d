"""Members of post-training: the given models and the data in one form, children that merge and learn, looks at them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fleet.config import Wrong
from fleet.work import Failed, Maker, Work
from merge.methods import METHODS
from train import objectives, packing
from train.loop import NotFinite
from train.member import founding
from train.member.lesson import rows_of, taught, with_room
from train.member.school import Pupil, School, merged, saved
from train.member.studio import named
from train.posttrain import dna, fitness
from train.posttrain.config import LOSS, PosttrainConfig

Metrics = Mapping[str, Any]


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
    of, base = work.recipe.merge["of"], work.recipe.merge.get("base", "")
    places = {id: work.parents[id].folder for id in (*of, base) if id}
    recipe = crossed(c, of, work.recipe.genome, base)
    dtype = getattr(torch, c.dtype or str(named(work, "init-0").metrics["dtype"]))
    if not work.recipe.train:
        merged(work, {**recipe, "out_dtype": str(dtype).removeprefix("torch.")}, places, school.how)
        return look(school, work, school.take_on(recipe, places), dtype)
    pupil, learned = taught(school, work, lambda: school.take_on(recipe, places))
    saved(work, pupil, dtype, school.how)
    return {**learned, **look(school, work, pupil, dtype)}


def crossed(c: PosttrainConfig, parents: Sequence[str], genome: dna.Genome, base: str = "") -> dict[str, Any]:
    """The merge engine's recipe: CROSSOVER with its curves, or those of the genome. One parent stays what it is."""
    if len(parents) == 1:
        return {"merge_method": "passthrough", "models": [{"model": parents[0]}]}
    parameters, method = genome.get("crossover", c.curves), METHODS[c.crossover["method"]]
    recipe: dict[str, Any] = {"merge_method": c.crossover["method"]}
    if method.base == "required" and method.most == 1:
        return {**recipe, "base_model": parents[0], "models": [{"model": parents[1]}], "parameters": parameters}
    if "weight" in method.params and "weight" not in parameters:
        parameters = {**parameters, "weight": 1 / len(parents)}
    named = {"base_model": base} if c.base_model else {}
    return {**recipe, **named, "models": [{"model": each} for each in parents], "parameters": parameters}


# -- looking ----------------------------------------------------------------------------------------------------------


def look_at(school: School, work: Work) -> Metrics:
    """A member that was made before answers."""
    id = work.recipe.merge["at"]
    places = {id: work.parents[id].folder}
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
        single[LOSS] = with_room(school, work, lambda parts: losses(c, work, model, parts))
        values[LOSS] = math.fsum(single[LOSS]) / len(single[LOSS])
    found = fitness.fitness_of(c, single, values)
    judging = how["on"] == "judging"
    return {**found.metrics(keep=judging), **({} if judging else {"score": found.value})}


def losses(c: PosttrainConfig, work: Work, model: Any, parts: int = 1) -> list[float]:
    """Nats a learned token, row by row, of held-out rows of all data sets."""
    size = -(-c.batch_size // parts)
    there = {str(n): rows_of(work, n) for n in range(len(c.mutation_datasets))}
    numbers = {name: range(rows.held) for name, rows in there.items()}
    found: list[float] = []
    for name, drawn in fitness.drawn(c, numbers, work.recipe.evaluate).items():
        rows = there[name]
        examples = [rows.get(number, held=True)[0] for number in drawn]
        for begin in range(0, len(examples), size):
            some = examples[begin : begin + size]
            batch = packing.batch(some, [(n,) for n in range(len(some))], False).to(model.device)
            with torch.inference_mode():
                nats = -objectives.answer_logprobs(model, batch)
            found += [float(x) / max(1, int(e.learned[1:].sum())) for x, e in zip(nats, some, strict=True)]
    return found


KINDS: Mapping[str, Callable[[School, Work], Metrics]] = {
    "init": founding.make_init,
    "data": founding.make_data,
    "child": make_child,
    "look": look_at,
}

"""What a worker of post-training makes: the given models and the data in one form, children that merge and learn."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from fleet.tasks import Args, Task, dispatcher
from fleet.work import Maker, Work
from train import objectives, packing
from train.batches import shuffled
from train.chat_examples import Example
from train.few_questions import calibrated
from train.fitness_from import Interview
from train.kernels import in_fixed_order, looking
from train.learner import Learner, rate
from train.member import inner_loop, posttraining_genome, rl_tasks
from train.member.posttraining_round_zero import ROWS, make_data, make_init
from train.member.posttraining_runtime import ChildModel, PosttrainingRuntime, merged
from train.member.posttraining_weights import WholeChild, child_weights, looked_at
from train.posttrain import posttrain_fitness
from train.posttrain.example_rows import ExampleRows
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import LOSS
from train.recipe_arguments import (
    EvaluationArgs,
    InitArgs,
    PosttrainChildArgs,
    RolloutArgs,
    SourceArgs,
)
from train.rl.grpo import grpo_loss, settings_of
from train.training_config import TrainConfig, alone
from train.verdicts import NotFinite, with_verdicts

Metrics = Mapping[str, Any]
T = TypeVar("T")
Finetuned = tuple[Callable[[], None], dict[str, Any]]  # what writes its files, and its metrics
_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH, or an ADAPTER need less, in a "
    "run with another PROJECT_NAME"
)


def maker(config: PosttrainConfig) -> Maker:
    """What a worker makes members with."""
    in_fixed_order(config.threads, config.deterministic, config.precision)
    return with_verdicts(lambda: PosttrainingRuntime(config), dispatcher(TASKS), _ADVICE)


def make_child(runtime: PosttrainingRuntime, work: Work, args: PosttrainChildArgs) -> Metrics:
    """Merge the parents, learn from what the genome chooses, answer; write the files. One that diverges stays what its
    parents made it."""
    c, weights_of_child = runtime.config, partial(child_weights, runtime, work, args)
    dtype = runtime.dtype_of(work)
    if not args.learns_by:
        weights = weights_of_child()
        recipe = {**weights.recipe, "out_dtype": str(dtype).removeprefix("torch.")}
        merged(work, recipe, weights.places, runtime.merge_options)
        return evaluated(runtime, work, args, weights.born(), dtype)

    def learned() -> Finetuned:
        weights = weights_of_child()
        try:
            child, metrics = finetuned(runtime, work, args, weights)
        except BaseException:  # whatever breaks in there leaves a model that is half changed
            runtime.dismiss()
            raise
        runtime.forget()
        if not child.fits(dtype):
            raise NotFinite(f"its weights are too large for {dtype}")
        metrics = {
            **metrics,
            **rl_tasks.metrics_of_own_rollouts(work, args),
            **evaluated(runtime, work, args, child, dtype),
        }
        return partial(weights.write_files, child), metrics

    def untrained() -> Finetuned:
        weights = weights_of_child()
        child = weights.born()
        return partial(weights.write_files, child), {**evaluated(runtime, work, args, child, dtype)}

    (write_files, metrics), diverged = inner_loop.learn_or_fall_back(
        work, "", inner_loop.slower(highest(c, work.recipe.genome["rate"])), learned, untrained
    )
    write_files()
    return {**metrics, **diverged}


# -- it learns --------------------------------------------------------------------------------------------------------


def finetuned(
    runtime: PosttrainingRuntime, work: Work, args: PosttrainChildArgs, weights: WholeChild
) -> tuple[ChildModel, dict[str, Any]]:
    """The child learns."""
    c, lessons = runtime.config, learned_from(runtime.config, work, args)
    if not lessons:
        return weights.born(), {"tokens": 0, "steps": 0}
    model = weights.learning()
    of_rewards = c.mutation == "grpo"
    steps: list[list[Any]] = (
        rl_tasks.steps(runtime, work, model, lessons) if of_rewards else objectives.steps_of(c, model, lessons)
    )
    config = inner(c, len(steps), work.recipe.genome["rate"])
    loss = partial(grpo_loss, s=settings_of(c.of_grpo)) if of_rewards else objectives.objective_of(c).loss(c)
    if c.adapter:
        learner = Learner(model, config, runtime.device, loss)
    else:
        learner = runtime.learner(weights.child.live, config, loss)

    def seed(step: int) -> int:
        """The child's own, whoever makes it and after whatever else."""
        return int(np.random.default_rng([c.seed, args.generation, args.slot, step, 7]).integers(1 << 31))

    parts = (
        rl_tasks.with_first_logprobs(learner, steps)
        if of_rewards
        else objectives.with_first_logprobs(c, learner, steps)
    )
    total = inner_loop.train(
        work, learner, learner.reset_optimizer, len(steps), parts.__getitem__, partial(rate, config), seed
    )
    return weights.learned(model), {
        "train_loss": total / len(steps),
        "tokens": sum(len(each.tokens) for each in lessons),
        "steps": len(steps),
    }


def inner(c: PosttrainConfig, steps: int, factor: float) -> TrainConfig:
    """The inner loop's settings: a schedule of its own for every child."""
    return TrainConfig(
        seed=c.seed,
        warmup_steps=min(c.warmup_steps, steps // 2),
        lr=highest(c, factor),
        weight_decay=c.weight_decay,
        precision=c.precision,
        deterministic=c.deterministic,
        threads=c.threads,
        **{**alone(steps), "clip": c.clip, "lr_schedule": c.lr_schedule},
    )


def highest(c: PosttrainConfig, factor: float) -> float:
    """What a genome makes of LR."""
    return min(10.0, c.lr * factor)


def learned_from(c: PosttrainConfig, work: Work, args: PosttrainChildArgs) -> list[Any]:
    """Examples, or answers that were rewarded, in an order of the child's own."""
    if c.mutation != "grpo":
        return training_examples(c, work, args)
    found = [[each] for each in rl_tasks.lessons(c, work, args)]
    return in_epochs(found, c.sft_epochs, (c.seed, args.generation, args.slot)) if found else []


def training_examples(c: PosttrainConfig, work: Work, args: PosttrainChildArgs) -> list[Example]:
    """What a child learns from: of each data set its share, as often as it may see them, in an order of its own."""
    wanted_of = posttraining_genome.portions(posttraining_genome.mixture(c, work.recipe.genome), c.sft_examples)
    key, found = (c.seed, args.generation, args.slot), list[list[Example]]()
    for n, name in enumerate(posttraining_genome.names(c)):
        if wanted := wanted_of.get(name):
            rows = rows_of(work, n)
            there = len(rows.parts["train"])  # the first ones
            numbers = [shuffled(k % there, there, (*key, n, k // there)) for k in range(wanted)]
            found += [rows.get(number) for number in numbers]
    return in_epochs(found, c.sft_epochs, key)


def in_epochs(rows: Sequence[Sequence[T]], epochs: float, key: Sequence[int]) -> list[T]:
    """All rows as often as that, each time in another order."""
    orders = [np.random.default_rng([*key, 5, n]).permutation(len(rows)) for n in range(math.ceil(epochs))]
    order = np.concatenate(orders)[: max(1, round(len(rows) * epochs))]
    return [example for n in order for example in rows[int(n)]]


def rows_of(work: Work, number: int) -> ExampleRows:
    return ExampleRows.open(work.inputs[f"0/data-{number}"].path(ROWS))


# -- it is evaluated --------------------------------------------------------------------------------------------------


def evaluate(runtime: PosttrainingRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """A member that was made before answers."""
    (id,) = work.recipe.parents
    return evaluated(runtime, work, args, *looked_at(runtime, work, id))


def evaluated(
    runtime: PosttrainingRuntime, work: Work, asked: EvaluationArgs, child: ChildModel, dtype: torch.dtype | None
) -> Metrics:
    """Tasks, and the loss on held-out rows: of the numbers that were published."""
    c, model = runtime.config, child.live.model
    if dtype not in (None, torch.float32):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype).float())
    model.eval()
    single, values, told = dict[str, Sequence[float]](), dict[str, float](), dict[str, Any]()
    with looking(runtime.device, c.precision):
        rows = losses(c, work, asked, model) if c.asks_loss else []
        if evaluation := runtime.evaluation(child.live.tokenizer):
            if c.fitness_from == "all" or asked.on == "test":
                marks, means = posttrain_fitness.marks_of(c, evaluation, model, asked)
                single, values = {**marks}, {**means}
            else:
                how = interview(runtime, work, asked)
                told = {**posttrain_fitness.interviewed(c, evaluation, model, asked, how, _ahead(c, how, rows))}
                single, values = json.loads(told["single"]), json.loads(told.pop("scores"))
        if c.asks_loss:
            single[LOSS], values[LOSS] = rows, _mean(rows)
    if c.asks_reward:
        marks, means = rl_tasks.held_out_terms(runtime, work, asked, child)
        single, values = {**single, **marks}, {**values, **means}
    if not all(map(math.isfinite, values.values())):
        raise NotFinite(f"what it answers comes to {values}")
    found = posttrain_fitness.fitness_of(c, single, values, told)
    at_the_end = asked.on == "test"
    keep = at_the_end or c.compares_questions or bool(told)
    return {**told, **found.metrics(keep), **({} if at_the_end else {"score": found.value})}


def interview(runtime: PosttrainingRuntime, work: Work, asked: EvaluationArgs) -> Interview:
    """By what others have answered, or the member itself."""
    ids = (asked.rival, asked.calibration, asked.earlier)
    rival, known, earlier = (work.history[id].metrics if id else None for id in ids)
    return Interview(asked.on, rival, few=runtime.few(known, asked.generation) if known else None, earlier=earlier)


def _ahead(c: PosttrainConfig, how: Interview, rows: Sequence[float]) -> float:
    """Of a rival, by the loss."""
    if not (how.rival and rows):
        return 0.0
    theirs = float(json.loads(how.rival["objectives"])[LOSS])
    return sum(each.weight for each in c.fitness if each.task == LOSS) * (theirs - _mean(rows))


def _mean(rows: Sequence[float]) -> float:
    return math.fsum(rows) / len(rows)


def calibrate(runtime: PosttrainingRuntime, work: Work, args: Args) -> Metrics:
    """What the first generation's answers say of the questions."""
    answered = [input.metrics for input in work.inputs.values()]
    single = [json.loads(each["single"]) for each in answered if "single" in each]
    return calibrated(posttrain_fitness.items(runtime.config, runtime.loaded), single, runtime.config.fitness_questions)


def losses(c: PosttrainConfig, work: Work, asked: EvaluationArgs, model: Any) -> list[float]:
    """Nats a learned token, row by row, of held-out rows of all data sets."""
    there = {str(n): rows_of(work, n) for n in range(len(c.mutation_datasets))}
    numbers = {name: rows.parts[asked.on] for name, rows in there.items()}
    found: list[float] = []
    for name, drawn in posttrain_fitness.drawn(c, numbers, asked).items():
        for begin in range(0, len(drawn), c.batch_size):
            some = [there[name].get(number)[0] for number in drawn[begin : begin + c.batch_size]]
            with torch.inference_mode():
                rows = packing.widened(packing.single(some), c.seq_length, model.device)
                nats = -objectives.answer_logprobs(model, rows.to(model.device))
            found += [float(x) / max(1, int(e.learned[1:].sum())) for x, e in zip(nats, some, strict=True)]
    return found


TASKS: Mapping[str, Task[PosttrainingRuntime]] = {
    "init": Task(make_init, InitArgs),
    "data": Task(make_data, SourceArgs),
    "rollouts": Task(rl_tasks.make_rollouts, RolloutArgs),
    "child": Task(make_child, PosttrainChildArgs),
    "look": Task(evaluate, EvaluationArgs),
    "calibrate": Task(calibrate),
}

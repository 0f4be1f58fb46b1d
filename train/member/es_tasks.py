"""What a worker makes of evolution strategies: the rewards of two opposite neighbours, a round's log, its model."""

import json
import math
from collections.abc import Mapping
from typing import Any

from fleet.tasks import Task, dispatcher
from fleet.work import Maker, Work
from train.chat_examples import ChatWriter
from train.kernels import in_fixed_order
from train.member import posttraining_genome, posttraining_tasks, rl_tasks
from train.member.es_runtime import EsRuntime, Log, filled, logged
from train.member.posttraining_round_zero import make_data, make_init
from train.member.posttraining_runtime import write_model
from train.posttrain.posttrain_config import PosttrainConfig
from train.recipe_arguments import FIRST, EvaluationArgs, InitArgs, PerturbationArgs, PublishArgs, SourceArgs, StepArgs
from train.rl import es, rollouts
from train.rl.rollouts import Group, Rollouts
from train.verdicts import with_verdicts

Metrics = Mapping[str, Any]
_ADVICE = "a smaller BATCH_SIZE or SEQ_LENGTH needs less, in a run with another PROJECT_NAME"


def maker(config: PosttrainConfig) -> Maker:
    """What a worker makes members with."""
    in_fixed_order(config.threads, config.deterministic, config.precision)
    return with_verdicts(lambda: EsRuntime(config), dispatcher(TASKS), _ADVICE)


def make_pair(runtime: EsRuntime, work: Work, args: PerturbationArgs) -> Metrics:
    """Both answer the round's questions, each time the likeliest answer. What is left of them is their rewards."""
    c = runtime.config
    runtime.forget()
    policy = runtime.at(work, args.base, logged(work, args.since), args.generation)
    child, key = runtime.child(work), (c.seed, args.generation, args.pair)
    asked = rl_tasks.own_questions(c, work, posttraining_genome.unmutated(c), (args.generation, 0))
    sides = []
    for sigma in (c.of_es.sigma, -c.of_es.sigma):
        filled(child, policy, key, sigma, c.of_es.rank)
        batches = rl_tasks.judged(runtime, work, child, asked, [0] * len(asked), 0.0)
        sides.append([each for some in batches for each in some])
    writer, groups = ChatWriter(child.live.tokenizer), list[Group]()
    for (name, row), *both in zip(asked, *sides, strict=True):
        answers, terms = zip(*both, strict=True)
        groups.append(Group(name, rl_tasks.shown(row), writer.prompt(row["prompt"]), answers, terms))
    found, weights = Rollouts(0.0, groups), c.of_es.rewards
    plus, minus = (math.fsum(each) / len(each) for each in zip(*(g.rewards(weights) for g in groups), strict=True))
    first = args.pair == 0  # people see some answers; all would be more than all else
    samples = {"samples": json.dumps(rollouts.samples(found, weights), ensure_ascii=False)} if first else {}
    return {"plus": plus, "minus": minus, **rollouts.metrics_of(found, weights), **samples}


def make_step(runtime: EsRuntime, work: Work, args: StepArgs) -> Metrics:
    """What all workers take the same step by."""
    return {"log": json.dumps(longer_log(work, args))}


def publish(runtime: EsRuntime, work: Work, args: PublishArgs) -> Metrics:
    """The model after this round's step, evaluated."""
    log = longer_log(work, args)
    runtime.forget()
    policy = runtime.at(work, args.base, log, args.generation + 1)
    child = filled(runtime.model_of(work, FIRST), policy)
    found = posttraining_tasks.evaluated(runtime, work, args, child, runtime.dtype)
    with work.folder() as place:
        write_model(place, child.said, child.files(runtime.dtype), runtime.merge_options)
    return {"log": json.dumps(log), **found}


def longer_log(work: Work, args: StepArgs | PublishArgs) -> Log:
    """With this round's pairs, the first of what it needs."""
    rewards = [work.inputs[id].metrics for id in work.recipe.needs[: args.pairs]]
    counts = es.differences([each["plus"] for each in rewards], [each["minus"] for each in rewards])
    return [*logged(work, args.since), counts]


TASKS: Mapping[str, Task[EsRuntime]] = {
    "init": Task(make_init, InitArgs),
    "data": Task(make_data, SourceArgs),
    "look": Task(posttraining_tasks.evaluate, EvaluationArgs),
    "pair": Task(make_pair, PerturbationArgs),
    "step": Task(make_step, StepArgs),
    "publish": Task(publish, PublishArgs),
}

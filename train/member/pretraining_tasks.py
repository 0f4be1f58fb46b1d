"""What a worker of pre-training makes: children of EDT, replicas and shards of DiLoCo, evaluations of all together."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fleet.recipe import round_and_slot
from fleet.tasks import Task, dispatcher
from fleet.work import Failed, Maker, Work
from train.kernels import in_fixed_order
from train.member import vectors
from train.member.exchange_tasks import (
    counts_of,
    cut_of,
    cut_shard,
    evaluate_global,
    evaluate_mean,
    make_child,
    make_mean_part,
    make_replica,
    make_shard,
)
from train.member.inner_loop import Metrics
from train.member.pretraining_round_zero import make_init, make_tokenizer, make_tokens
from train.member.pretraining_runtime import PretrainingRuntime
from train.member.vectors import file_of, outer_stems, parents_of
from train.pretraining_genome import Genome
from train.recipe_arguments import FIRST, ChildArgs, EvaluationArgs, InitArgs, ShardArgs, SourceArgs, Turn
from train.training_config import TrainConfig
from train.verdicts import with_verdicts

_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH or EVAL_BATCH_SIZE, or more "
    "DEVICES_PER_WORKER need less, in a run with another PROJECT_NAME"
)


def maker(config: TrainConfig) -> Maker:
    """What a worker makes members with; it keeps its model in memory from one recipe to the next."""
    in_fixed_order(config.threads, config.deterministic, config.precision)
    return with_verdicts(lambda: PretrainingRuntime(config), _make, _ADVICE)


def _make(runtime: PretrainingRuntime, work: Work) -> Metrics:
    """In a fork, members that were carried over cannot be made again here, since they were made under the old
    configuration: refuse. Round 0 is tried again, and refused only if other bytes come out."""
    carried, round = runtime.config.forked[-1].round if runtime.config.forked else 0, round_and_slot(work.id)[0]
    lost = f"{work.id} was carried over from another run, and its files are damaged"
    if 0 < round <= carried and work.recipe.task not in ("gathered", "whole"):
        raise Failed(f"{lost}: fork that one again")
    metrics = dict(dispatcher(TASKS)(runtime, work))
    if carried and round == 0 and not work.as_before():
        raise Failed(f"{lost}; this run's configuration would make others: fork that one again")
    return metrics


# -- a run that goes on from another, whose method was another ---------------------------------------------------------


def gather_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """DiLoCo from EDT: one range of the mean of all members, where DiLoCo would have brought the model."""
    members, counts = parents_of(work), counts_of(work.inputs[FIRST])
    for stem, count, wire in runtime.exchanged(work):
        vectors.mean(members, stem, whole := torch.empty(count))
        piece = cut_of(count, work, args)
        vectors.save(
            work, file_of(stem), whole[piece.start : piece.stop], "fp32" if stem in outer_stems(runtime.outer) else wire
        )
    return counts


def join_whole(runtime: PretrainingRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """EDT from DiLoCo: the first member is all shards together."""
    shards, state = parents_of(work), list[Tensor]()
    for stem, count, wire in runtime.exchanged(work):
        whole = vectors.read(vectors.joined, shards, stem, count)
        vectors.save(work, file_of(stem), whole, wire)
        if stem in outer_stems(runtime.outer):
            state.append(vectors.arrived(whole, wire))
    return {**runtime.evaluate(work, runtime.outer.without_lookahead(state), args.on), **Genome().metrics()}


TASKS: Mapping[str, Task[PretrainingRuntime]] = {
    "tokenizer": Task(make_tokenizer),
    "tokens": Task(make_tokens, SourceArgs),
    "init": Task(make_init, InitArgs),
    "cut": Task(cut_shard, ShardArgs),
    "replica": Task(make_replica, Turn),
    "shard": Task(make_shard, ShardArgs, early=True),
    "half": Task(make_shard, ShardArgs, early=True),
    "global": Task(evaluate_global, EvaluationArgs),
    "child": Task(make_child, ChildArgs),
    "mean-part": Task(make_mean_part, ShardArgs),  # slots mean-N: makes a range of a group's mean
    "mean": Task(evaluate_mean, EvaluationArgs),  # slot average: evaluates the mean of a generation
    "gathered": Task(gather_shard, ShardArgs),
    "whole": Task(join_whole, EvaluationArgs),
}

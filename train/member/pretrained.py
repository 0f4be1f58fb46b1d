"""What a worker of pre-training makes: children of EDT, replicas and shards of DiLoCo, evaluations of all together."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fleet.recipe import place
from fleet.tasks import Task, making
from fleet.work import Failed, Maker, Work
from merge.methods.arcs import slerp_all
from merge.outer import State, means, ranges
from merge.tensor_group import weighted
from merge.wire import sender
from train.config import TrainConfig
from train.genome import Genome, fittest, inherited
from train.loop import in_fixed_order
from train.member import prepare, vectors
from train.member.inner_loop import Metrics, tried
from train.member.pretraining_runtime import PretrainingRuntime, checked
from train.member.vectors import MOMENTS, MOMENTS_WIRE, WEIGHTS, Joining, kept, parents_of, part_of
from train.training_recipes import FIRST, ChildArgs, EvaluationArgs, InitArgs, ShardArgs, SourceArgs, Turn, shards_in
from train.verdicts import judging

CHANGE = "change.safetensors"  # the parts of it are numbered
_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH or EVAL_BATCH_SIZE, or more "
    "DEVICES_PER_WORKER need less, in a run with another PROJECT_NAME"
)


def maker(config: TrainConfig) -> Maker:
    """What a worker makes members with; it keeps its model in memory from one recipe to the next."""
    in_fixed_order(config.threads)
    return judging(lambda: PretrainingRuntime(config), _make, _ADVICE)


def _make(runtime: PretrainingRuntime, work: Work) -> Metrics:
    """What another run has made can be had again from that one alone: its configuration was another."""
    carried = runtime.config.forked[-1].round if runtime.config.forked else 0
    if 0 < place(work.id)[0] <= carried and work.recipe.task not in ("gathered", "whole"):
        raise Failed(f"{work.id} was carried over from another run, and its files are damaged: fork that one again")
    return dict(making(TASKS)(runtime, work))


def evaluate_together(join: Joining, runtime: PretrainingRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """The averaged model of a generation, or the global model that all shards are together."""
    members, size = parents_of(work), runtime.learner(work).layout.size
    return runtime.evaluate(work, vectors.settled(runtime.outer, join, members, size))


# -- EDT: each member has an outer step of its own --------------------------------------------------------------------


def make_child(runtime: PretrainingRuntime, work: Work, turn: ChildArgs) -> Metrics:
    """Cross the parents over, train, take the outer step; evaluate what is published. One that diverges stays what its
    parents made it, and its genome dies with what it learned."""
    c, outer, names = runtime.config, runtime.outer, kept(runtime.outer)
    start, parents = _crossed(runtime, work, turn), [parent.metrics for parent in parents_of(work)]
    genome = inherited(c, turn.slot, turn.round, parents)

    def learned() -> tuple[State, Metrics]:
        trained, metrics = runtime.train(work, turn, start[0], vectors.mean, genome)
        return evaluated(outer.step(start, start[0] - trained), {**metrics, **genome.metrics()})

    def untrained() -> tuple[State, Metrics]:
        runtime.inherit(work, turn, vectors.mean)
        return evaluated(start, fittest(parents, len(c.datasets)).metrics())

    def evaluated(state: State, metrics: Metrics) -> tuple[State, Metrics]:
        """By what arrives, without the last step's look ahead."""
        messages = tuple(runtime.message(work, turn, *named) for named in zip(names, state, strict=True))
        arrived = outer.settled([runtime.arrived(message) for message in messages])
        return messages, {**metrics, **runtime.evaluate(work, arrived)}

    (messages, metrics), diverged = tried(work, turn.before, genome.rate * c.lr, learned, untrained)
    for name, message in zip(names, messages, strict=True):
        vectors.save(work, name, message, c.wire_dtype)
        runtime.keep_residual(work, name, message)
    if c.keeps_moments:
        vectors.save(work, MOMENTS, runtime.moments(work), MOMENTS_WIRE)
    return {**metrics, **diverged}


def _crossed(runtime: PretrainingRuntime, work: Work, turn: Turn) -> State:
    """Where a child begins: at the first weights, the mean of its parents, or a point between them that is drawn when
    it is made, as its genome is."""
    parents, layout, names = parents_of(work), runtime.learner(work).layout, kept(runtime.outer)
    state = tuple(torch.zeros(layout.size) for _ in names)
    if turn.round == 1:
        vectors.load_weights(parents[0], state[0])
        return state
    if runtime.config.crossover == "outer":
        for name, whole in zip(names, state, strict=True):
            vectors.mean(parents, name, whole)
        return state
    shares = _shares(runtime, work, turn)
    several = [[torch.empty(layout.size) for _ in parents] for _ in names]
    for name, found in zip(names, several, strict=True):
        for vector, parent in zip(found, parents, strict=True):
            vectors.load(parent, name, vector)
    state = tuple(weighted(found, shares) for found in several)
    if runtime.config.crossover == "slerp":
        views = [layout.views(each) for each in several[0]]
        for name, room in layout.views(state[0]).items():
            room.copy_(slerp_all([view[name] for view in views], shares))
    return state


def _shares(runtime: PretrainingRuntime, work: Work, turn: Turn) -> list[float]:
    """Each parent's, of those that are there."""
    parents, dice = work.recipe.parents, np.random.default_rng((runtime.config.seed, turn.round, turn.slot, 2))
    shares = map(float, dice.dirichlet(np.ones(len(parents))))
    present = [share for id, share in zip(parents, shares, strict=True) if id in work.inputs]
    return [share / sum(present) for share in present]


# -- DiLoCo: one outer step for all, in shards ------------------------------------------------------------------------


def make_replica(runtime: PretrainingRuntime, work: Work, turn: Turn) -> Metrics:
    """Train from the global model on the slot's own data, and publish the change. One that diverges changes nothing."""
    c, start = runtime.config, torch.empty(runtime.learner(work).layout.size)
    vectors.joined(parents_of(work), WEIGHTS, start)

    def learned() -> tuple[Tensor, Metrics]:
        trained, metrics = runtime.train(work, turn, start, vectors.joined)
        return checked(start.sub_(trained)), metrics

    def untrained() -> tuple[Tensor, Metrics]:
        runtime.inherit(work, turn, vectors.joined)
        return start.zero_(), {}

    (change, metrics), diverged = tried(work, turn.before, c.lr, learned, untrained)
    change = runtime.message(work, turn, CHANGE, change)
    runtime.keep_residual(work, CHANGE, change)
    vectors.save_parts(work, "change", change, _shards(work), c.wire_dtype)
    vectors.save_parts(work, "moments", runtime.moments(work), _shards(work), MOMENTS_WIRE)
    return {**metrics, **diverged}


def cut_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """One range of the first global model; what is remembered of its way is zero."""
    (parent,) = work.inputs.values()
    whole = torch.empty(parent.metrics["parameters"])
    vectors.load_weights(parent, whole)
    piece, moments = _cut(len(whole), work, args), _cut(parent.metrics["moments"], work, args)
    vectors.save(work, WEIGHTS, whole[piece.start : piece.stop])
    for name in kept(runtime.outer)[1:]:
        vectors.save(work, name, torch.zeros(len(piece)))
    vectors.save(work, MOMENTS, torch.zeros(len(moments)), MOMENTS_WIRE)
    return {"parameters": len(whole), "moments": parent.metrics["moments"]}


def make_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """One range of the outer step: everybody's changes there, piece by piece, whatever their size."""
    old = work.inputs[args.old]
    replicas = [parent for id, parent in work.inputs.items() if id != args.old]
    if not replicas:
        raise Failed("no replica of this round is there")
    weights, moments = (len(_cut(old.metrics[name], work, args)) for name in ("parameters", "moments"))
    with ExitStack() as stack:
        names, enter = kept(runtime.outer), stack.enter_context
        state = [enter(vectors.opened([old], name, weights))[0] for name in names]
        new = [sender(enter(work.create(name)), weights) for name in names]
        changes = enter(vectors.opened(replicas, part_of("change", args.shard), weights))
        for pieces in runtime.outer.stream(state, means(changes)):
            for write, piece in zip(new, pieces, strict=True):
                write(piece)
    with vectors.opened(replicas, part_of("moments", args.shard), moments) as remembered, work.create(MOMENTS) as file:
        write = sender(file, moments, MOMENTS_WIRE)
        for piece in means(remembered):
            write(piece)
    return {name: old.metrics[name] for name in ("parameters", "moments")}


def _cut(size: int, work: Work, args: ShardArgs) -> range:
    """This shard's."""
    return ranges(size, _shards(work))[args.shard]


def _shards(work: Work) -> int:
    return shards_in(work.history.plan(0))


# -- a run that goes on from another, whose method was another ---------------------------------------------------------


def gather_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """DiLoCo from EDT: one range of the mean of all members, where DiLoCo would have brought the model."""
    members, counts = parents_of(work), work.inputs[FIRST].metrics
    for name in (*kept(runtime.outer), MOMENTS):
        whole = torch.empty(counts["moments" if name == MOMENTS else "parameters"])
        if len(whole):
            vectors.mean(members, name, whole)
        piece = _cut(len(whole), work, args)
        vectors.save(work, name, whole[piece.start : piece.stop], MOMENTS_WIRE if name == MOMENTS else "fp32")
    return {name: counts[name] for name in ("parameters", "moments")}


def join_whole(runtime: PretrainingRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """EDT from DiLoCo: the first member is all shards together."""
    shards, counts, state = parents_of(work), work.inputs[FIRST].metrics, list[Tensor]()
    for name in (*kept(runtime.outer), *([MOMENTS] if runtime.config.keeps_moments else [])):
        whole = torch.empty(counts["moments" if name == MOMENTS else "parameters"])
        vectors.joined(shards, name, whole)
        vectors.save(work, name, whole, MOMENTS_WIRE if name == MOMENTS else runtime.config.wire_dtype)
        if name != MOMENTS:
            state.append(runtime.arrived(whole))
    return {**runtime.evaluate(work, runtime.outer.settled(state)), **Genome().metrics()}


TASKS: Mapping[str, Task[PretrainingRuntime]] = {
    "tokenizer": Task(prepare.make_tokenizer),
    "tokens": Task(prepare.make_tokens, SourceArgs),
    "init": Task(prepare.make_init, InitArgs),
    "cut": Task(cut_shard, ShardArgs),
    "replica": Task(make_replica, Turn),
    "shard": Task(make_shard, ShardArgs),
    "global": Task(partial(evaluate_together, vectors.joined), EvaluationArgs),
    "child": Task(make_child, ChildArgs),
    "mean": Task(partial(evaluate_together, vectors.mean), EvaluationArgs),
    "gathered": Task(gather_shard, ShardArgs),
    "whole": Task(join_whole, EvaluationArgs),
}

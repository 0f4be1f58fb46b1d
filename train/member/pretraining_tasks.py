"""What a worker of pre-training makes: children of EDT, replicas and shards of DiLoCo, evaluations of all together."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fleet.recipe import place
from fleet.tasks import Task, making
from fleet.work import Failed, InputMember, Maker, Work
from merge.methods.weighted_sums import slerp_all
from merge.outer_step import State, means, ranges
from merge.tensor_group import weighted
from merge.wire import pieces, send, sender
from train.kernels import in_fixed_order
from train.member import prepare, vectors
from train.member.error_feedback import Feedback
from train.member.global_model import STEPPED_FROM, UPDATE, identity
from train.member.inner_loop import Metrics, learn_or_fall_back
from train.member.pretraining_runtime import PretrainingRuntime, checked
from train.member.vectors import WEIGHTS, Begun, file_of, kept, moments_of, parents_of
from train.pretraining_genome import Genome, fittest, inherited
from train.training_config import NARROW, TrainConfig
from train.training_recipes import FIRST, ChildArgs, EvaluationArgs, InitArgs, ShardArgs, SourceArgs, Turn, shards_in
from train.verdicts import with_verdicts

CHANGE = "change"
_ADVICE = (
    "a smaller BATCH_SIZE with as much more GRADIENT_ACCUMULATION, a smaller SEQ_LENGTH or EVAL_BATCH_SIZE, or more "
    "DEVICES_PER_WORKER need less, in a run with another PROJECT_NAME"
)


def maker(config: TrainConfig) -> Maker:
    """What a worker makes members with; it keeps its model in memory from one recipe to the next."""
    in_fixed_order(config.threads, config.deterministic, config.precision)
    return with_verdicts(lambda: PretrainingRuntime(config), _make, _ADVICE)


def _make(runtime: PretrainingRuntime, work: Work) -> Metrics:
    """What another run has made can be had again from that one alone: its configuration was another. Of round 0, much
    does not depend on what is another now."""
    carried, round = runtime.config.forked[-1].round if runtime.config.forked else 0, place(work.id)[0]
    lost = f"{work.id} was carried over from another run, and its files are damaged"
    if 0 < round <= carried and work.recipe.task not in ("gathered", "whole"):
        raise Failed(f"{lost}: fork that one again")
    metrics = dict(making(TASKS)(runtime, work))
    if carried and round == 0 and not work.as_before():
        raise Failed(f"{lost}; this run's configuration would make others: fork that one again")
    return metrics


def evaluate_mean(runtime: PretrainingRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """The averaged model of a generation."""
    members, size = parents_of(work), runtime.learner(work).layout.size
    return runtime.evaluate(work, vectors.without_lookahead(runtime.outer, vectors.mean, members, size), args.on)


def evaluate_global(runtime: PretrainingRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """The model that all shards are together."""
    shards, size = parents_of(work), runtime.learner(work).layout.size
    state = [runtime.global_model.read(shards, size)]
    state += [vectors.read(vectors.joined, shards, stem, size) for stem in kept(runtime.outer)[1:]]
    return runtime.evaluate(work, runtime.outer.without_lookahead(state), args.on)


# -- EDT: each member has an outer step of its own --------------------------------------------------------------------


def make_child(runtime: PretrainingRuntime, work: Work, turn: ChildArgs) -> Metrics:
    """Cross the parents over, train, take the outer step; evaluate what is published. One that diverges stays what its
    parents made it, and its genome dies with what it learned."""
    c, outer, stems = runtime.config, runtime.outer, kept(runtime.outer)
    begun, parents = _mean_of_parents(runtime, work, turn), [parent.metrics for parent in parents_of(work)]
    start, genome = _crossed(runtime, work, turn, begun), inherited(c, turn.slot, turn.round, parents)

    def learned() -> tuple[State, Metrics]:
        trained, metrics = runtime.train(work, turn, start[0], begun, genome)
        return evaluated(outer.step(start, start[0] - trained), {**metrics, **genome.metrics()})

    def untrained() -> tuple[State, Metrics]:
        runtime.inherit(work, turn, begun)
        return evaluated(start, fittest(parents, len(c.datasets)).metrics())

    def evaluated(state: State, metrics: Metrics) -> tuple[State, Metrics]:
        """By what arrives, without the last step's look ahead."""
        arrived = outer.without_lookahead([vectors.arrived(checked(each), c.wire) for each in state])
        return state, {**metrics, **runtime.evaluate(work, arrived, turn.on)}

    (state, metrics), diverged = learn_or_fall_back(work, turn.before, genome.rate_factor * c.lr, learned, untrained)
    for stem, vector in zip(stems, state, strict=True):
        vectors.save_parts(work, stem, vector, c.mean_parts, c.wire)
    for moment, vector in runtime.moments(work):
        vectors.save_parts(work, moment.stem, vector, c.mean_parts, moment.wire)
    return {**metrics, **diverged}


def make_mean_part(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """What all children of a group begin with, of one range: where nobody is, there is nothing."""
    if not (members := [work.inputs[id] for id in work.recipe.parents if id in work.inputs]):
        return {}
    for stem, count, wire in runtime.exchanged(work):
        part = file_of(stem, args.shard)
        cut = ranges(count, runtime.config.mean_parts)[args.shard]
        with work.create(file_of(stem)) as file:
            send(file, len(cut), means([vectors.numbers(each, part, len(cut)) for each in members]), wire)
    return {}


def _mean_of_parents(runtime: PretrainingRuntime, work: Work, turn: ChildArgs) -> Begun:
    """As it was made for all of their children, or made here in the same way."""
    if turn.parts:
        parents_of(work)  # somebody is there
        return partial(vectors.joined, [work.inputs[id] for id in work.recipe.needs[: turn.parts]])
    wires = {stem: wire for stem, _, wire in runtime.exchanged(work)}
    return lambda stem, into: vectors.mean(parents_of(work), stem, into, wires[stem])


def _crossed(runtime: PretrainingRuntime, work: Work, turn: Turn, begun: Begun) -> State:
    """Where a child begins: at the first weights, the mean of its parents, or a point between them that is drawn when
    it is made, as its genome is."""
    parents, layout, stems = parents_of(work), runtime.learner(work).layout, kept(runtime.outer)
    if turn.round == 1:
        return vectors.load_weights(parents[0], layout.size), *(torch.zeros(layout.size) for _ in stems[1:])
    if runtime.config.crossover == "outer":
        state = tuple(torch.empty(layout.size) for _ in stems)
        for stem, room in zip(stems, state, strict=True):
            begun(stem, room)
        return state
    shares = _shares(runtime, work, turn)
    several = [[vectors.read(vectors.joined, [each], stem, layout.size) for each in parents] for stem in stems]
    state = tuple(weighted(found, shares) for found in several)
    if runtime.config.crossover == "slerp":
        views = [layout.views(each) for each in several[0]]
        for name, room in layout.views(state[0]).items():
            room.copy_(slerp_all([view[name] for view in views], shares))
    return state


def _shares(runtime: PretrainingRuntime, work: Work, turn: Turn) -> list[float]:
    """Each parent's, of those that are there."""
    parents, rng = work.recipe.parents, np.random.default_rng((runtime.config.seed, turn.round, turn.slot, 2))
    shares = zip(parents, map(float, rng.dirichlet(np.ones(len(parents)))), strict=True)
    present = [share for id, share in shares if id in work.inputs]
    return [share / sum(present) for share in present]


# -- DiLoCo: one outer step for all, in shards ------------------------------------------------------------------------


def make_replica(runtime: PretrainingRuntime, work: Work, turn: Turn) -> Metrics:
    """Train from the global model on the slot's own data, and publish the change. One that diverges changes nothing."""
    c, size = runtime.config, runtime.learner(work).layout.size
    start, begun = runtime.global_model.read(parents_of(work), size), partial(vectors.joined, parents_of(work))

    def learned() -> tuple[Tensor, Metrics]:
        trained, metrics = runtime.train(work, turn, start, begun)
        return checked(start.sub(trained)), metrics

    def untrained() -> tuple[Tensor, Metrics]:
        runtime.inherit(work, turn, begun)
        return torch.zeros(size), {}

    (change, metrics), diverged = learn_or_fall_back(work, turn.before, c.lr, learned, untrained)
    for number, cut in enumerate(ranges(size, _shards(work))):
        with ExitStack() as stack:
            narrow = Feedback(c, work, work.inputs.get(turn.before), file_of(CHANGE, number), len(cut), stack)
            for piece in pieces(change[cut.start : cut.stop]):
                narrow.send(piece)
    for moment, vector in runtime.moments(work):
        vectors.save_parts(work, moment.stem, vector, _shards(work), moment.wire)
    return {**metrics, **diverged}


def cut_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """One range of the first global model; what is remembered of its way is zero."""
    (parent,) = work.inputs.values()
    whole, counts = vectors.load_weights(parent, parent.metrics["parameters"]), _counts(parent)
    piece = _cut(len(whole), work, args)
    vectors.save(work, file_of(WEIGHTS), whole[piece.start : piece.stop])
    for stem in kept(runtime.outer)[1:]:
        vectors.save(work, file_of(stem), torch.zeros(len(piece)))
    for moment in moments_of(runtime.config, *counts.values()):
        vectors.save(work, file_of(moment.stem), torch.zeros(len(_cut(moment.count, work, args))), moment.wire)
    return counts


def make_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """One range of the outer step: everybody's changes there, piece by piece, whatever their size."""
    c, old = runtime.config, work.inputs[args.old]
    replicas = [parent for id, parent in work.inputs.items() if id != args.old]
    if not replicas:
        raise Failed("no replica of this round is there")
    counts, cut = _counts(old), _cut(old.metrics["parameters"], work, args)
    stems, known = kept(runtime.outer), runtime.global_model.pieces_of(old, args.shard, cut)
    share = (len(work.recipe.parents) - 1) / c.population_size  # of all slots, these come together here
    state = [vectors.numbers(old, file_of(stem), len(cut)) for stem in stems[1 if known else 0 :]]
    changes = means([vectors.numbers(each, file_of(CHANGE, args.shard), len(cut)) for each in replicas])
    with ExitStack() as stack:
        new = [sender(stack.enter_context(work.create(file_of(stem))), len(cut)) for stem in stems]
        narrow = Feedback(c, work, old, UPDATE, len(cut), stack) if c.wire in NARROW else None
        for *pieces_of, change in zip(*([known] if known else []), *state, changes, strict=True):
            weights, *momentum = runtime.outer.step(pieces_of, change.mul_(share))
            if narrow:  # whoever knows the old weights comes to the very ones that are written here
                weights = pieces_of[0] - narrow.send(pieces_of[0] - weights)
            for write, piece in zip(new, (weights, *momentum), strict=True):
                write(piece)
    for moment in moments_of(c, *counts.values()):
        part, count = file_of(moment.stem, args.shard), len(_cut(moment.count, work, args))
        with work.create(file_of(moment.stem)) as file:
            send(file, count, means([vectors.numbers(each, part, count) for each in replicas]), moment.wire)
    return {**counts, STEPPED_FROM: identity(old)}


def _counts(member: InputMember) -> dict[str, int]:
    return {name: member.metrics[name] for name in ("parameters", "moments")}


def _cut(size: int, work: Work, args: ShardArgs) -> range:
    """This shard's."""
    return ranges(size, _shards(work))[args.shard]


def _shards(work: Work) -> int:
    return shards_in(work.history.plan(0))


# -- a run that goes on from another, whose method was another ---------------------------------------------------------


def gather_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Metrics:
    """DiLoCo from EDT: one range of the mean of all members, where DiLoCo would have brought the model."""
    members, counts = parents_of(work), _counts(work.inputs[FIRST])
    for stem, count, wire in runtime.exchanged(work):
        vectors.mean(members, stem, whole := torch.empty(count))
        piece = _cut(count, work, args)
        vectors.save(
            work, file_of(stem), whole[piece.start : piece.stop], "fp32" if stem in kept(runtime.outer) else wire
        )
    return counts


def join_whole(runtime: PretrainingRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """EDT from DiLoCo: the first member is all shards together."""
    shards, state = parents_of(work), list[Tensor]()
    for stem, count, wire in runtime.exchanged(work):
        whole = vectors.read(vectors.joined, shards, stem, count)
        vectors.save(work, file_of(stem), whole, wire)
        if stem in kept(runtime.outer):
            state.append(vectors.arrived(whole, wire))
    return {**runtime.evaluate(work, runtime.outer.without_lookahead(state), args.on), **Genome().metrics()}


TASKS: Mapping[str, Task[PretrainingRuntime]] = {
    "tokenizer": Task(prepare.make_tokenizer),
    "tokens": Task(prepare.make_tokens, SourceArgs),
    "init": Task(prepare.make_init, InitArgs),
    "cut": Task(cut_shard, ShardArgs),
    "replica": Task(make_replica, Turn),
    "shard": Task(make_shard, ShardArgs),
    "half": Task(make_shard, ShardArgs),
    "global": Task(evaluate_global, EvaluationArgs),
    "child": Task(make_child, ChildArgs),
    "mean-part": Task(make_mean_part, ShardArgs),
    "mean": Task(evaluate_mean, EvaluationArgs),
    "gathered": Task(gather_shard, ShardArgs),
    "whole": Task(join_whole, EvaluationArgs),
}

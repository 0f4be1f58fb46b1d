"""How members of EDT and DiLoCo are made, whatever it is that trains: children, replicas and shards, and what all of
them come to together."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fleet.checksum import checksum
from fleet.work import Failed, InputMember, Interrupted, Work
from merge.methods.weighted_sums import slerp_all
from merge.outer_step import OuterOptimizer, State, means, ranges
from merge.tensor_files import bytes_of
from merge.tensor_group import weighted
from merge.wire import pieces, send, sender
from train.exchange_config import QUANTIZED_WIRES, ExchangeConfig
from train.member import vectors
from train.member.error_feedback import NarrowSender
from train.member.global_model import STEPPED_FROM, STEPPED_TO, GlobalModel, identity
from train.member.inner_loop import Metrics, learn_or_fall_back
from train.member.own_fragments import OwnFragments
from train.member.vectors import BEFORE, UPDATE, WEIGHTS, FillStart, Moment, file_of, outer_stems, parents_of
from train.recipe_arguments import ChildArgs, EvaluationArgs, ShardArgs, Turn, shards_in
from train.splits import EvalSplit
from train.vector_layout import VectorLayout
from train.verdicts import NotFinite

CHANGE = "change"


class MemberRuntime(Protocol):
    """What trains: a worker's own inner loop, or somebody else's."""

    config: Any
    outer: OuterOptimizer
    global_model: GlobalModel
    own: OwnFragments
    usual: Any  # the genome of who inherits none

    def layout(self, work: Work) -> VectorLayout: ...

    def train(
        self, work: Work, turn: Turn, start: Tensor, fill_start: FillStart, genome: Any
    ) -> tuple[Tensor, Metrics]: ...

    def evaluate(self, work: Work, weights: Tensor, on: EvalSplit) -> Metrics: ...

    def inherited(self, turn: Turn, parents: Sequence[Mapping[str, Any]]) -> Any: ...

    def fittest(self, parents: Sequence[Mapping[str, Any]]) -> Any: ...

    def advice(self, genome: Any) -> str: ...

    # what goes on beside the weights

    def inherit(self, work: Work, turn: Turn, fill_start: FillStart) -> None: ...

    def moments(self, work: Work) -> Iterator[tuple[Moment, Tensor]]: ...

    def exchanged(self, work: Work) -> list[tuple[str, int, str]]: ...

    def first_moments(self, parent: InputMember) -> Iterator[tuple[Moment, Tensor]]: ...

    def averaged(self, old: InputMember, replicas: Sequence[InputMember]) -> Sequence[Moment]: ...


def outer_of(config: ExchangeConfig) -> OuterOptimizer:
    return OuterOptimizer(config.outer_lr, config.outer_momentum, config.outer_nesterov)


def checked(vector: Tensor) -> Tensor:
    """What is made of finite numbers may be too large for a number."""
    if not bool(vector.isfinite().all()):
        raise NotFinite("the weights and what changed them are too large for numbers")
    return vector


def evaluate_mean(runtime: MemberRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """The averaged model of a generation."""
    members, size = parents_of(work), runtime.layout(work).size
    return runtime.evaluate(work, vectors.without_lookahead(runtime.outer, vectors.mean, members, size), args.on)


def evaluate_global(runtime: MemberRuntime, work: Work, args: EvaluationArgs) -> Metrics:
    """The model that all shards are together."""
    shards, size = parents_of(work), runtime.layout(work).size
    state = [runtime.global_model.read(shards, size)]
    state += [vectors.read(vectors.joined, shards, stem, size) for stem in outer_stems(runtime.outer)[1:]]
    return runtime.evaluate(work, runtime.outer.without_lookahead(state), args.on)


# -- EDT: each member has an outer step of its own --------------------------------------------------------------------


def make_child(runtime: MemberRuntime, work: Work, turn: ChildArgs) -> Metrics:
    """Cross the parents over, train, take the outer step; evaluate what is published. One that diverges stays what its
    parents made it, and its genome dies with what it learned."""
    c, outer, stems = runtime.config, runtime.outer, outer_stems(runtime.outer)
    fill_start, parents = _filler_of_start(runtime, work, turn), [parent.metrics for parent in parents_of(work)]
    start, genome = _crossed(runtime, work, turn, fill_start), runtime.inherited(turn, parents)

    def learned() -> tuple[State, Metrics]:
        trained, metrics = runtime.train(work, turn, start[0], fill_start, genome)
        return evaluated(outer.step(start, start[0] - trained), {**metrics, **genome.metrics()})

    def untrained() -> tuple[State, Metrics]:
        runtime.inherit(work, turn, fill_start)
        return evaluated(start, runtime.fittest(parents).metrics())

    def evaluated(state: State, metrics: Metrics) -> tuple[State, Metrics]:
        """By what arrives, without the last step's look ahead."""
        arrived = outer.without_lookahead([vectors.arrived(checked(each), c.wire) for each in state])
        return state, {**metrics, **runtime.evaluate(work, arrived, turn.on)}

    (state, metrics), diverged = learn_or_fall_back(work, turn.before, runtime.advice(genome), learned, untrained)
    for stem, vector in zip(stems, state, strict=True):
        vectors.save_parts(work, stem, vector, c.mean_parts, c.wire)
    for moment, vector in runtime.moments(work):
        vectors.save_parts(work, moment.stem, vector, c.mean_parts, moment.wire)
    return {**metrics, **diverged}


def make_mean_part(runtime: MemberRuntime, work: Work, args: ShardArgs) -> Metrics:
    """What all children of a group begin with, of one range: where nobody is, there is nothing. Whoever made it has a
    child in the group, as a rule, and need not read it again."""
    if not (members := [work.inputs[id] for id in work.recipe.parents if id in work.inputs]):
        return {}
    exchanged = runtime.exchanged(work)
    work.bring((each, file_of(stem, args.shard)) for stem, *_ in exchanged for each in members)
    for stem, count, wire in exchanged:
        part = file_of(stem, args.shard)
        cut = ranges(count, runtime.config.mean_parts)[args.shard]
        with work.create(file_of(stem), keep=True) as file:
            send(file, len(cut), means([vectors.numbers(each, part, len(cut)) for each in members]), wire)
    return {}


def _filler_of_start(runtime: MemberRuntime, work: Work, turn: ChildArgs) -> FillStart:
    """A function that fills a vector with the parents' mean of a stem: from the parts that were made for the whole
    group, or by reading the parents here."""
    if turn.parts:
        parents_of(work)  # somebody is there
        return partial(vectors.joined, [work.inputs[id] for id in work.recipe.needs[: turn.parts]])
    wires = {stem: wire for stem, _, wire in runtime.exchanged(work)}
    return lambda stem, into: vectors.mean(parents_of(work), stem, into, wires[stem])


def _crossed(runtime: MemberRuntime, work: Work, turn: Turn, fill_start: FillStart) -> State:
    """Where a child begins: at the first weights, the mean of its parents, or a point between them that is drawn when
    it is made, as its genome is."""
    parents, layout, stems = parents_of(work), runtime.layout(work), outer_stems(runtime.outer)
    if turn.round == 1:
        return vectors.load_weights(parents[0], layout.size), *(torch.zeros(layout.size) for _ in stems[1:])
    if runtime.config.crossover == "outer":
        state = tuple(torch.empty(layout.size) for _ in stems)
        for stem, room in zip(stems, state, strict=True):
            fill_start(stem, room)
        return state
    shares = _shares(runtime, work, turn)
    several = [[vectors.read(vectors.joined, [each], stem, layout.size) for each in parents] for stem in stems]
    state = tuple(weighted(found, shares) for found in several)
    if runtime.config.crossover == "slerp":
        views = [layout.views(each) for each in several[0]]
        for name, room in layout.views(state[0]).items():
            room.copy_(slerp_all([view[name] for view in views], shares))
    return state


def _shares(runtime: MemberRuntime, work: Work, turn: Turn) -> list[float]:
    """Each parent's, of those that are there."""
    parents, rng = work.recipe.parents, np.random.default_rng((runtime.config.seed, turn.round, turn.slot, 2))
    shares = zip(parents, map(float, rng.dirichlet(np.ones(len(parents)))), strict=True)
    present = [share for id, share in shares if id in work.inputs]
    return [share / sum(present) for share in present]


# -- DiLoCo: one outer step for all, in shards ------------------------------------------------------------------------


def make_replica(runtime: MemberRuntime, work: Work, turn: Turn) -> Metrics:
    """Train from the global model on the slot's own data, and publish the change. One that diverges changes nothing."""
    c, size, own, shards = runtime.config, runtime.layout(work).size, runtime.own, parents_of(work)
    model, exchanged = runtime.global_model.read(shards, size), runtime.config.exchanged_in(turn.round, len(shards))
    start, fill_start = own.begin(work, turn, model, shards)

    def learned() -> tuple[tuple[Tensor, Tensor], Metrics]:
        trained, metrics = runtime.train(work, turn, start, fill_start, runtime.usual)
        return (trained, checked(model.sub(trained))), metrics

    def untrained() -> tuple[tuple[Tensor, Tensor], Metrics]:
        runtime.inherit(work, turn, fill_start)
        return (start, model.sub(start)), {}

    ((weights, change), metrics), diverged = learn_or_fall_back(
        work, turn.before, runtime.advice(runtime.usual), learned, untrained
    )
    cuts = ranges(size, len(shards))
    for number in exchanged:
        _send_change(c, work, turn, file_of(CHANGE, number), change[cuts[number].start : cuts[number].stop])
    moments = [*runtime.moments(work)]
    for moment, vector in moments:
        vectors.save_parts(work, moment.stem, vector, len(shards), moment.wire, exchanged)
    if c.fragments > 1:
        late = c.exchanged_in(turn.round - 1, len(shards))  # comes together meanwhile
        since = partial(_since, start, weights, [(n, cuts[n]) for n in late])
        own.keep(work, turn, weights, moments, since)
    return {**metrics, **diverged, **own.said}


def _send_change(config: ExchangeConfig, work: Work, turn: Turn, file: str, change: Tensor) -> None:
    if not config.feeds_back:
        vectors.save(work, file, change, config.wire)
        return
    with ExitStack() as stack:
        narrow = NarrowSender(config, work, work.inputs.get(turn.before), file, len(change), stack)
        for piece in pieces(change):
            narrow.send(piece)


def _since(start: Tensor, end: Tensor, cuts: Sequence[tuple[int, range]]) -> dict[int, Tensor]:
    """What has been learned in some ranges."""
    return {n: end[cut.start : cut.stop] - start[cut.start : cut.stop] for n, cut in cuts}


def cut_shard(runtime: MemberRuntime, work: Work, args: ShardArgs) -> Metrics:
    """One range of the first global model; what is remembered of its way is zero."""
    (parent,) = work.inputs.values()
    whole, counts = vectors.load_weights(parent, parent.metrics["parameters"]), counts_of(parent)
    piece = cut_of(len(whole), work, args)
    vectors.save(work, file_of(WEIGHTS), whole[piece.start : piece.stop])
    for stem in outer_stems(runtime.outer)[1:]:
        vectors.save(work, file_of(stem), torch.zeros(len(piece)))
    for moment, vector in runtime.first_moments(parent):
        cut = cut_of(moment.count, work, args)
        vectors.save(work, file_of(moment.stem), vector[cut.start : cut.stop], moment.wire)
    return counts


def make_shard(runtime: MemberRuntime, work: Work, args: ShardArgs) -> Metrics:
    """One range of the outer step: everybody's changes there, piece by piece, whatever their size."""
    old = work.inputs[args.old]
    counts, cut = counts_of(old), cut_of(old.metrics["parameters"], work, args)
    if runtime.config.wire in QUANTIZED_WIRES and BEFORE not in work.writer.known:
        _write_old(runtime, work, args, cut)
    if work.early:
        return {}
    if not (replicas := [parent for id, parent in work.inputs.items() if id != args.old]):
        raise Failed("no replica of this round is there")
    stems = (CHANGE, *(moment.stem for moment in runtime.averaged(old, replicas)))
    work.bring((each, file_of(stem, args.shard)) for stem in stems for each in replicas)
    changes = means([vectors.numbers(each, file_of(CHANGE, args.shard), len(cut)) for each in replicas])
    reached = _step(runtime, work, args, cut, changes)
    for moment in runtime.averaged(old, replicas):
        part, count = file_of(moment.stem, args.shard), len(cut_of(moment.count, work, args))
        with work.create(file_of(moment.stem)) as file:
            send(file, count, means([vectors.numbers(each, part, count) for each in replicas]), moment.wire)
    return {**counts, STEPPED_FROM: identity(old), **reached}


def _write_old(runtime: MemberRuntime, work: Work, args: ShardArgs, cut: range) -> None:
    """What the step leads from: written while everybody trains, it need not be when everybody waits."""
    model, old = runtime.global_model, work.inputs[args.old]
    model.remember(old, args.shard, cut)  # the step will ask for it again
    with work.create(BEFORE) as file:
        one_more = sender(file, len(cut))
        for piece in model.pieces_of(old, args.shard, cut):
            if work.hurry():
                raise Interrupted
            one_more(piece)


def _step(runtime: MemberRuntime, work: Work, args: ShardArgs, cut: range, changes: Iterator[Tensor]) -> Metrics:
    """Where the weights travel as the step that leads to them, whoever knows the old ones comes to the very same."""
    c, old, model, stems = runtime.config, work.inputs[args.old], runtime.global_model, outer_stems(runtime.outer)
    state = [vectors.numbers(old, file_of(stem), len(cut)) for stem in stems[1:]]
    share = (len(work.recipe.parents) - 1) / c.population_size  # of all slots, these come together here
    reached, seen = list[Tensor](), checksum()
    with ExitStack() as stack:
        narrow = NarrowSender(c, work, old, UPDATE, len(cut), stack) if c.wire in QUANTIZED_WIRES else None
        written = stems[1:] if narrow else stems  # the weights are those before the step and the step, or a file
        new = [sender(stack.enter_context(work.create(file_of(stem))), len(cut)) for stem in written]
        for *before, change in zip(model.pieces_of(old, args.shard, cut), *state, changes, strict=True):
            weights, *momentum = runtime.outer.step(before, change.mul_(share))
            if narrow:
                weights = before[0] - narrow.send(before[0] - weights)
                seen.update(bytes_of(weights))
                reached += [weights] if model.in_parts else []
            for write, piece in zip(new, momentum if narrow else (weights, *momentum), strict=True):
                write(piece)
    if not narrow:
        return {}
    if reached:
        model.made(args.shard, seen.hexdigest(), reached)
    return {STEPPED_TO: seen.hexdigest()}


def counts_of(member: InputMember) -> dict[str, int]:
    return {name: member.metrics[name] for name in ("parameters", "moments")}


def cut_of(size: int, work: Work, args: ShardArgs) -> range:
    """This shard's."""
    return ranges(size, _shards(work))[args.shard]


def _shards(work: Work) -> int:
    return shards_in(work.history.plan(0))

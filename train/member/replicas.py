"""DiLoCo's members: replicas that train on their own, and shards that bring their changes together."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fleet.work import Failed, Input, Work
from merge.outer import Outer, means, ranges
from train import optimizers
from train.member import vectors
from train.member.divergence import tried
from train.member.pretraining_runtime import MOMENTS_WIRE, Metrics, PretrainingRuntime
from train.member.vectors import MOMENTS, WEIGHTS, kept
from train.pretraining_tasks import LookArgs, ShardArgs, Turn
from train.round_zero import shards_in

CHANGE = "change.safetensors"  # the parts of it are numbered


def cut_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Mapping[str, Any]:
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


def make_replica(runtime: PretrainingRuntime, work: Work, turn: Turn) -> Mapping[str, Any]:
    """Train from the global model on the slot's own data, and publish the change. One that diverges changes nothing."""
    learner = runtime.learner(work)
    start = torch.empty(learner.layout.size)
    _fill(work, WEIGHTS, start)

    def moments(room: Tensor) -> None:
        _fill(work, MOMENTS, room)

    def learned() -> tuple[Tensor, Metrics]:
        metrics = runtime.train(work, turn, start, moments)
        return runtime.checked(start.sub_(learner.whole(optimizers.WEIGHTS).cpu())), metrics

    def untrained() -> tuple[Tensor, Metrics]:
        runtime.remember(work, turn, moments)
        return start.zero_(), {}

    (change, metrics), diverged = tried(work, turn.before, runtime.rate(), learned, untrained)
    change = runtime.message(work, turn, CHANGE, change)
    runtime.keep_residual(work, CHANGE, change)
    for number, cut in enumerate(ranges(len(change), _shards(work))):
        vectors.save(work, _change(number), change[cut.start : cut.stop], runtime.config.wire_dtype)
    remembered = runtime.moments(work)
    for number, cut in enumerate(ranges(len(remembered), _shards(work))):
        vectors.save(work, _moments(number), remembered[cut.start : cut.stop], MOMENTS_WIRE)
    return {**metrics, **diverged}


def make_shard(runtime: PretrainingRuntime, work: Work, args: ShardArgs) -> Mapping[str, Any]:
    """One range of the outer step: everybody's changes there, piece by piece, whatever their size."""
    old = work.inputs[args.old]
    replicas = [parent for id, parent in work.inputs.items() if id != args.old]
    if not replicas:
        raise Failed("no replica of this round is there")
    count = len(_cut(old.metrics["parameters"], work, args))
    with ExitStack() as stack:
        state = [stack.enter_context(vectors.opened([old], name, count))[0] for name in kept(runtime.outer)]
        new = [stack.enter_context(vectors.created(work, name, count)) for name in kept(runtime.outer)]
        changes = stack.enter_context(vectors.opened(replicas, _change(args.shard), count))
        for pieces in runtime.outer.stream(state, means(changes)):
            for write, piece in zip(new, pieces, strict=True):
                write(piece)
    count = len(_cut(old.metrics["moments"], work, args))
    with (
        vectors.opened(replicas, _moments(args.shard), count) as several,
        vectors.created(work, MOMENTS, count, MOMENTS_WIRE) as new_moments,
    ):
        for piece in means(several):
            new_moments(piece)
    return {name: old.metrics[name] for name in ("parameters", "moments")}


def look_at_global(runtime: PretrainingRuntime, work: Work, args: LookArgs) -> Mapping[str, Any]:
    """The global model as it is worth: without the last step's look ahead."""
    learner = runtime.learner(work)
    learner.start(settled(runtime.outer, _all_shards(work), learner.layout.size))
    return runtime.evaluate(work)


def settled(outer: Outer, shards: list[Input], size: int) -> Tensor:
    """The global model, put together."""
    state = [torch.empty(size) for _ in kept(outer)]
    for name, whole in zip(kept(outer), state, strict=True):
        _put_together(shards, name, whole)
    return outer.settled(state)


def _put_together(shards: list[Input], name: str, room: Tensor) -> None:
    for cut, shard in zip(ranges(len(room), len(shards)), shards, strict=True):
        vectors.load(shard, name, room[cut.start : cut.stop])


def _fill(work: Work, name: str, room: Tensor) -> None:
    """The global model or its moments, as the last round left them."""
    _put_together(_all_shards(work), name, room)


def _all_shards(work: Work) -> list[Input]:
    return [work.inputs[id] for id in work.recipe.parents]


def _cut(size: int, work: Work, args: ShardArgs) -> range:
    """This shard's."""
    return ranges(size, _shards(work))[args.shard]


def _shards(work: Work) -> int:
    return shards_in(work.history.plan(0))


def _change(shard: int) -> str:
    return f"change-{shard}.safetensors"


def _moments(shard: int) -> str:
    return f"moments-{shard}.safetensors"

"""DiLoCo's members: replicas that train on their own, and shards that bring their changes together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.work import Failed, Work
from merge.outer import means, ranges
from train import optimizers
from train.member import vectors
from train.member.divergence import tried
from train.member.pretraining_runtime import MOMENTS_WIRE, Metrics, PretrainingRuntime, named
from train.round_zero import shards_in

WEIGHTS, MOMENTUM, MOMENTS = "weights.safetensors", "momentum.safetensors", "moments.safetensors"


def cut_shard(runtime: PretrainingRuntime, work: Work) -> Mapping[str, Any]:
    """One range of the first global model; its momentum and its moments are zero."""
    (parent,) = work.parents.values()
    whole = torch.empty(parent.metrics["parameters"])
    vectors.load_weights(parent, whole)
    piece, moments = _cut(len(whole), work), _cut(parent.metrics["moments"], work)
    vectors.save(work, WEIGHTS, whole[piece.start : piece.stop])
    vectors.save(work, MOMENTUM, torch.zeros(len(piece)))
    vectors.save(work, MOMENTS, torch.zeros(len(moments)), MOMENTS_WIRE)
    return {"parameters": len(whole), "moments": parent.metrics["moments"]}


def make_replica(runtime: PretrainingRuntime, work: Work) -> Mapping[str, Any]:
    """Train from the global model on the slot's own data, and publish the change. One that diverges changes nothing."""
    learner = runtime.learner(work)
    start = torch.empty(learner.layout.size)
    _fill(work, WEIGHTS, start)

    def moments(room: Tensor) -> None:
        _fill(work, MOMENTS, room)

    def learned() -> tuple[Tensor, Metrics]:
        metrics = runtime.train(work, start, moments)
        return runtime.checked(start.sub_(learner.whole(optimizers.WEIGHTS).cpu())), metrics

    def untrained() -> tuple[Tensor, Metrics]:
        runtime.remember(work, moments)
        return start.zero_(), {}

    (change, metrics), diverged = tried(work, runtime.rate(), learned, untrained)
    change = runtime.with_residual(work, change)
    for number, cut in enumerate(ranges(len(change), _shards(work))):
        vectors.save(work, _change(number), change[cut.start : cut.stop], runtime.config.wire_dtype)
    remembered = runtime.moments(work)
    for number, cut in enumerate(ranges(len(remembered), _shards(work))):
        vectors.save(work, _moments(number), remembered[cut.start : cut.stop], MOMENTS_WIRE)
    return {**metrics, **diverged}


def make_shard(runtime: PretrainingRuntime, work: Work) -> Mapping[str, Any]:
    """One range of the outer step: everybody's changes there, piece by piece, whatever their size."""
    old = work.parents[work.recipe.merge["old"]]
    replicas = [parent for id, parent in work.parents.items() if id != work.recipe.merge["old"]]
    if not replicas:
        raise Failed("no replica of this round is there")
    number, count = work.recipe.merge["shard"], len(_cut(old.metrics["parameters"], work))
    with (
        vectors.opened([old], WEIGHTS, count) as (start,),
        vectors.opened([old], MOMENTUM, count) as (momentum,),
        vectors.opened(replicas, _change(number), count) as changes,
        vectors.created(work, WEIGHTS, count) as new_weights,
        vectors.created(work, MOMENTUM, count) as new_momentum,
    ):
        for weights, moved in runtime.outer.stream(start, momentum, means(changes)):
            new_weights(weights)
            new_momentum(moved)
    count = len(_cut(old.metrics["moments"], work))
    with (
        vectors.opened(replicas, _moments(number), count) as several,
        vectors.created(work, MOMENTS, count, MOMENTS_WIRE) as new_moments,
    ):
        for piece in means(several):
            new_moments(piece)
    return {name: old.metrics[name] for name in ("parameters", "moments")}


def look_at_global(runtime: PretrainingRuntime, work: Work) -> Mapping[str, Any]:
    """The global model as it is worth: without the last step's look ahead."""
    learner = runtime.learner(work)
    weights, momentum = (torch.empty(learner.layout.size) for _ in range(2))
    _fill(work, WEIGHTS, weights)
    _fill(work, MOMENTUM, momentum)
    learner.start(runtime.outer.settled(weights, momentum))
    return runtime.evaluate(work)


def _fill(work: Work, name: str, room: Tensor) -> None:
    """The global model or its moments, put together from the shards."""
    for number, cut in enumerate(ranges(len(room), _shards(work))):
        vectors.load(named(work, f"shard-{number}"), name, room[cut.start : cut.stop])


def _cut(size: int, work: Work) -> range:
    """This shard's."""
    found: range = ranges(size, _shards(work))[work.recipe.merge["shard"]]
    return found


def _shards(work: Work) -> int:
    return shards_in(work.history.plan(0))


def _change(shard: int) -> str:
    return f"change-{shard}.safetensors"


def _moments(shard: int) -> str:
    return f"moments-{shard}.safetensors"

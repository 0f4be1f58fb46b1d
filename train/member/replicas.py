"""DiLoCo's members: replicas that train on their own, and shards that bring their changes together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.work import Failed, Work
from merge.outer import means, ranges
from train.member import vectors
from train.member.studio import Studio, named

WEIGHTS, MOMENTUM = "weights.safetensors", "momentum.safetensors"


def make_warm(studio: Studio, work: Work) -> Mapping[str, Any]:
    """The start that all share: the first steps, on everybody's batches."""
    learner = studio.learner(work)
    start = torch.empty(learner.layout.size)
    vectors.load_weights(named(work, "init-0"), start)
    metrics = studio.train(work, start)
    vectors.save_weights(work, learner.whole(learner.vector), learner.layout)
    studio.keep_optimizer(work)
    return {**metrics, "parameters": learner.layout.size, **studio.evaluate(work)}


def cut_shard(studio: Studio, work: Work) -> Mapping[str, Any]:
    """One range of the first global model; its momentum is zero."""
    (parent,) = work.parents.values()
    whole = torch.empty(parent.metrics["parameters"])
    vectors.load_weights(parent, whole)
    cut = ranges(len(whole), studio.config.shard_count)[work.recipe.merge["shard"]]
    piece = whole[cut.start : cut.stop]
    vectors.save(work, WEIGHTS, piece)
    vectors.save(work, MOMENTUM, torch.zeros_like(piece))
    return {"parameters": len(whole)}


def make_replica(studio: Studio, work: Work) -> Mapping[str, Any]:
    """Train from the global model on the slot's own data, and publish the change."""
    start, learner = _global(studio, work), studio.learner(work)
    metrics = studio.train(work, start)
    change = studio.with_residual(work, studio.checked(start.sub_(learner.whole(learner.vector).cpu())))
    for number, cut in enumerate(ranges(len(change), studio.config.shard_count)):
        vectors.save(work, _change(number), change[cut.start : cut.stop], studio.config.wire_dtype)
    studio.keep_optimizer(work)
    return metrics


def make_shard(studio: Studio, work: Work) -> Mapping[str, Any]:
    """One range of the outer step: everybody's changes there, piece by piece, whatever their size."""
    old = work.parents[work.recipe.merge["old"]]
    replicas = [parent for id, parent in work.parents.items() if id != work.recipe.merge["old"]]
    number, size = work.recipe.merge["shard"], old.metrics["parameters"]
    if not replicas:
        raise Failed("no replica of this round is there")
    count = len(ranges(size, studio.config.shard_count)[number])
    with (
        vectors.opened([old], WEIGHTS, count) as (start,),
        vectors.opened([old], MOMENTUM, count) as (momentum,),
        vectors.opened(replicas, _change(number), count) as changes,
        vectors.created(work, WEIGHTS, count) as new_weights,
        vectors.created(work, MOMENTUM, count) as new_momentum,
    ):
        for weights, moved in studio.outer.stream(start, momentum, means(changes)):
            new_weights(weights)
            new_momentum(moved)
    return {"parameters": size}


def look_at_global(studio: Studio, work: Work) -> Mapping[str, Any]:
    studio.learner(work).start(_global(studio, work))
    return studio.evaluate(work)


def _global(studio: Studio, work: Work) -> Tensor:
    """The global model, put together from its shards."""
    whole = torch.empty(studio.learner(work).layout.size)
    for number, cut in enumerate(ranges(len(whole), studio.config.shard_count)):
        vectors.load(named(work, f"shard-{number}"), WEIGHTS, whole[cut.start : cut.stop])
    return whole


def _change(shard: int) -> str:
    return f"change-{shard}.safetensors"

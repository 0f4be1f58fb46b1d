"""EDT's members: children of several parents, each with an outer step of its own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.recipe import place
from fleet.work import Failed, Parent, Work
from merge.methods.arcs import slerp_all
from merge.outer import Outer, means
from merge.tensor_group import weighted
from train import optimizers
from train.genome import fittest, inherited
from train.member import vectors
from train.member.divergence import tried
from train.member.pretraining_runtime import MOMENTS_WIRE, PretrainingRuntime

WEIGHTS, MOMENTUM, MOMENTS = "weights.safetensors", "momentum.safetensors", "moments.safetensors"
Child = tuple[Tensor, Tensor, dict[str, Any]]  # weights, momentum, metrics


def make_child(runtime: PretrainingRuntime, work: Work) -> Mapping[str, Any]:
    """Cross the parents over, train, take the outer step; evaluate what is published. One that diverges stays what its
    parents made it, and its genome dies with what it learned."""
    learner, settings, c = runtime.learner(work), work.recipe.train, runtime.config
    (start, momentum), parents = _crossed(runtime, work), [parent.metrics for parent in _parents(work)]
    genome = inherited(c, settings["slot"], settings["round"], parents)

    def moments(room: Tensor) -> None:
        room.copy_(mean_of(_parents(work), MOMENTS, len(room)))

    def learned() -> Child:
        metrics = runtime.train(work, start, moments, genome)
        weights, moved = runtime.outer.step(start, momentum, start - learner.whole(optimizers.WEIGHTS).cpu())
        looked_at = _looked_at(runtime, work, runtime.checked(weights), runtime.checked(moved))
        return weights, moved, {**metrics, **genome.metrics(), **looked_at}

    def untrained() -> Child:
        runtime.remember(work, moments)
        kept = fittest(parents, len(c.datasets))
        return start, momentum, {**kept.metrics(), **_looked_at(runtime, work, start, momentum)}

    (weights, momentum, metrics), diverged = tried(work, runtime.rate(genome), learned, untrained)
    vectors.save(work, WEIGHTS, weights, c.weights_wire_dtype)
    vectors.save(work, MOMENTUM, runtime.with_residual(work, momentum), c.wire_dtype)
    if runtime.remembers:
        vectors.save(work, MOMENTS, runtime.moments(work), MOMENTS_WIRE)
    return {**metrics, **diverged}


def _looked_at(runtime: PretrainingRuntime, work: Work, weights: Tensor, momentum: Tensor) -> Mapping[str, Any]:
    """What arrives of them is looked at, without the last step's look ahead."""
    c = runtime.config
    arrived = runtime.through(weights, c.weights_wire_dtype), runtime.through(momentum, c.wire_dtype)
    runtime.learner(work).start(runtime.outer.settled(*arrived))
    return runtime.evaluate(work)


def look_at_mean(runtime: PretrainingRuntime, work: Work) -> Mapping[str, Any]:
    """The averaged model of a generation."""
    learner, parents = runtime.learner(work), _parents(work)
    learner.start(settled(runtime.outer, parents, learner.layout.size))
    return runtime.evaluate(work)


def settled(outer: Outer, members: list[Parent], size: int) -> Tensor:
    """The mean of their weights as it is worth."""
    return outer.settled(mean_of(members, WEIGHTS, size), mean_of(members, MOMENTUM, size))


def mean_of(parents: list[Parent], name: str, size: int) -> Tensor:
    total, begin = torch.empty(size), 0
    with vectors.opened(parents, name, size) as several:
        for piece in means(several):
            total[begin : begin + len(piece)] = piece
            begin += len(piece)
    return total


def _parents(work: Work) -> list[Parent]:
    """Those that are crossed; the slot's own last member may stand beside them for its optimizer's sake."""
    if found := [work.parents[id] for id in work.recipe.merge["of"] if id in work.parents]:
        return found
    raise Failed("none of its parents is there")


def _crossed(runtime: PretrainingRuntime, work: Work) -> tuple[Tensor, Tensor]:
    """Where a child begins: weights and momentum."""
    parents, layout = _parents(work), runtime.learner(work).layout
    if place(work.recipe.merge["of"][0])[0] == 0:
        start = torch.empty(layout.size)
        vectors.load_weights(parents[0], start)
        return start, torch.zeros(layout.size)
    if runtime.config.crossover == "outer":
        return mean_of(parents, WEIGHTS, layout.size), mean_of(parents, MOMENTUM, layout.size)
    shares = _shares(runtime, work)
    momentum = weighted(_loaded(parents, MOMENTUM, layout.size), shares)
    weights = _loaded(parents, WEIGHTS, layout.size)
    if runtime.config.crossover == "linear":
        return weighted(weights, shares), momentum
    start, views = torch.empty(layout.size), [layout.views(each) for each in weights]
    for name, room in layout.views(start).items():
        room.copy_(slerp_all([view[name] for view in views], shares))
    return start, momentum


def _loaded(parents: list[Parent], name: str, size: int) -> list[Tensor]:
    found = [torch.empty(size) for _ in parents]
    for vector, parent in zip(found, parents, strict=True):
        vectors.load(parent, name, vector)
    return found


def _shares(runtime: PretrainingRuntime, work: Work) -> list[float]:
    """Each parent's, of those that are there: as the recipe says, or drawn when the child is made, as its genome is."""
    merge, settings = work.recipe.merge, work.recipe.train
    shares = merge.get("shares") or _drawn(
        len(merge["of"]), runtime.config.seed, settings["round"], settings["slot"], 2
    )
    present = [share for id, share in zip(merge["of"], shares, strict=True) if id in work.parents]
    return [share / sum(present) for share in present]


def _drawn(count: int, *seed: int) -> list[float]:
    return [float(x) for x in np.random.default_rng(seed).dirichlet(np.ones(count))]

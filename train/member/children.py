"""EDT's members: children of several parents, each with an outer step of its own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.recipe import place
from fleet.work import Failed, Parent, Work
from merge.group import weighted
from merge.methods.arcs import slerp_all
from merge.outer import means
from train.genome import inherited
from train.member import vectors
from train.member.studio import Studio

WEIGHTS, MOMENTUM = "u.safetensors", "v.safetensors"


def make_child(studio: Studio, work: Work) -> Mapping[str, Any]:
    """Cross the parents over, train, take the outer step; evaluate what is published."""
    learner, settings, c = studio.learner(work), work.recipe.train, studio.config
    start, momentum = _crossed(studio, work)
    genome = inherited(c, settings["slot"], settings["round"], [parent.metrics for parent in _parents(work)])
    metrics = studio.train(work, start, genome)
    change = studio.checked(start - learner.whole(learner.vector).cpu())
    weights, momentum = studio.outer.step(start, momentum, change)
    momentum = studio.with_residual(work, momentum)
    vectors.save(work, WEIGHTS, weights, c.weights_wire_dtype)
    vectors.save(work, MOMENTUM, momentum, c.wire_dtype)
    studio.keep_optimizer(work)
    learner.start(studio.through(weights, c.weights_wire_dtype))
    return {**metrics, **genome.metrics(), **studio.evaluate(work)}


def look_at_mean(studio: Studio, work: Work) -> Mapping[str, Any]:
    """The averaged model of a generation."""
    learner = studio.learner(work)
    learner.start(mean_of(_parents(work), WEIGHTS, learner.layout.size))
    return studio.evaluate(work)


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


def _crossed(studio: Studio, work: Work) -> tuple[Tensor, Tensor]:
    """Where a child begins: weights and momentum."""
    parents, layout = _parents(work), studio.learner(work).layout
    if place(work.recipe.merge["of"][0])[0] == 0:
        start = torch.empty(layout.size)
        vectors.load_weights(parents[0], start)
        return start, torch.zeros(layout.size)
    if studio.config.crossover == "outer":
        return mean_of(parents, WEIGHTS, layout.size), mean_of(parents, MOMENTUM, layout.size)
    shares = _shares(work)
    momentum = weighted(_loaded(parents, MOMENTUM, layout.size), shares)
    weights = _loaded(parents, WEIGHTS, layout.size)
    if studio.config.crossover == "linear":
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


def _shares(work: Work) -> list[float]:
    """Each parent's, of those that are there."""
    of = zip(work.recipe.merge["of"], work.recipe.merge["shares"], strict=True)
    present = [share for id, share in of if id in work.parents]
    return [share / sum(present) for share in present]

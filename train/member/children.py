"""EDT's members: children of several parents, each with an outer step of its own."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleet.work import Failed, Input, Work
from merge.methods.arcs import slerp_all
from merge.outer import Outer, State, means
from merge.tensor_group import weighted
from train import optimizers
from train.genome import fittest, inherited
from train.member import vectors
from train.member.divergence import tried
from train.member.pretraining_runtime import MOMENTS_WIRE, PretrainingRuntime
from train.member.vectors import MOMENTS, WEIGHTS, kept
from train.pretraining_tasks import ChildArgs, LookArgs, Turn

Child = tuple[State, dict[str, Any]]  # and its metrics


def make_child(runtime: PretrainingRuntime, work: Work, turn: ChildArgs) -> Mapping[str, Any]:
    """Cross the parents over, train, take the outer step; evaluate what is published. One that diverges stays what its
    parents made it, and its genome dies with what it learned."""
    learner, c = runtime.learner(work), runtime.config
    start, parents = _crossed(runtime, work, turn), [parent.metrics for parent in _parents(work)]
    genome = inherited(c, turn.slot, turn.round, parents)

    def moments(room: Tensor) -> None:
        room.copy_(mean_of(_parents(work), MOMENTS, len(room)))

    def learned() -> Child:
        metrics = runtime.train(work, turn, start[0], moments, genome)
        change = start[0] - learner.whole(optimizers.WEIGHTS).cpu()
        messages = _messages(runtime, work, turn, runtime.outer.step(start, change))
        return messages, {**metrics, **genome.metrics(), **_looked_at(runtime, work, messages)}

    def untrained() -> Child:
        runtime.remember(work, turn, moments)
        heir, messages = fittest(parents, len(c.datasets)), _messages(runtime, work, turn, start)
        return messages, {**heir.metrics(), **_looked_at(runtime, work, messages)}

    (messages, metrics), diverged = tried(work, turn.before, runtime.rate(genome), learned, untrained)
    for name, message in zip(kept(runtime.outer), messages, strict=True):
        vectors.save(work, name, message, c.wire_dtype)
        runtime.keep_residual(work, name, message)
    if runtime.remembers:
        vectors.save(work, MOMENTS, runtime.moments(work), MOMENTS_WIRE)
    return {**metrics, **diverged}


def _messages(runtime: PretrainingRuntime, work: Work, turn: Turn, state: State) -> State:
    named = zip(kept(runtime.outer), state, strict=True)
    return tuple(runtime.message(work, turn, name, vector) for name, vector in named)


def _looked_at(runtime: PretrainingRuntime, work: Work, messages: State) -> Mapping[str, Any]:
    """What arrives is looked at, without the last step's look ahead."""
    arrived = [runtime.through(message) for message in messages]
    runtime.learner(work).start(runtime.outer.settled(arrived))
    return runtime.evaluate(work)


def look_at_mean(runtime: PretrainingRuntime, work: Work, args: LookArgs) -> Mapping[str, Any]:
    """The averaged model of a generation."""
    learner, parents = runtime.learner(work), _parents(work)
    learner.start(settled(runtime.outer, parents, learner.layout.size))
    return runtime.evaluate(work)


def settled(outer: Outer, members: list[Input], size: int) -> Tensor:
    """The mean of their weights as it is worth."""
    return outer.settled([mean_of(members, name, size) for name in kept(outer)])


def mean_of(parents: list[Input], name: str, size: int) -> Tensor:
    total, begin = torch.empty(size), 0
    with vectors.opened(parents, name, size) as several:
        for piece in means(several):
            total[begin : begin + len(piece)] = piece
            begin += len(piece)
    return total


def _parents(work: Work) -> list[Input]:
    """Those that are there."""
    if found := [work.inputs[id] for id in work.recipe.parents if id in work.inputs]:
        return found
    raise Failed("none of its parents is there")


def _crossed(runtime: PretrainingRuntime, work: Work, turn: Turn) -> State:
    """Where a child begins."""
    parents, layout, names = _parents(work), runtime.learner(work).layout, kept(runtime.outer)
    if turn.round == 1:
        state = tuple(torch.zeros(layout.size) for _ in names)
        vectors.load_weights(parents[0], state[0])
        return state
    if runtime.config.crossover == "outer":
        return tuple(mean_of(parents, name, layout.size) for name in names)
    shares = _shares(runtime, work, turn)
    several = {name: _loaded(parents, name, layout.size) for name in names}
    state = tuple(weighted(several[name], shares) for name in names)
    if runtime.config.crossover == "slerp":
        views = [layout.views(each) for each in several[WEIGHTS]]
        for name, room in layout.views(state[0]).items():
            room.copy_(slerp_all([view[name] for view in views], shares))
    return state


def _loaded(parents: list[Input], name: str, size: int) -> list[Tensor]:
    found = [torch.empty(size) for _ in parents]
    for vector, parent in zip(found, parents, strict=True):
        vectors.load(parent, name, vector)
    return found


def _shares(runtime: PretrainingRuntime, work: Work, turn: Turn) -> list[float]:
    """Each parent's, of those that are there: drawn when the child is made, as its genome is."""
    parents, dice = work.recipe.parents, np.random.default_rng((runtime.config.seed, turn.round, turn.slot, 2))
    shares = map(float, dice.dirichlet(np.ones(len(parents))))
    present = [share for id, share in zip(parents, shares, strict=True) if id in work.inputs]
    return [share / sum(present) for share in present]

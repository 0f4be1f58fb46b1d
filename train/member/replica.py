"""A replica of DiLoCo: from the global model, through the slot's own data, to a change of it."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor

from fleet.work import Work
from merge.outer_step import ranges
from merge.wire import pieces
from train.member import vectors
from train.member.error_feedback import Feedback
from train.member.home import LEARNED, LEARNED_WIRE, Found
from train.member.inner_loop import Metrics, learn_or_fall_back
from train.member.pretraining_runtime import PretrainingRuntime, checked
from train.member.vectors import file_of, parents_of
from train.training_recipes import ReplicaArgs, in_turn, shards_in

CHANGE = "change"


def make_replica(runtime: PretrainingRuntime, work: Work, turn: ReplicaArgs) -> Metrics:
    """Train from the global model on the slot's own data, and publish the change of what has its turn. One that
    diverges changes nothing; what it had learned before stays."""
    c, size = runtime.config, runtime.learner(work).layout.size
    start, home = runtime.global_model.read(parents_of(work), size), runtime.home.find(work, turn)
    begun = partial(vectors.joined, parents_of(work)) if c.averages_moments else home.begun
    own = home.learned(size) if c.fragments > 1 else None

    def learned() -> tuple[Tensor, Metrics]:
        trained, metrics = runtime.train(work, turn, start if own is None else start - own, begun)
        return checked(start.sub(trained)), metrics

    def untrained() -> tuple[Tensor, Metrics]:
        runtime.inherit(work, turn, begun)
        return torch.zeros(size) if own is None else own.clone(), {}

    (change, metrics), diverged = learn_or_fall_back(work, turn.before, c.lr, learned, untrained)
    _publish(runtime, work, turn, change)
    return {**metrics, **diverged, **_lost(home, turn, c.keeps_home)}


def _publish(runtime: PretrainingRuntime, work: Work, turn: ReplicaArgs, change: Tensor) -> None:
    c, moments = runtime.config, list(runtime.moments(work))
    for number, cut in _turns(work, turn, len(change)):
        with ExitStack() as stack:
            narrow = Feedback(c, work, work.inputs.get(turn.before), file_of(CHANGE, number), len(cut), stack)
            for piece in pieces(change[cut.start : cut.stop]):
                narrow.send(piece)
    if c.averages_moments:
        for moment, vector in moments:
            vectors.save_parts(work, moment.stem, vector, shards_in(work.history.plan(0)), moment.wire)
    if c.keeps_home:
        state = {} if c.averages_moments else {moment.stem: (vector, moment.wire) for moment, vector in moments}
        if c.fragments > 1:
            for _, cut in _turns(work, turn, len(change)):
                change[cut.start : cut.stop] = 0
            state[LEARNED] = change, LEARNED_WIRE
        runtime.home.keep(work, turn, state)


def _turns(work: Work, turn: ReplicaArgs, size: int) -> Iterator[tuple[int, range]]:
    """The shards that the round exchanges."""
    several = ranges(size, shards_in(work.history.plan(0)))
    return ((s, cut) for s, cut in enumerate(several) if in_turn(s, turn.round, turn.fragments))


def _lost(home: Found, turn: ReplicaArgs, keeps: bool) -> Metrics:
    """Said in the report."""
    return {"lost_rounds": home.lost} if keeps and home.lost else {}

"""The inner loop as part of a recipe: it goes on where an earlier attempt got to, and may come to NaN or
infinite numbers, an outcome like any other and the same whoever comes to it."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from fleet.work import Failed, Work
from train.member import vectors
from train.optimizers import MOMENTS, WEIGHTS
from train.verdicts import NotFinite

if TYPE_CHECKING:
    from train.learner import Learner, MicroBatch  # which takes a while to import

T = TypeVar("T")
Metrics = dict[str, Any]
IN_A_ROW = 3  # rounds in which the same slot came to nothing, after which its run stops
_ADVICE = "a lower LR, more WARMUP_STEPS, or a lower CLIP, such as 1, in a run with another PROJECT_NAME"
log = logging.getLogger(__name__)


def train(
    work: Work,
    learner: "Learner",
    begin: Callable[[], None],
    steps: int,
    batch: Callable[[int], "list[MicroBatch]"],
    rate: Callable[[int], float],
    seed: Callable[[int], int],
    said: Metrics | None = None,
) -> float:
    """Take these steps, each with its batch, its learning rate and a seed for dropout; the losses of all of them.
    `said` are metrics about how it began, filled by `begin`; whoever resumes from a snapshot gets them from it."""
    said = {} if said is None else said
    done, total = 0, 0.0
    work.steps = steps
    if saved := work.resume():
        done, total = saved.step, saved.state["total"]
        for kind in (WEIGHTS, MOMENTS):
            with learner.filling(kind) as room:
                vectors.load(saved, kind, room)
        learner.load_optimizer_state(saved.state["optimizer"])
        said.clear()
        said.update(saved.state.get("said", {}))
    else:
        begin()

    def save(saver: Any) -> Mapping[str, Any]:
        total = learner.summed_loss()
        for kind in (WEIGHTS, MOMENTS):
            vectors.save(saver, kind, learner.buffer(kind))
        return {"total": total, "optimizer": learner.state(), "said": said}

    def batches() -> "Iterator[list[MicroBatch]]":
        for step in range(done, steps):
            learner.seed(seed(step))
            yield batch(step)

    for step in learner.train(batches(), map(rate, range(done, steps)), total):
        work.between_steps(done + step, save)
    learner.check()
    return learner.summed_loss()


def learn_or_fall_back(
    work: Work, before: str, advice: str, learn: Callable[[], T], instead: Callable[[], T]
) -> tuple[T, dict[str, Any]]:
    """What learning came to, or what there is without it, and what is to be said of that. `before` is the slot's own
    last member."""
    try:
        return learn(), {}
    except NotFinite as error:
        why = str(error)
    last = work.inputs.get(before)
    count = 1 + (int(last.metrics.get("diverged_in_a_row", 0)) if last else 0)  # without a gap
    if count >= IN_A_ROW:
        raise Failed(f"{why}; training has diverged in {count} rounds in a row of this slot; {advice}")
    log.warning("%s: %s; it counts as untrained; %s", work.id, why, advice)
    return instead(), {"diverged": True, "diverged_in_a_row": count}


def slower(rate: float) -> str:
    """What to try where training diverges; the rate is the highest."""
    return f"its learning rate reached {rate:.3g}: try {_ADVICE}"

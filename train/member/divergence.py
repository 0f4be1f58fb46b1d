"""A training that came to numbers that are none: an outcome like any other, and the same whoever comes to it."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from fleet.work import Failed, Work
from train.loop import NotFinite

T = TypeVar("T")
IN_A_ROW = 3  # rounds in which the same slot came to nothing, after which its run stops
_ADVICE = "a lower LR, more WARMUP_STEPS, or CLIP, in a run with another PROJECT_NAME"
log = logging.getLogger(__name__)


def tried(
    work: Work, before: str, rate: float, learn: Callable[[], T], instead: Callable[[], T]
) -> tuple[T, dict[str, Any]]:
    """What learning came to, or what there is without it, and what is to be said of that. `before` is the slot's own
    last member; the rate is the highest."""
    try:
        return learn(), {}
    except NotFinite as error:
        why = str(error)
    count = 1 + _in_a_row(work, before)
    if count >= IN_A_ROW:
        raise Failed(in_words(f"{why}; training has diverged in {count} rounds in a row of this slot", rate))
    log.warning("%s", in_words(f"{work.id}: {why}; it counts as untrained", rate))
    return instead(), {"diverged": True, "diverged_in_a_row": count}


def in_words(why: str, rate: float) -> str:
    return f"{why}; its learning rate reached {rate:.3g}: try {_ADVICE}"


def _in_a_row(work: Work, before: str) -> int:
    """In how many rounds before this one, without a gap."""
    last = work.inputs.get(before)
    return int(last.metrics.get("diverged_in_a_row", 0)) if last else 0

"""What it means that a member could not be made: nobody can make it, or this machine lacks what another may have."""

import gc
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from fleet import faults
from fleet.config import UserError
from fleet.errors import Lacking, behind
from fleet.work import Failed, Maker, NotOnThisMachine, Work
from train import memory
from train.loop import NotFinite

T = TypeVar("T")


def judging(tools: Callable[[], T], make: Callable[[T, Work], Mapping[str, Any]], advice: str) -> Maker:
    """A maker with tools that it keeps from one recipe to the next. Where memory runs out it lets go of them: they may
    be half changed, and the next recipe needs the room. The advice says which settings need less."""
    kept: list[T] = []

    def making(work: Work) -> Mapping[str, Any]:
        try:
            if not kept:
                kept.append(tools())
            return make(kept[0], work)
        except (UserError, NotFinite) as error:
            if not (short := memory.short(error)):
                raise _meaning(error) from None
        except Exception as error:
            if isinstance(error, (NotOnThisMachine, faults.Fault)) or not (short := memory.short(error)):
                raise
        kept.clear()  # not before the error is gone, and with it what it held
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise NotOnThisMachine(f"{short}; {advice}")

    return making


def _meaning(error: Exception) -> BaseException:
    """A verdict that began with this machine's disk, network, packages or GPU says nothing about other machines."""
    if isinstance(error, Lacking):
        return NotOnThisMachine(str(error))
    for each in behind(error):
        if isinstance(each, OSError) and isinstance(faults.named(each, ""), (faults.Full, faults.Passing)):
            return each
        if memory.of_this_machine(each):
            return each
        if isinstance(each, (OSError, ImportError)):
            return NotOnThisMachine(str(error))
    return Failed(str(error))

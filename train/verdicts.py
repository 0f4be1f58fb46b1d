"""What it means that a member could not be made: nobody can make it, or this machine lacks what another may have, such
as memory."""

import contextlib
import errno
import gc
import os
import re
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fleet import faults
from fleet.errors import Lacking, cause_chain, spoils
from fleet.run_config import UserError
from fleet.work import Failed, Maker, NotOnThisMachine, Work

T = TypeVar("T")
_SAID = ("can't allocate memory", "out of memory", "Cannot allocate memory", "_ALLOC_FAILED", "bad_alloc")
_ASKED = re.compile(r"allocate ([0-9.]+) ?(bytes|[KMGT]?i?B)\b")
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class NotFinite(ValueError):
    """The loss, the weights or the moments are not finite any more."""


def with_verdicts(tools: Callable[[], T], make: Callable[[T, Work], Mapping[str, Any]], advice: str) -> Maker:
    """A maker with tools that it keeps from one recipe to the next. Where memory runs out it lets go of them: they may
    be half changed, and the next recipe needs the room. The advice says which settings need less."""
    kept: list[T] = []

    def making(work: Work) -> Mapping[str, Any]:
        try:
            if not kept:
                kept.append(tools())
            return make(kept[0], work)
        except (UserError, NotFinite) as error:
            if not (short := short_memory(error)):
                raise _meaning(error) from None
        except Exception as error:
            if isinstance(error, (NotOnThisMachine, faults.Fault)) or not (short := short_memory(error)):
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
    for each in cause_chain(error):
        passing = isinstance(each, OSError) and isinstance(faults.named(each, ""), (faults.Full, faults.Passing))
        if passing or of_this_machine(each):
            return each
        if isinstance(each, (OSError, ImportError)):
            return NotOnThisMachine(str(error))
    return Failed(str(error))


# -- memory ------------------------------------------------------------------------------------------------------------


def short_memory(error: BaseException) -> str:
    """How much was asked for and how much there is, if that is what an error came of; nothing else otherwise."""
    for each in cause_chain(error):
        if ran_out(each):
            device, found = "the GPU" if _on_gpu(each) else "this machine", _ASKED.search(str(each))
            asked = f"{shown(float(found[1]) * _UNITS.get(found[2], 1))} more are needed, " if found else ""
            return f"the memory of {device} does not suffice: {asked}of {_there(_on_gpu(each))}"
        if spoils(each):  # memory ran out before that, but this is what matters now
            break
    return ""


def ran_out(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)
    return said or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def of_this_machine(error: BaseException) -> bool:
    """Whether it says nothing about what was tried: memory has run out, or the GPU is not to be used any more."""
    return ran_out(error) or spoils(error)


def works(trial: Callable[[], bool]) -> bool:
    """Whether a model can be asked in this way; if it breaks, it cannot, unless that was this machine."""
    try:
        return trial()
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        if of_this_machine(error):
            raise
        return False


def _on_gpu(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in ("CUDA", "CUBLAS", "CUDNN"))


def _there(gpu: bool) -> str:
    if gpu and torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            free, whole = torch.cuda.mem_get_info()
            return f"{shown(whole)}, {shown(free)} of them free"
    return f"{shown(whole_memory())} that this process may use at most" if not gpu else "what it has"


def whole_memory() -> float:
    """What this process may use at most: the machine's, or a limit that somebody has set."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        limits.append(limit)
    for file in map(Path, _LIMITS):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return float(min(limits))


def shown(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"

"""The GPUs of this machine, found without torch, which takes seconds to load; its workers take them in turn."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet.plain import several


@dataclass(frozen=True)
class Accelerators:
    """What a machine of a run computes with."""

    machine: str
    compute: Sequence[str] = ()  # of each of its GPUs, the compute capability; empty where the driver does not tell
    compiles: bool = False  # torch.compile finds what it needs

    @property
    def generation(self) -> int | None:
        """Of the oldest."""
        return min((int(found[0]) if (found := re.match(r"\d+", each)) else 0 for each in self.compute), default=None)


def visible() -> list[str]:
    if (said := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each.strip() for each in said.split(",") if each.strip()]
    return [str(n) for n in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]


def choose(worker: str, each: int = 1) -> None:
    """`MACHINE-3-0123abcd`, the fourth worker of its machine, has the fourth GPU, or the fourth few of them, and sees
    no other. Where its starter has given it some of its own, these are all that there are."""
    gpus, found = visible(), re.search(r"-(\d+)-[0-9a-f]{8}$", worker)
    if gpus and found:
        first = int(found[1]) * each
        mine = dict.fromkeys(gpus[number % len(gpus)] for number in range(first, first + each))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def sharing(workers: int, there: int, each: int = 1) -> str:
    """What is worth a word where workers take so many GPUs in turn; nothing where each has its own and none is idle."""
    want, whose = workers * each, several(workers, "worker")
    if want > there > 0:
        most = min(workers, math.ceil(want / there))
        return (
            f"{whose} take {several(there, 'GPU')} in turn, up to {most} on one, which share its memory and its speed"
        )
    if want < there:
        return f"{whose} use{'s' * (workers == 1)} {want} of {several(there, 'GPU')}; the others stay idle"
    return ""


def workers(given: int | None, gpus: int | None, threads: int) -> int:
    """How many there should be: one for each GPU, or for so many processors."""
    used = len(visible()) if gpus is None else gpus
    return given or used or max(1, len(os.sched_getaffinity(0)) // threads)

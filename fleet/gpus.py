"""The GPUs of this machine, found without torch, which takes seconds to load; local workers share them."""

import os
import re
from pathlib import Path


def visible() -> list[str]:
    if (said := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each.strip() for each in said.split(",") if each.strip()]
    return [str(n) for n in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]


def choose(worker: str, each: int = 1) -> None:
    """`local-3-...` has the fourth, or the fourth few of them, and sees no other."""
    gpus, found = visible(), re.match(r"local-(\d+)-", worker)
    if gpus and found:
        first = int(found[1]) * each
        mine = dict.fromkeys(gpus[number % len(gpus)] for number in range(first, first + each))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def workers(given: int | None, gpus: int | None, threads: int) -> int:
    """How many there should be: one for each GPU, or for so many processors."""
    used = len(visible()) if gpus is None else gpus
    return given or used or max(1, len(os.sched_getaffinity(0)) // threads)

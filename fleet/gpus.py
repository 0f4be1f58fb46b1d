"""The GPUs of this machine, found without torch, which takes seconds to load; local workers share them."""

import os
import re
from pathlib import Path


def visible() -> list[str]:
    if (said := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [each.strip() for each in said.split(",") if each.strip()]
    return [str(n) for n in range(len([*Path("/dev").glob("nvidia[0-9]*")]))]


def choose(worker: str) -> None:
    """`local-3-...` has the fourth, and sees no other."""
    gpus, found = visible(), re.match(r"local-(\d+)-", worker)
    if gpus and found:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(found[1]) % len(gpus)]


def workers(given: int | None, gpus: int | None, threads: int) -> int:
    """How many there should be: one for each GPU, or for so many processors."""
    used = len(visible()) if gpus is None else gpus
    return given or used or max(1, len(os.sched_getaffinity(0)) // threads)

"""Sums in a fixed order: what a process is told before it computes anything."""

import os
from typing import Any

import torch


def in_fixed_order(threads: int, deterministic: bool = True, precision: str = "") -> None:
    """The same sums in the same order, each time, on this kind of machine, unless nobody asks for it."""
    torch.set_num_threads(threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it CUDA's sums have no fixed order
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # a debugging aid that costs a tenth of the speed
    if torch.cuda.is_available():  # of the API's two spellings, the one that torch.compile reads, too
        torch.set_float32_matmul_precision("high" if precision == "tf32-true" else "highest")

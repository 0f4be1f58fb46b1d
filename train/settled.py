"""What follows from the GPUs of whoever begins a run: found out once, and kept in the run's folder. Nobody's results
depend on what his machine happens to have."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from fleet import gpus
from fleet.host import Host
from fleet.plain import say
from fleet.run import NoRun, open_run
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_config import TrainConfig

C = TypeVar("C", TrainConfig, PosttrainConfig)
_QUERY = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
_BF16 = 8  # the first generation of NVIDIA's that multiplies it


def settled(config: C, where: Path) -> C:
    """With PRECISION as the run has it that is there, or as suits all GPUs here."""
    if config.precision != "auto":
        return config
    return config.model_copy(update={"precision": _begun(where / config.base_dir / config.project_name) or _here()})


def _begun(folder: Path) -> str:
    """As the run says that is there; nothing where there is none."""
    try:
        _, run = open_run(folder, Host(), "reader")
    except NoRun:
        return ""
    return str(run["config"].get("precision", ""))


def _here() -> str:
    found = generations()
    if not found or min(found) < _BF16:
        return "32-true"
    say("Note: PRECISION is bf16-mixed, which all GPUs here know; the run keeps it.")
    return "bf16-mixed"


def generations() -> Sequence[int]:
    """Of all GPUs of this machine, if processes here may use any; asked without torch, which takes memory there."""
    if not gpus.visible():
        return ()
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return [int(each) for each in re.findall(r"^(\d+)\.\d+$", done.stdout, re.M)]

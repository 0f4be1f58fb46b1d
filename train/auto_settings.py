"""Keys that are "auto": PRECISION and COMPILE as suits the GPUs of whoever begins a run; kept in the run's folder, so
that nobody's results depend on what his machine happens to have."""

import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fleet import faults, gpus
from fleet.host import Host
from fleet.plain import say
from fleet.run import NoRun, open_run
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_config import TrainConfig

C = TypeVar("C", TrainConfig, PosttrainConfig)
_QUERY = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
_OPEN = "auto"
_LONG = 500  # steps, of which the first may take minutes
_BF16 = 8  # the first generation of NVIDIA's that multiplies it


def resolve_auto(config: C, where: Path) -> C:
    """With what is left to the machine as the run has it that is there, or as suits the GPUs here."""
    if not (open_keys := [key for key in _CHOSEN if getattr(config, key, "") == _OPEN]):
        return config
    begun, cards = _begun(where / config.base_dir / config.project_name), generations()
    found = {key: begun.get(key, _OPEN) if begun else _CHOSEN[key](config, cards) for key in open_keys}
    if not begun and (told := [f"{key.upper()} {json.dumps(found[key])}" for key in open_keys if cards]):
        say(f"Note: for the GPUs here, the run has {' and '.join(told)}, and keeps it.")
    return config.model_copy(update=found)


def _begun(folder: Path) -> Mapping[str, Any]:
    """As the run says that is there; nothing where there is none."""
    try:
        _, run = open_run(folder, Host(), "reader")
    except (NoRun, faults.Damaged):  # of which is told when the run is made, or joined
        return {}
    return dict(run["config"])


def _precision(config: Any, cards: Sequence[int]) -> str:
    return "bf16-mixed" if cards and min(cards) >= _BF16 else "32-true"


def _compile(config: Any, cards: Sequence[int]) -> bool:
    """Where it pays, and torch.compile finds what it needs."""
    there = shutil.which("cc") and Path(sysconfig.get_path("include"), "Python.h").is_file()
    return bool(cards and there and config.total_steps >= _LONG)


_CHOSEN: Mapping[str, Callable[[Any, Sequence[int]], Any]] = {"precision": _precision, "compile": _compile}


def generations() -> Sequence[int]:
    """Of all GPUs of this machine, if processes here may use any; asked without torch, which takes memory there."""
    if not gpus.visible():
        return ()
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return [int(each) for each in re.findall(r"^(\d+)\.\d+$", done.stdout, re.M)]

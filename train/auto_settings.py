"""Keys that are "auto": PRECISION and COMPILE as suits the GPUs of a run's machines; kept in the run's folder, so that
nobody's results depend on what his machine happens to have."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fleet import faults, gpus
from fleet.gpus import Accelerators
from fleet.host import Host
from fleet.places import here as located
from fleet.plain import say
from fleet.remote import agent
from fleet.run import NoRun, open_run
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_config import TrainConfig

C = TypeVar("C", TrainConfig, PosttrainConfig)
_OPEN = "auto"
_LONG = 500  # steps, of which the first may take minutes
_BF16 = 8  # the first generation of NVIDIA's that multiplies it


def resolve_auto(config: C, where: Path, machines: Sequence[Accelerators] = ()) -> C:
    """With what is left to the machines as the run has it that is there, or as suits them: those of the run, where a
    launcher has asked them, or this one."""
    if not (open_keys := [key for key in _CHOSEN if getattr(config, key, "") == _OPEN]):
        return config
    begun = _begun(located(Path(config.base_dir), where) / config.project_name)
    if begun:
        return config.model_copy(update={key: begun.get(key, _OPEN) for key in open_keys})
    there = machines or [here()]
    found = {key: _CHOSEN[key](config, there) for key in open_keys}
    if any(each.compute for each in there):
        told = " and ".join(f"{key.upper()} {json.dumps(found[key])}" for key in open_keys)
        whose = "of its machines" if machines else "here"
        say(f"Note: for the GPUs {whose}, the run has {told}, and keeps it{_old(there)}.")
    return config.model_copy(update=found)


def _begun(folder: Path) -> Mapping[str, Any]:
    """As the run says that is there; nothing where there is none."""
    try:
        _, run = open_run(folder, Host(), "reader")
    except (NoRun, faults.Damaged):  # of which is told when the run is made, or joined
        return {}
    return dict(run["config"])


def _precision(config: Any, machines: Sequence[Accelerators]) -> str:
    """A machine without a GPU has no say."""
    cards = [each.generation for each in machines if each.generation is not None]
    return "bf16-mixed" if cards and min(cards) >= _BF16 else "32-true"


def _compile(config: Any, machines: Sequence[Accelerators]) -> bool:
    """Where it pays, and all find what it needs."""
    able = any(each.compute for each in machines) and all(each.compiles for each in machines)
    return able and bool(config.total_steps >= _LONG)


_CHOSEN: Mapping[str, Callable[[Any, Sequence[Accelerators]], Any]] = {"precision": _precision, "compile": _compile}


def _old(machines: Sequence[Accelerators]) -> str:
    """Whose GPUs keep the others from bf16."""
    old = [each.machine for each in machines if each.generation is not None and each.generation < _BF16]
    return f"; GPUs of {', '.join(old)} do not multiply bf16, as far as is known" if old else ""


def here() -> Accelerators:
    """All GPUs of this machine, if processes here may use any; asked without torch, which takes memory there."""
    found = agent.accelerators() if gpus.visible() else []
    return Accelerators("this machine", tuple(compute for _, compute in found), agent.compiles())

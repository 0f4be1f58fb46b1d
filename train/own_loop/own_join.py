"""From the arguments of `join` to a run: settings are read and checked, and this process becomes one of its workers."""

import multiprocessing
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fleet import faults
from fleet.errors import refuse
from fleet.joined_worker import JoinedWorker
from fleet.method import Method
from fleet.permissions import keep_private
from fleet.places import address, here
from fleet.plain import say
from fleet.run_config import UserError, lowered, read_json, validated
from train.own_loop.loop_ranks import FollowingRank, LeadingRank, ranks_here
from train.own_loop.own_model import Evaluate, OwnModel
from train.own_loop.own_worker import OwnWorker
from train.own_loop.script_digest import script_digest
from train.own_loop.session import OwnLoopRun
from train.own_loop.shared_model import SharedModel
from train.own_loop_config import OwnLoopConfig, own_loop_problems
from train.training_config import TrainConfig

Settings = str | Path | None
_OF_LAUNCHES = ("num_machines", "restarts", "local_package")  # which say how processes are started


def joined(
    method: Method[OwnLoopConfig],
    script: Sequence[str],
    settings: Settings,
    model: torch.nn.Module,
    learning: Sequence[Any],
    evaluate: Evaluate | None,
    keys: Mapping[str, Any],
) -> OwnLoopRun:
    if getattr(sys.excepthook, "func", None) is not _in_a_line:
        sys.excepthook = partial(_in_a_line, sys.excepthook)
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # it imports the script that has started it
        raise UserError("a data loader's process imports this script, which is to join the run only where it is "
                        'started: put that below if __name__ == "__main__":')  # fmt: skip
    keep_private()
    ranks = ranks_here()
    config, where = configured(method.algorithm, settings, {**keys, "ranks": ranks.count if ranks else 1})
    own = (SharedModel if ranks else OwnModel)(model, learning, evaluate)
    if ranks and not ranks.first:
        return OwnLoopRun(config, own, FollowingRank(ranks, own), None, ranks.rank)
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    worker = JoinedWorker(method, config, here(Path(config.base_dir), where), [*script], command)
    mine = OwnWorker(worker, config, own, LeadingRank(ranks, own) if ranks else None)
    return OwnLoopRun(config, own, mine.hands, mine)


def _in_a_line(before: Callable[..., object], kind: type[BaseException], error: BaseException, at: Any) -> None:
    """Whatever people can set right, nobody has caught, and a data loader may have put its own words around."""
    if isinstance(error, (UserError, faults.Fault)):
        say(str(error).rpartition(f"{UserError.__name__}: ")[2].strip(), file=sys.stderr)
    else:
        before(kind, error, at)


def configured(algorithm: str, settings: Settings, keys: Mapping[str, Any]) -> tuple[OwnLoopConfig, Path]:
    """The configuration, and the folder that its paths are seen from."""
    values, where, named = _read(settings)
    values = {**values, **lowered(keys, "join")}
    if (its := values.pop("algorithm", "")) not in ("", algorithm, algorithm.partition("-")[0]):
        raise UserError(f"{named}: ALGORITHM is {its!r}, and the script joins {algorithm}")
    _check_keys(values, named)
    values = {"project_name": algorithm, "script_digest": script_digest(), **values, "algorithm": algorithm}
    config = validated(OwnLoopConfig, values, named)
    refuse(own_loop_problems(config))
    return config, where


def _read(settings: Settings) -> tuple[dict[str, Any], Path, str]:
    """A configuration file, or the folder of a run, which may be in a bucket."""
    if settings is None:
        return {}, Path.cwd(), "join"
    path = Path(settings)
    if path.suffix == ".json":
        value = read_json(path)
        if not isinstance(value, dict):
            raise UserError(f"{path}: an object is expected, {{...}}")
        return lowered(value, str(path)), path.absolute().parent, str(path)
    folder = here(path)
    return {"base_dir": address(folder.parent), "project_name": folder.name}, Path.cwd(), "join"


def _check_keys(values: Mapping[str, Any], named: str) -> None:
    known = OwnLoopConfig.model_fields
    if theirs := [key.upper() for key in values if key in TrainConfig.model_fields and key not in known]:
        raise UserError(f"{named}: {', '.join(theirs)}: your own script says that; leave it out")
    if started := [key.upper() for key in values if key in _OF_LAUNCHES]:
        raise UserError(f"{named}: {', '.join(started)}: each process that joins is a worker: start some")

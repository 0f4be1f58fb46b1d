"""What a rank of a test does: several trainings, one after the other, in one process group; so that a test waits only
once for processes to start. `torchrun ... -m tests.ranks PLAN.json`"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from fleet.run_config import UserError
from train.cluster.options import CheckpointOptions, TrainingOptions
from train.cluster.ranks import Ranks, joined
from train.cluster.training import train


def one(keys: dict, ranks: Ranks) -> str:
    """How a training ends: its code, or why it could not be."""
    ckpt = CheckpointOptions(**{**keys.pop("ckpt"), "path": Path(keys.pop("out"))})
    if step := keys.pop("stop_at", 0):
        ranks.signals.clear()
        ranks.told_to_stop = _told_at(step)  # type: ignore[method-assign]
    try:
        return str(train(replace(TrainingOptions(**keys), ckpt=ckpt), ranks))
    except UserError as error:
        return str(error)
    finally:
        ranks.__dict__.pop("told_to_stop", None)


def _told_at(step: int):
    calls = [0]

    def told() -> bool:
        calls[0] += 1
        return calls[0] >= step

    return told


if __name__ == "__main__":
    with joined() as ranks:
        said = [one(keys, ranks) for keys in json.loads(Path(sys.argv[1]).read_text())]
        if ranks.first:
            Path(sys.argv[2]).write_text(json.dumps(said))

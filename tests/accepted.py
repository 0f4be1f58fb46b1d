"""Whether a run would begin with these files, as far as that can be told without the files that they name: `python -m
tests.accepted FILE ...`, which ends with the first that is refused."""

import sys
from pathlib import Path

from fleet import machines
from fleet.run_config import load, read_json
from fleet.start import named
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_commands import check_settings
from train.training_config import TrainConfig


def check(file: Path) -> None:
    """Of a list of machines, or of a configuration."""
    value = read_json(file)
    if isinstance(value, list):
        assert len(machines.load(file)) == len(value)
    elif (algorithm := named(file)) in ("edt-evomerge", "es"):
        load(file, PosttrainConfig)
    else:
        check_settings(load(file, TrainConfig).model_copy(update={"algorithm": algorithm or "edt"}))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(Path(name))

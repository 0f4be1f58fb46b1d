"""Which sinks of metrics there are, and whether they can be used here."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping

from fleet.errors import UserError
from fleet.metrics import file_sinks, services
from fleet.metrics.sink import LoggedRun, MetricSink

_HAS_KEY = "import os, wandb; os._exit(not wandb.login(prompt=False, verify=False))"
KINDS: Mapping[str, Callable[[LoggedRun], MetricSink]] = {
    "csv": file_sinks.CsvTable,
    "tensorboard": file_sinks.Board,
    "wandb": services.Wandb,
    "trackio": services.Trackio,
}


def lacking(kinds: Iterable[str]) -> list[str]:
    """Those whose package, which has the same name, is not here."""
    return [kind for kind in kinds if kind != "csv" and importlib.util.find_spec(kind) is None]


def check(kinds: Iterable[str]) -> None:
    """Complain about what cannot work here."""
    if missing := lacking(kinds):
        raise UserError(
            f"metrics for {' and '.join(missing)} need what is not installed here: "
            f"{sys.executable} -m pip install {' '.join(missing)}"
        )
    if "wandb" in kinds and os.environ.get("WANDB_MODE", "online") == "online":
        # in a process of its own, which no server can keep from ending
        if subprocess.run([sys.executable, "-c", _HAS_KEY], stdin=subprocess.DEVNULL, capture_output=True).returncode:
            raise UserError("Weights & Biases has no key here: wandb login, or WANDB_MODE=offline")

"""What a sink of metrics is, which there are, and whether they can be used here.

What a sink holds already it knows by itself, so that nothing beside it has to be kept in step with it. Any error is
for its caller, who opens it again and goes on after `upto`.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fleet.wrong import Wrong

_HAS_KEY = "import os, wandb; os._exit(not wandb.login(prompt=False, verify=False))"


@dataclass(frozen=True)
class Point:
    """What is known of one step; a table may have other rows of it than that one."""

    step: int
    values: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Home:
    """Whose metrics these are."""

    folder: Path
    project: str
    name: str
    id: str  # nobody else's
    entity: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    after: int = -1  # what was written up to this step stays and later ones come again; -1: all come again


class Sink(Protocol):
    upto: int  # the last step that it holds; -1: none

    def write(self, points: Sequence[Point]) -> None: ...
    def close(self, files: Sequence[Path] = ()) -> None:
        """Nothing more comes; some can keep files, too."""


def sink_of(kind: str, home: Home) -> Sink:
    from fleet.metrics import files, services

    kinds: Mapping[str, Callable[[Home], Sink]] = {
        **{"csv": files.Table, "tensorboard": files.Board},
        **{"wandb": services.Wandb, "trackio": services.Trackio},
    }
    return kinds[kind](home)


def lacking(kinds: Iterable[str]) -> list[str]:
    """Those whose package, which has the same name, is not here."""
    return [kind for kind in kinds if kind != "csv" and importlib.util.find_spec(kind) is None]


def check(kinds: Iterable[str]) -> None:
    """Complain about what cannot work here."""
    if missing := lacking(kinds):
        raise Wrong(
            f"metrics for {' and '.join(missing)} need what is not installed here: "
            f"{sys.executable} -m pip install {' '.join(missing)}"
        )
    if "wandb" in kinds and os.environ.get("WANDB_MODE", "online") == "online":
        told = [sys.executable, "-c", _HAS_KEY]  # in a process of its own, which no server can keep from ending
        if subprocess.run(told, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
            raise Wrong("Weights & Biases has no key here: wandb login, or WANDB_MODE=offline")

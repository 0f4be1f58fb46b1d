"""Sinks that are other people's programs. Their keys and servers are their own business: environment and logins."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet.errors import UserError, first_line
from fleet.metrics.sink import LoggedRun, Point


class Wandb:
    """Weights & Biases: one run there for one here, however often it is opened; steps that it has are passed over."""

    def __init__(self, logged: LoggedRun) -> None:
        import wandb

        self._wandb, self._logged = wandb, logged
        try:
            self._run: Any = wandb.init(
                project=logged.project, entity=logged.entity or None, id=logged.id, name=logged.name, resume="allow",
                dir=str(logged.folder), config=dict(logged.config),
                settings=wandb.Settings(silent=True, console="off"),
            )  # fmt: skip
        except wandb.errors.UsageError as error:  # nobody is logged in here
            raise UserError(first_line(error)) from None
        self.upto = int(self._run.step) - 1
        self._shown = False

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step, commit=True)
        if not self._shown and self._logged.after < 0 and self._run.settings._offline:
            self._forget_others()
        self._shown = True

    def close(self, files: Sequence[Path] = ()) -> None:
        if files:
            artifact = self._wandb.Artifact(f"best-{self._logged.id}", "recipe")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)
        self._run.finish()

    def _forget_others(self) -> None:
        """Nobody tells an offline run how far it has got: it begins anew, and has all that earlier ones have."""
        mine = Path(self._run.dir).parent
        for each in mine.parent.glob(f"offline-run-*-{self._logged.id}"):
            if each != mine:
                shutil.rmtree(each, ignore_errors=True)


class Trackio:
    """Trackio's database on this machine, or the server that its own environment variables name."""

    def __init__(self, logged: LoggedRun) -> None:
        os.environ.setdefault("TRACKIO_STORAGE_MODE", "sqlite")  # what lies in its inbox could not be counted
        import trackio

        with contextlib.redirect_stdout(None), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._run: Any = trackio.init(
                project=logged.project, name=f"{logged.name}-{logged.id[:6]}", config=dict(logged.config),
                resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        if failed := [str(each.message) for each in said if "trackio.init() could not" in str(each.message)]:
            raise ConnectionError(failed[0])  # it would begin again, and have every point twice
        self.upto = int(self._run._next_step) - 1
        self._trackio: Any = trackio

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.step)

    def close(self, files: Sequence[Path] = ()) -> None:
        with contextlib.redirect_stdout(None):
            self._trackio.finish()

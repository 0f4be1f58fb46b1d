"""Where the metrics of a training go: the sinks of the fleet's runs, or nowhere."""

import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fleet.errors import first_line
from fleet.metrics.sink import LoggedRun, MetricSink, Point
from fleet.metrics.sinks import KINDS, check
from fleet.plain import say

_SAY = 1000  # it is said again after so many steps


class MetricsLog(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


def log_of(kind: str, folder: Path, project: str, begin: int) -> MetricsLog:
    """From a step on: what was logged after it, before a crash, is forgotten or passed over."""
    if kind == "dummy":
        return Nowhere()
    check([kind])
    return Logged(kind, LoggedRun(folder, project, folder.name, _id(folder), after=begin or -1))


def _id(folder: Path) -> str:
    """Of the training, which goes on under it."""
    file = folder / "metrics-id"
    if not file.is_file():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text().strip()


class Nowhere:
    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass


class Logged:
    """A sink that fails costs nothing but its points, and these come when it works again."""

    def __init__(self, kind: str, logged: LoggedRun) -> None:
        self._kind, self._logged = kind, logged
        self._sink: MetricSink | None = KINDS[kind](logged)
        self._late = list[Point]()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._late.append(Point(step, values))
        try:
            if self._sink is None:
                self._sink = KINDS[self._kind](replace(self._logged, after=self._late[0].step - 1 or -1))
            upto = self._sink.upto
            self._sink.write([point for point in self._late if point.step > upto])
            self._late = []
        except Exception as error:  # of a disk, or whatever a service can come up with
            if self._sink or len(self._late) % _SAY == 0:
                say(f"{self._kind} takes no metrics: {first_line(error)}; training goes on")
            self._sink = None

    def close(self) -> None:
        if self._sink:
            self._sink.close()

"""Sinks that are files in the run's folder: they begin anew whenever they are opened, and show it all at once. Whoever
still has an older one open writes to a file that has no name any more."""

import contextlib
import csv
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fleet.metrics.sink import LoggedRun, Point

TABLE, BOARD = "metrics.csv", "tensorboard"
_EVENTS = re.compile(r"events\.out\.tfevents\.([0-9]+).*")


class CsvTable:
    """A row for each step, or several. Written as a whole at first, and where a column is new."""

    def __init__(self, logged: LoggedRun) -> None:
        self.upto, self._path = logged.after, logged.folder / TABLE
        self._names = list[str]()
        self._file: TextIO | None = None
        if logged.after >= 0 and self._path.is_file():
            self._replace([row for row in self._there() if _step(row) <= logged.after])

    def write(self, points: Sequence[Point]) -> None:
        rows = [row for point in points for row in _rows(point)]
        if self._file and all(row.keys() <= {*self._names} for row in rows):
            self._append(self._file, rows)
        elif rows:
            self._replace([*(self._there() if self._file else []), *rows])

    def close(self, files: Sequence[Path] = ()) -> None:
        if self._file:
            self._file.close()

    def _there(self) -> list[dict[str, Any]]:
        with self._path.open(newline="") as file:
            return [*csv.DictReader(file)]

    def _replace(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._names = [*dict.fromkeys(name for row in rows for name in row)] or ["step"]
        draft = self._path.with_name(_draft(self._path.name))
        self.close()
        self._file = draft.open("x", newline="")
        try:
            csv.writer(self._file, lineterminator="\n").writerow(self._names)
            self._append(self._file, rows)
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        for old in self._path.parent.glob(f".{self._path.name}.*.draft"):  # of those who were killed
            old.unlink(missing_ok=True)

    def _append(self, file: TextIO, rows: Sequence[Mapping[str, Any]]) -> None:
        csv.DictWriter(file, self._names, restval="", lineterminator="\n").writerows(rows)
        file.flush()


def _rows(point: Point) -> Sequence[Mapping[str, Any]]:
    return [{"step": point.step, **point.values}] if point.rows is None else point.rows


def _step(row: Mapping[str, str]) -> int:
    return int(row["step"]) if (row.get("step") or "").isdigit() else 1 << 62


class Board:
    """TensorBoard's event files. A new one tells TensorBoard to forget the steps that it brings again."""

    def __init__(self, logged: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.upto, self._folder, self._whole = logged.after, logged.folder / BOARD, logged.after < 0
        self._folder.mkdir(exist_ok=True)
        self._draft: Path | None = self._folder / _draft("events")
        self._file, self._event = self._draft.open("xb"), Event
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        self._add(session_log=SessionLog(status=SessionLog.START), step=logged.after + 1)

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._add(step=point.step, summary=Summary(value=values))
        self._file.flush()
        if self._draft:
            self._show(self._draft)
            self._draft = None

    def close(self, files: Sequence[Path] = ()) -> None:
        self._file.close()
        if self._draft:
            self._draft.unlink(missing_ok=True)

    def _add(self, **said: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **said).SerializeToString())

    def _show(self, draft: Path) -> None:
        """After those that are there; in their place, where it has all that they have."""
        there = {each: int(found[1]) for each in self._folder.iterdir() if (found := _EVENTS.fullmatch(each.name))}
        draft.rename(self._folder / f"events.out.tfevents.{max(there.values(), default=0) + 1:010d}.run")
        for each in [*there, *self._folder.glob(".*.draft")] if self._whole else ():
            with contextlib.suppress(OSError):
                each.unlink()


def _draft(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex[:8]}.draft"

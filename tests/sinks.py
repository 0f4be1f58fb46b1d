"""What sinks hold, read back by other means than they were written with."""

import csv
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

Points = list[tuple[int, dict[str, float]]]  # by step; a step that is there twice stands there twice


def needs(*packages: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is missing (requirements-metrics.txt)")


def table(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def board(run: Path) -> Points:
    """As TensorBoard itself reads it, but from one file at a time, so that it hides nothing that is there twice."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    found: Points = []
    for file in sorted((run / "tensorboard").glob("*tfevents*")):
        for data in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(data)
            if event.HasField("summary"):
                found.append((event.step, {value.tag: value.simple_value for value in event.summary.value}))
    return found


def wandb_records(run: Path) -> list[Any]:
    """All that offline runs have noted in their own files."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    return [Record.FromString(data) for file in files for data in _leveldb(file.read_bytes())]


def wandb(run: Path) -> Points:
    history = [each.history for each in wandb_records(run) if each.WhichOneof("record_type") == "history"]
    found = []
    for each in history:
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in each.item}
        found.append((int(values["_step"]), {key: x for key, x in values.items() if key[0] != "_"}))
    return found


def _leveldb(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, behind a header of 7 bytes; one that was cut off is passed over."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (1 << 15) - at % (1 << 15) < 7:
            at += (1 << 15) - at % (1 << 15)
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = data[at + 7 : at + 7 + size], at + 7 + size
        parts = part if kind in (1, 2) else parts + part
        if kind in (1, 4) and len(part) == size:
            yield parts


def trackio(folder: Path) -> Points:
    found: Points = []
    for file in folder.glob("*.db"):
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as base:
            made = base.execute("select 1 from sqlite_master where name = 'metrics'").fetchall()
            rows = base.execute("select step, metrics from metrics order by id").fetchall() if made else []
        found += [(step, json.loads(metrics)) for step, metrics in rows]
    return found

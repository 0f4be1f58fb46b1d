"""Snapshots of a long recipe: what its next maker goes on from."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fleet import faults, strictjson
from fleet.hashed_files import HashedFile
from fleet.payload import SNAPSHOT, Files, Payload, PayloadWriter, files_of
from fleet.store import Store

_MANIFEST = re.compile(r"snapshot\.([0-9]{1,15})\.json")


def take(writer: PayloadWriter, step: int, save: Callable[["Saver"], Any]) -> None:
    """Keep what the recipe needs to go on from here; the manifest comes last, then the snapshot before it goes."""
    writer.has_snapshot = True
    saver = Saver(writer, step)
    state = save(saver)
    writer.sync()
    manifest = {"step": step, "state": state, "files": saver.files}
    writer.store.settle(f"{writer.place}/{SNAPSHOT}{step}.json", manifest)
    writer.remove(lambda name: name.startswith(SNAPSHOT) and not name.startswith(f"{SNAPSHOT}{step}."))


class Saver:
    """Hands a snapshot's files to the writer; what a maker saves into."""

    def __init__(self, writer: PayloadWriter, step: int) -> None:
        self._writer, self._step = writer, step
        self.files: Files = {}

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[HashedFile]:
        self._writer.check(name)
        with contextlib.closing(self._writer.hashed(f"{SNAPSHOT}{self._step}.{name}")) as file:
            yield file
            file.sync()
        self.files[name] = file.seal()


@dataclass(frozen=True)
class Snapshot(Payload):
    """Where an earlier attempt at a long recipe had got to."""

    step: int = 0
    state: Any = None


def latest(store: Store, prefix: str) -> Snapshot | None:
    """The furthest whole snapshot that any attempt whose name starts so has left."""
    files = [(each, name) for each in store.names("files") if each.startswith(prefix)
             for name in store.names(f"files/{each}")]  # fmt: skip
    found = [(int(manifest[1]), attempt) for attempt, name in files if (manifest := _MANIFEST.fullmatch(name))]
    for step, attempt in sorted(found, reverse=True):
        try:
            record = store.read(f"files/{attempt}/{SNAPSHOT}{step}.json")
            wanted, start = files_of(record["files"]), f"{SNAPSHOT}{step}."
            snapshot = Snapshot(store, attempt, wanted, start, step=step, state=record["state"])
            snapshot.check()
            return snapshot
        except faults.Passing:  # says nothing about the snapshot, and beginning again would cost all of it
            raise
        except (faults.Fault, strictjson.BadJson, KeyError, TypeError, ValueError):
            continue
    return None

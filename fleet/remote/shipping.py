"""What a machine's supervisor and its workers write on their own disk, brought to a run in a bucket: logs as they
grow, and what the supervisor says last. A process of its own, on a leash: it ends once all is there and the supervisor
gone."""

import contextlib
import os
import sys
import threading
from pathlib import Path

from fleet import faults
from fleet.host import Host
from fleet.processes import hold_leash
from fleet.run import open_run
from fleet.store import Appender, Store

_EVERY = 10.0  # seconds
_PART = 1 << 16


class Shipper:
    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store = folder, store
        self._logs: dict[str, tuple[Appender, int]] = {}  # and how much of it is there
        self._said: dict[str, bytes] = {}

    def ship(self) -> None:
        """What does not succeed now comes with the next time."""
        for file in sorted(self.folder.iterdir()):
            with contextlib.suppress(faults.Fault, OSError):
                if file.suffix == ".log":
                    self._grow(file)
                elif file.suffix == ".supervisor" and (now := file.read_bytes()) != self._said.get(file.name):
                    self.store.replace(f"workers/{file.name}", now)
                    self._said[file.name] = now

    def _grow(self, file: Path) -> None:
        name = f"workers/{file.name}"
        if file.name not in self._logs:
            there = 0
            with contextlib.suppress(faults.Missing):
                there = self.store.tail(name).size
            self._logs[file.name] = self.store.append(name), there
        log, at = self._logs[file.name]
        with file.open("rb") as text:
            text.seek(at)
            while part := text.read(_PART):
                log.write(part)
                at += len(part)
                self._logs[file.name] = log, at


def main(folder: str, run: str) -> None:
    host = Host()
    threading.Thread(target=hold_leash, args=(host,), daemon=True).start()
    shipper = Shipper(Path(folder), open_run(Path(run), host, f"shipper-{os.getpid()}")[0])
    while not host.stopping:
        shipper.ship()
        host.sleep(_EVERY)
    shipper.ship()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A toy run in a temporary folder and its worker processes: started, watched from outside, and always ended."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet import launches
from fleet.host import Host
from fleet.processes import thread_counts
from fleet.run import create_run
from fleet.store import Store
from tests.toy.config import ToyConfig

ENDLESS = 90_000  # rounds: a run that is measured for some seconds and then left
TOY = [sys.executable, "-m", "tests.toy"]
_TICK = os.sysconf("SC_CLK_TCK")

Event = dict[str, Any]


@dataclass
class Toys:
    """One run and the workers that were started on it."""

    folder: Path
    store: Store
    config: ToyConfig
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, names: list[str], **settings: Any) -> None:
        """Start workers that are under these operational settings, and wait until each has read them."""
        launch = launches.begin(self.store, self.config.model_copy(update=settings).operational())
        with (self.folder / "log").open("ab") as log:
            for name in names:
                words = [*TOY, "--leash", "--launch", str(launch), "--worker", name, str(self.folder)]
                self.processes[name] = subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=log, stderr=log,
                    env={**os.environ, **thread_counts(self.config.threads)}, start_new_session=True,
                )  # fmt: skip
        self.wait(lambda: all(self.has(name, "started") for name in names), 5 + 3 * len(names))

    def has(self, name: str, what: str) -> bool:
        return any(event["what"] == what for event in self.of(name))

    def of(self, name: str) -> list[Event]:
        path = self.folder / "workers" / f"{name}.events"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def events(self, what: str) -> list[Event]:
        """Of all workers, by time."""
        found = [{**event, "by": name} for name in self.processes for event in self.of(name) if event["what"] == what]
        return sorted(found, key=lambda event: event["at"])

    def cpu(self) -> float:
        """Seconds that all workers have used so far."""
        return sum(cpu_of(each.pid) for each in self.processes.values())

    def wait(self, until: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not until():
            dead = [name for name, each in self.processes.items() if each.poll() is not None]
            if dead or time.monotonic() > end:
                said = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{', '.join(dead) or 'nobody'} ended too early, or it took too long:\n{said}")
            time.sleep(0.1)

    def end(self, seconds: float = 20.0) -> None:
        """Ask every worker to end at its next step, and kill those that do not."""
        for each in self.processes.values():
            each.terminate()
        end = time.monotonic() + seconds
        for each in self.processes.values():
            try:
                each.wait(max(0.01, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                each.kill()
                each.wait()
            if each.stdin:
                each.stdin.close()


@contextlib.contextmanager
def toys(base: Path, name: str, **settings: Any) -> Iterator[Toys]:
    """A new run; its workers end with the block."""
    config = ToyConfig(project_name=name, max_generations=ENDLESS, log_level="WARNING", **settings)
    store, _ = create_run(base, name, config.bound(), Host())
    run = Toys(base / name, store, config)
    try:
        yield run
    finally:
        run.end()


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used, itself and the kernel for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK

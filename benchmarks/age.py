"""Whether a run's cost grows with its age: a long run of few members, and a short one of very many.

    python -m benchmarks.age --quick

A run is started as a person would, on a folder in memory, with one worker and a logger beside it. When it has finished
so many rounds, the memory that each process holds is looked at, and the CPU that it took for each of the last rounds.
Beside that: what somebody pays who looks at the run for the first time then.
"""

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cyclopts import App
from rich.console import Console
from rich.table import Table

from benchmarks.figures import table
from benchmarks.workers import ENDLESS, TOY, cpu_of
from tests.helpers import pids

MARKS = (1_000, 5_000, 20_000)  # rounds
WIDE, FEW = 4_096, 5  # slots, rounds
_LAST = 500  # rounds over which CPU is measured
_LOOKERS = {"status": "fleet.status", "report": "fleet.report"}

app = App(name="python -m benchmarks.age", help=__doc__, help_format="plaintext", version_flags=[])


@dataclass
class Seen:
    """One process at one moment."""

    rounds: int
    cpu: float
    memory: int  # bytes


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen[bytes]
    rounds: int = 0  # so many are planned
    seen: dict[str, list[Seen]] = field(default_factory=dict)

    def look(self) -> None:
        while (self.folder / f"rounds/{self.rounds:05d}/plan").exists():
            self.rounds += 1
        found = {"starter": [self.process.pid]}
        found |= {"worker": pids("--worker", str(self.folder)), "logger": pids("--sink", str(self.folder))}
        for name, numbers in found.items():
            with contextlib.suppress(OSError):
                seen = Seen(self.rounds, sum(map(cpu_of, numbers)), sum(map(_memory, numbers)))
                self.seen.setdefault(name, []).append(seen)


@app.default
def main(*, quick: bool = False, place: Path = Path("/dev/shm"), marks: tuple[int, ...] = MARKS) -> None:
    """Measure.

    Parameters
    ----------
    quick:
        Fewer rounds, fewer slots.
    place:
        Where the runs' folders are.
    marks:
        After so many rounds.
    """
    marks, wide = ((200, 400, 800), 512) if quick else (marks, WIDE)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        Console(width=150).print(long(Path(folder), marks))
        Console(width=150).print(broad(Path(folder), wide))


def long(place: Path, marks: Sequence[int]) -> Table:
    """Few members, many rounds."""
    columns = ("rounds", "process", "MB", "CPU ms a round", "looked at", "CPU s", "MB")
    shown = table("Three members, and ever more rounds", *columns)
    with started(place, "long", population_size=3, max_generations=ENDLESS, size=4, inner_steps=1) as run:
        for mark in marks:
            _wait(run, mark)
            looks = [(name, *_looked(module, run.folder)) for name, module in _LOOKERS.items()] + [("", 0.0, 0.0)]
            for (name, seen), (what, cpu, memory) in zip(run.seen.items(), looks, strict=False):
                more = (what, f"{cpu:.2f}", f"{memory:.0f}") if what else ()
                shown.add_row(str(mark), name, f"{seen[-1].memory / 1e6:.0f}", f"{_cost(seen):.2f}", *more)
            Console(width=150).print(shown)
    return shown


def broad(place: Path, slots: int) -> Table:
    """Many members, few rounds."""
    shown = table(f"{slots} members, {FEW} rounds", "process", "most MB", "CPU s a round")
    with started(place, "wide", population_size=slots, max_generations=FEW, size=4, inner_steps=1) as run:
        while run.process.poll() is None:
            run.look()
            time.sleep(0.2)
        for name, seen in run.seen.items():
            cpu = max(each.cpu for each in seen) / FEW
            shown.add_row(name, f"{max(each.memory for each in seen) / 1e6:.0f}", f"{cpu:.2f}")
    return shown


@contextlib.contextmanager
def started(place: Path, name: str, **keys: object) -> Iterator[Run]:
    file = place / f"{name}.json"
    plain = {"project_name": name, "base_dir": "runs", "log_level": "ERROR", "algorithm": "matching"}
    file.write_text(json.dumps({**plain, **keys}))
    with (place / f"{name}.out").open("wb") as out:
        command = [*TOY, "--config", str(file), "--workers", "1"]
        run = Run(place / "runs" / name, subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True))
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(60)


def _wait(run: Run, rounds: int) -> None:
    while run.rounds < rounds:
        if run.process.poll() is not None:
            raise RuntimeError(f"{run.folder}: ended with code {run.process.returncode} after {run.rounds} rounds")
        run.look()
        time.sleep(0.2)


def _cost(seen: Sequence[Seen]) -> float:
    """CPU ms of each of the last rounds."""
    last = seen[-1]
    before = next((each for each in reversed(seen) if last.rounds - each.rounds >= _LAST), seen[0])
    return 1000 * (last.cpu - before.cpu) / max(1, last.rounds - before.rounds)


def _looked(module: str, folder: Path) -> tuple[float, float]:
    """A command that only looks at the run: seconds of CPU, and the most MB that it held."""
    process = subprocess.Popen([sys.executable, "-m", module, str(folder)], stdout=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def _memory(pid: int) -> int:
    """What it alone holds: pages that it has touched and does not share with a file."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    app()

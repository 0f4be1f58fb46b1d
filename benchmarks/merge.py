"""How fast merging is: beside a program that only reads all inputs and writes one output, and beside mergekit.

    python -m benchmarks.merge                                      # three models of 1 GB each, made on the spot
    python -m benchmarks.merge --hidden 4096 --layers 32 --rounds 1 --method linear --method ties --cold  # of 13 GB
    python -m benchmarks.merge --mergekit elsewhere/bin/mergekit-yaml --layers 8

What is written is synced to the disk, by us and by that program (not by mergekit). Seconds are of whole processes;
"after start-up" leaves out what the same command takes for models of a few kilobytes. With --cold the system has
forgotten the models each time: nothing is read from memory that has to come from the disk.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import yaml
from cyclopts import App, Parameter
from rich.console import Console

from benchmarks.figures import NONE, goal, spread, table
from benchmarks.models import MODELS

app = App(name="python -m benchmarks.merge", help=__doc__, version_flags=[])
HALVES = {"weight": 0.5, "density": 0.5}
RECIPES = {  # method: models, whether the first is the base, parameters of each, parameters
    "linear": (3, False, {"weight": 0.3}, {}),
    "slerp": (2, True, {}, {"t": 0.4}),
    "task_arithmetic": (3, True, {"weight": 0.5}, {}),
    "ties": (3, True, HALVES, {}),
    "dare_ties": (3, True, HALVES, {}),
    "karcher": (3, False, {}, {}),
}
OVER_READING = {"linear": 1.5, "slerp": 1.5, "ties": 3.0, "dare_ties": 3.0}
OVER_MERGEKIT = {"linear": 3, "slerp": 5, "ties": 10}


def recipe(method: str, folder: Path) -> Path:
    count, base, each, shared = RECIPES[method]
    paths = [str(folder / name) for name in MODELS[:count]]
    models = [{"model": path, **({"parameters": dict(each)} if each else {})} for path in paths[base:]]
    made = {"merge_method": method, "models": models, "dtype": "bfloat16", **({"parameters": shared} if shared else {})}
    file = folder / f"{method}.yml"
    file.write_text(yaml.safe_dump({**made, **({"base_model": paths[0]} if base else {})}, sort_keys=False))
    return file


def timed(command: list[str]) -> tuple[float, int]:
    """Seconds, and the most memory that it had."""
    begin = time.monotonic()
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert started.stderr
    error = started.stderr.read().decode()
    _, status, usage = os.wait4(started.pid, 0)
    started.returncode = os.waitstatus_to_exitcode(status)
    if started.returncode:
        raise SystemExit(f"{' '.join(command)}: {error[-2000:]}")
    return time.monotonic() - begin, usage.ru_maxrss * 1024


def forgotten(inputs: list[Path]) -> None:
    """None of it stays in the system's memory."""
    for path in inputs:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_and_write(inputs: list[Path], out: Path) -> float:
    """Read all files, write as much as one of them, sync."""
    room = memoryview(bytearray(8 << 20))
    begin = time.monotonic()
    with out.open("wb", buffering=0) as target:
        for number, path in enumerate(inputs):
            with path.open("rb", buffering=0) as source:
                while count := source.readinto(room):
                    if number == 0:
                        target.write(room[:count])
        os.fsync(target.fileno())
    seconds = time.monotonic() - begin
    out.unlink()
    return seconds


def ours(folder: Path, method: str) -> tuple[float, int]:
    out = folder / "mine"
    shutil.rmtree(out, ignore_errors=True)
    found = timed([sys.executable, "-m", "merge", str(recipe(method, folder)), str(out)])
    shutil.rmtree(out)
    return found


def theirs(mergekit: Path, folder: Path, method: str) -> tuple[float, int]:
    out = folder / "theirs"
    found = timed([str(mergekit), str(recipe(method, folder)), str(out), "--quiet", "--no-copy-tokenizer"])
    shutil.rmtree(out)
    return found


@app.default
def main(
    mergekit: Annotated[Path | None, Parameter(help="mergekit-yaml, in an environment of its own.")] = None,
    hidden: Annotated[int, Parameter(help="Of the models: 4096, with 32 layers, is that of one of 7 billion.")] = 1536,
    layers: Annotated[int, Parameter(help="Of 57 MB each, where HIDDEN is 1536.")] = 14,
    rounds: int = 3,
    method: Annotated[tuple[str, ...], Parameter(help="Only this one; may be said again.")] = tuple(RECIPES),
    folder: Annotated[Path | None, Parameter(help="On the disk to be measured.")] = None,
    cold: Annotated[bool, Parameter(negative="", help="Nothing of the models is in the system's memory.")] = False,
) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        large, small = Path(temporary) / "large", Path(temporary) / "small"
        for where, shape in ((large, (hidden, layers, 32000)), (small, (64, 1, 64))):
            command = [sys.executable, "-m", "benchmarks.models", str(where), "bfloat16", *map(str, shape)]
            subprocess.run(command, check=True)
        start = median(ours(small, "linear")[0] for _ in range(5))
        plain = median(timed([sys.executable, "-c", "import torch"])[0] for _ in range(5))
        size = (large / "a" / "model.safetensors").stat().st_size
        console = Console(width=160)
        beyond = goal(start - plain <= 1, f"{start - plain:.2f} s more than `import torch` ({plain:.2f} s; goal: 1 s)")
        console.print(f"Start-up: {beyond}. Models of {size / 1e9:.2f} GB, {rounds} rounds, medians and extremes.")
        columns = ("seconds", "after start-up", "GB/s", "only read and write", "ratio", "peak MB")
        shown = table("Merging", "method", *columns, "mergekit: seconds", "peak MB", "times as fast", "memory")
        for each in method:
            shown.add_row(each, *measured(large, each, start, rounds, mergekit, size, cold))
        console.print(shown)


def measured(
    folder: Path, method: str, start: float, rounds: int, mergekit: Path | None, size: int, cold: bool
) -> list[str]:
    inputs = [folder / name / "model.safetensors" for name in MODELS[: RECIPES[method][0]]]
    mine, limits = [], []
    for _ in range(rounds):
        forgotten(inputs if cold else [])
        limits.append(read_and_write(inputs, folder / "copy"))
        forgotten(inputs if cold else [])
        mine.append(ours(folder, method))
    seconds, peak = [each[0] for each in mine], max(each[1] for each in mine) / 1e6
    after = median(seconds) - start
    ratio = after / median(limits)
    most = OVER_READING.get(method)
    words = goal(ratio <= most, f"{ratio:.2f} (goal {most})") if most else f"{ratio:.2f}"
    speed = f"{size * (len(inputs) + 1) / after / 1e9:.2f}"
    row = [spread(seconds), f"{after:.2f}", speed, spread(limits), words, f"{peak:.0f}"]
    if mergekit is None:
        return [*row, NONE, NONE, NONE, NONE]
    other = [theirs(mergekit, folder, method) for _ in range(rounds)]
    times, memory = median(each[0] for each in other) / median(seconds), max(each[1] for each in other) / 1e6
    least = OVER_MERGEKIT.get(method)
    faster = goal(times >= least, f"{times:.1f} (goal {least})") if least else f"{times:.1f}"
    share = goal(peak <= memory / 2, f"{peak / memory:.2f} (goal 0.5)")
    return [*row, spread([each[0] for each in other]), f"{memory:.0f}", faster, share]


if __name__ == "__main__":
    app()

"""Publishing a large member, checksums included, beside `cp` and `sync` of the same bytes."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.figures import goal, spread, table
from benchmarks.workers import toys
from fleet.payload import PayloadWriter, drop
from fleet.store import Store

BLOCK = 4 << 20
REPEATED = 64 << 20  # so many random bytes, over and over: the same for both sides


def publishing(place: Path, quick: bool) -> Table:
    size, repetitions = (256 << 20, 3) if quick else (1 << 30, 9)
    data, source = memoryview(os.urandom(REPEATED)), place / "source"
    with source.open("wb") as file:
        file.writelines(_blocks(data, size))
    taken: dict[str, list[float]] = {"cp": [], "fleet": []}
    with toys(place, "publishing") as run:
        run.store.folder("rounds/00000")
        for n in range(repetitions):
            for name in ("cp", "fleet") if n % 2 else ("fleet", "cp"):
                _quiet(place)
                began = time.perf_counter()
                undo = _copy(source, place / "copy") if name == "cp" else _publish(run.store, data, size, n)
                taken[name].append(time.perf_counter() - began)
                undo()
    source.unlink()
    ratios = [ours / plain for ours, plain in zip(taken["fleet"], taken["cp"], strict=True)]
    rates = {name: [size / 1e6 / seconds for seconds in each] for name, each in taken.items()}
    note = f"{repetitions} interleaved repetitions of {size >> 20} MiB, blocks of {BLOCK >> 20} MiB"
    shown = table("Publishing a large member", "what", "seconds", "MB/s", "ratio", "goal", note=note)
    shown.add_row("cp, then sync -f", spread(taken["cp"]), spread(rates["cp"], 0), "1", "")
    good = goal(median(ratios) <= 1.3, "at most 1.3")
    ours = spread(taken["fleet"]), spread(rates["fleet"], 0)
    shown.add_row("writer, hashed blocks, seal, done register", *ours, spread(ratios), good)
    return shown


def _blocks(data: memoryview, size: int) -> Iterator[memoryview]:
    for at in range(0, size, BLOCK):
        yield data[at % len(data) :][:BLOCK]


def _quiet(place: Path) -> None:
    """What was removed or written before must not be paid for by the next."""
    subprocess.run(["sync", "-f", place], check=True)


def _copy(source: Path, target: Path):  # type: ignore[no-untyped-def]
    subprocess.run(["cp", source, target], check=True)
    subprocess.run(["sync", "-f", target], check=True)
    return target.unlink


def _publish(store: Store, data: memoryview, size: int, n: int):  # type: ignore[no-untyped-def]
    writer = PayloadWriter(store, f"00000.big.{n}")
    with writer.create("weights") as file:
        for block in _blocks(data, size):
            file.write(block)
    store.settle(f"rounds/00000/big.{n}.done", {"files": {name: [*x] for name, x in writer.seal().items()}})
    return lambda: drop(store, writer.attempt)

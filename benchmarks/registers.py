"""Durable registers per second, beside the same link and fsync in a plain loop."""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.bare import BYTES, Bare
from benchmarks.figures import NONE, spread, table
from benchmarks.workers import toys


def registers(place: Path, quick: bool) -> Table:
    repetitions, count = (5, 150) if quick else (15, 400)
    bare, rates = Bare(place / "bare"), {"plain": list[float](), "durable": list[float](), "claim": list[float]()}
    with toys(place, "registers") as run:
        run.store.folder("rounds/00001")
        value = {"filler": "x" * (BYTES - 40)}

        def settle(durable: bool) -> Callable[[], object]:
            return lambda: run.store.settle(f"rounds/00001/{run.store.host.token()}", value, durable)

        ways = {"plain": bare.once, "durable": settle(True), "claim": settle(False)}
        before = run.store.ops
        for _ in range(repetitions):
            for name, once in ways.items():
                rates[name].append(_rate(once, count))
        settled = 2 * repetitions * count
    ratios = {name: [plain / rate for plain, rate in zip(rates["plain"], rates[name], strict=True)] for name in rates}
    ops = (run.store.ops - before) / settled
    note = f"{repetitions} x {count} of each, interleaved; {ops:.1f} file operations a register"
    shown = table("Registers", "what", "per second", "times the plain loop's time", note=note)
    shown.add_row("create, write, fsync, link, fsync folder, remove: plain loop", spread(rates["plain"], 0), NONE)
    shown.add_row("Store.settle, durable", spread(rates["durable"], 0), f"{median(ratios['durable']):.2f}")
    shown.add_row("Store.settle, a claim (no fsync)", spread(rates["claim"], 0), f"{median(ratios['claim']):.2f}")
    return shown


def _rate(once: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        once()
    return count / (time.perf_counter() - began)

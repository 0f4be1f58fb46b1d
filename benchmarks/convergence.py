"""How good the model is: one process, training that never parts, DiLoCo, and the ways of EDT, at equal tokens.

    python -m benchmarks.convergence [--quick] [--size 124k] [--seeds 3] [--picture FILE]

Differences are paired by seed, with their standard error. Settings come from tune.py, which used other seeds. What was
measured before is not measured again.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import NONE, goal, table
from benchmarks.trials import METHODS, QUICK, SEQUENCES, Result, Trial, run, trial

ADAMW, SERIAL, SYNC, DILOCO, HYPERCUBE, PAIRS = (
    "synchronous AdamW", "one process", "synchronous", "DiLoCo", "EDT, hypercube of 4", "EDT, pairs"
)  # fmt: skip
EXACT = {"wire_dtype": "fp32", "inner_optimizer_state": "exact"}  # all that travels
# (row, of which row it is to be within this much)
GOALS = {
    DILOCO: [(ADAMW, -0.15), (SERIAL, 0.01), (SYNC, 0.04), (f"{DILOCO}, exact", 0.003)],
    HYPERCUBE: [(DILOCO, 0.005), (f"{HYPERCUBE}, exact", 0.003)],
    PAIRS: [(DILOCO, 0.015)],
}
app = App(name="python -m benchmarks.convergence", help=__doc__, version_flags=[])

Wanted = Mapping[str, list[Trial]]
Rows = Mapping[str, list[Result]]


def methods(seeds: range, sequences: int, size: str) -> Wanted:
    found = {name: [trial(name, seed, sequences, size=size) for seed in seeds] for name in METHODS}
    for name in (DILOCO, HYPERCUBE):
        found[f"{name}, exact"] = [with_keys(each, **EXACT) for each in found[name]]
    return found


def numbers_of_slots(seeds: range, sequences: int, size: str) -> Wanted:
    return {
        f"{name}, K = {slots}": [trial(name, seed, sequences, slots, size) for seed in seeds]
        for slots in (1, 4, 16)
        for name in (SERIAL, DILOCO, HYPERCUBE)
        if slots > 1 or name != HYPERCUBE
    }


def lengths_of_rounds(seeds: range, sequences: int, size: str) -> Wanted:
    """Counted in steps of the batch that the method has."""
    return {
        f"{name}, H = {steps}": [trial(name, seed, sequences, size=size, inner_steps=steps) for seed in seeds]
        for steps in (40, 120)
        for name in (DILOCO, HYPERCUBE)
    }


def with_keys(each: Trial, **keys: object) -> Trial:
    return replace(each, keys={**each.keys, **keys})


def difference(rows: Rows, name: str, other: str) -> tuple[float, float]:
    """Of the averaged models' losses, seed by seed: the mean, and its standard error."""
    theirs = {each.trial.seed: each.averaged for each in rows[other]}
    found = [each.averaged - theirs[each.trial.seed] for each in rows[name]]
    return fmean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan


def in_words(value: float, error: float) -> str:
    return f"{value:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.4f}" if known else NONE


def losses(rows: Rows, title: str, note: str) -> Table:
    columns = ("method", "averaged model", "mean member", "best member", "minus DiLoCo", "goals", "MB out", "MB in")
    shown = table(title, *columns, note=note)
    for name, found in rows.items():
        apart = METHODS[found[0].trial.name].how == "apart"
        moved = [f"{fmean(each):.2f}" for each in ([r.written for r in found], [r.read for r in found])]
        shown.add_row(
            name, mean([r.averaged for r in found]), mean([r.mean for r in found]), mean([r.best for r in found]),
            NONE if name == DILOCO or DILOCO not in rows else in_words(*difference(rows, name, DILOCO)),
            goals(rows, name), *(moved if apart else (NONE, NONE)),
        )  # fmt: skip
    return shown


def goals(rows: Rows, name: str) -> str:
    found = []
    for other, most in GOALS.get(name, []):
        value, error = difference(rows, name, other)
        found.append(goal(value <= most, f"{in_words(value, error)} to {other} (at most {most:+})"))
    return "\n".join(found)


def draw(rows: Rows, file: Path) -> None:
    """Loss over tokens, with more and more slots; and over what a slot moves, with longer rounds and narrower wires."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    tokens, moved = figure.subplots(1, 2, sharey=True)
    for name in (SERIAL, DILOCO, HYPERCUBE):
        runs = [row for row in rows if row == name or row.startswith(f"{name}, K = ")]
        curve = sorted((rows[row][0].trial.tokens, fmean(r.averaged for r in rows[row])) for row in runs)
        tokens.plot(*zip(*curve, strict=True), "o-", label=name)
    apart = {row: found for row, found in rows.items() if METHODS[found[0].trial.name].how == "apart"}
    points = sorted((fmean(r.moved for r in each), fmean(r.averaged for r in each), row)
                    for row, each in apart.items() if each[0].trial.slots == 8)  # fmt: skip
    for number, (x, y, row) in enumerate(points, 1):
        moved.plot(x, y, "o", color="black", markersize=3, label=f"{number:2}  {row}")
        moved.annotate(str(number), (x, y), textcoords="offset points", xytext=(3, 3), fontsize=7)
    figure.legend(*moved.get_legend_handles_labels(), loc="outside right center", fontsize=7, handlelength=0)
    tokens.set(xscale="log", xlabel="tokens of all slots", ylabel="loss on held-out text, nats a token")
    moved.set(xscale="log", xlabel="MB that a slot of 8 reads and writes")
    tokens.legend()
    figure.savefig(file, dpi=150)


@app.default
def main(quick: bool = False, size: str = "124k", seeds: int = 0, picture: Path | None = None) -> None:
    chosen, sequences = range(1, 1 + (seeds or (1 if quick else 3))), QUICK if quick else SEQUENCES
    tables = [("Loss on held-out text, in nats a token", methods(chosen, sequences, size))]
    if not quick:
        tables.append(("More and fewer slots", numbers_of_slots(chosen, sequences, size)))
        tables.append(("Longer rounds", lengths_of_rounds(chosen, sequences, size)))
    console, every = Console(width=170), dict[str, list[Result]]()
    with Progress() as progress:
        task = progress.add_task("runs", total=sum(len(each) for _, wanted in tables for each in wanted.values()))
        for title, wanted in tables:
            rows: dict[str, list[Result]] = defaultdict(list)
            named = [(name, each) for name, several in wanted.items() for each in several]
            for (name, each), result in zip(named, run(each for _, each in named), strict=True):
                rows[name].append(result)
                progress.advance(task)
                progress.console.print(f"{name}, seed {each.seed}: {result.averaged:.4f}", highlight=False)
            console.print(losses(rows, title, _note(sequences, size, len(chosen))))
            every |= rows
    if picture:
        draw(every, picture)


def _note(sequences: int, size: str, seeds: int) -> str:
    return (
        f"Seeds: {seeds}; {size} parameters; each of 8 slots (or K) has {sequences} sequences of 64 tokens.\n"
        "MB of one slot in one round of 12 steps."
    )


if __name__ == "__main__":
    app()

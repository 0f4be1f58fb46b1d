"""What more machines are worth: how much longer one process, tuned as well, has to train for the same loss.

    python -m benchmarks.speedup [--quick] [--size 124k] [--batch B] [--only ROW ...] [--machines K ...] [--picture F]

A machine's work is counted in sequences that come one after the other on it, everybody with the batch that serves it
best; or, with --batch, in steps, and everybody's are of so many sequences. One process trains on 1, 2, 4, ... times
as many, each time with a schedule of its own; between these, its loss is a straight line over the logarithm. The second
table adds the time of one disk that all share, for a model as large as 150m, from the bytes that were counted.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.figures import NONE, SEVERAL, goal, table
from benchmarks.trials import QUICK, SEQUENCES, Result, Trial, run, trial

SLOTS = (1, 2, 4, 8, 16)
GOALS = {4: 3.7, 8: 6.0, 16: 9.0}
ALONE = ("one process", "one process, Muon", "one process, AdamW")
APART: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "DiLoCo": ("DiLoCo", {}),
    "DiLoCo, rounds of 4": ("DiLoCo", {"inner_steps": 4}),
    "EDT, genomes": ("EDT, genomes", {}),
    "DiLoCo, Muon": ("DiLoCo, Muon", {}),
    "DiLoCo, Muon, rounds of 4": ("DiLoCo, Muon", {"inner_steps": 4}),
    "DiLoCo, AdamW": ("DiLoCo, AdamW", {}),
}
ROWS = {**{name: (name, {}) for name in ALONE}, **APART}
SHORT = ("DiLoCo, rounds of 4", "DiLoCo, Muon, rounds of 4")
SOME = {**dict.fromkeys(SHORT, (4, 8)), "EDT, genomes": (4, 8, 16)}  # of the numbers of machines
GBITS = (10.0, 1.0, 0.1)  # of the disk, a second
LARGE = 215e6  # parameters of 150m with 32,000 words
app = App(name="python -m benchmarks.speedup", help=__doc__, version_flags=[], default_parameter=SEVERAL)

Found = Mapping[str, Mapping[int, list[Result]]]  # row -> slots -> seeds
Cost = Callable[[Result], float]


def trials(
    seeds: range, sequences: int, size: str, batch: int, rows: Collection[str], machines: Sequence[int]
) -> list[tuple[str, Trial]]:
    return [  # one seed after the other: whoever cannot wait has the first ones whole
        (row, trial(name, seed, sequences, slots, size, batch, **keys))
        for seed in seeds
        for row, (name, keys) in ROWS.items()
        if row in rows
        for slots in machines
        if slots in SOME.get(row, SLOTS)
    ]


def needed(curve: Mapping[float, float], loss: float) -> float:
    """How many sequences (or seconds) one process needs for it; where it never had so many or so few, by the nearest
    line."""
    known = sorted(curve.items())
    lines = [*zip(known, known[1:], strict=False)]
    (n1, l1), (n2, l2) = next((line for line in lines if line[1][1] <= loss), lines[-1])
    return math.exp(math.log(n1) + (l1 - loss) / (l1 - l2) * (math.log(n2) - math.log(n1)))


def best_alone(found: Found, cost: Cost) -> dict[float, float]:
    """Cost of one process -> loss, with whichever optimizer is better at that length."""
    best = [min((found[name][slots] for name in ALONE if name in found), key=loss) for slots in machines_of(found)]
    return {fmean(map(cost, each)): loss(each) for each in best}


def machines_of(found: Found) -> list[int]:
    """For which numbers of them there is one process that trains as many times as long."""
    return sorted(found[next(name for name in ALONE if name in found)])


def serial(result: Result) -> float:
    return result.trial.serial


def seconds(result: Result) -> float:
    return result.seconds


def loss(results: list[Result]) -> float:
    return fmean(each.averaged for each in results)


@app.default
def main(
    quick: bool = False,
    size: str = "124k",
    seeds: int = 0,
    sequences: int = 0,
    batch: int = 0,
    only: tuple[str, ...] = tuple(ROWS),
    machines: tuple[int, ...] = SLOTS,
    picture: Path | None = None,
    step_seconds: float = 1.0,
    jobs: int = 2,
) -> None:
    """
    Parameters
    ----------
    sequences
        Of each machine, one after the other.
    batch
        Of every method's steps, with the best rate that was tried with it; else each method has its own.
    only
        These rows; at least one of one process is among them.
    machines
        For these numbers of machines, at least two.
    step_seconds
        How long the device of the second table needs for one step.
    """
    chosen = range(1, 1 + (seeds or (1 if quick else 3)))
    sequences = sequences or (QUICK if quick else SEQUENCES)
    wanted = trials(chosen, sequences, size, batch, only, machines)
    found: dict[str, dict[int, list[Result]]] = defaultdict(lambda: defaultdict(list))
    results = track(run([each for _, each in wanted], jobs), "runs", len(wanted))
    for (row, each), result in zip(wanted, results, strict=True):
        found[row][each.slots].append(result)
    console = Console(width=150)
    console.print(
        worth_table(found, sequences, f"{len(chosen)} seeds; {size} parameters{f'; steps of {batch}' if batch else ''}")
    )
    console.print(seconds_table(found))
    console.print(disk_table(found, step_seconds))
    if picture:
        draw(found, sequences, picture)


def worth(found: Found, row: str, slots: int, cost: Cost = serial) -> float:
    several = found[row][slots]
    return needed(best_alone(found, cost), loss(several)) / fmean(map(cost, several))


def worth_table(found: Found, sequences: int, about: str) -> Table:
    note = (
        f"{about}, {sequences} sequences of 64 tokens one after the other on each machine.\n"
        "In brackets: how many times as long the best one-process row has to train for that loss."
    )
    machines = machines_of(found)
    shown = table("Loss, and what K machines are worth", "", *(f"K = {n}" for n in machines), note=note)
    for row in found:
        cells = [f"{loss(found[row][slots]):.4f}" if slots in found[row] else NONE for slots in machines]
        if row in APART:
            cells = [_worth(found, row, slots, cell) for slots, cell in zip(machines, cells, strict=True)]
        shown.add_row(f"{row}, {'K machines' if row in APART else 'K times as long'}", *cells)
    return shown


def _worth(found: Found, row: str, slots: int, cell: str) -> str:
    if slots not in found[row]:
        return cell
    value = worth(found, row, slots)
    words = f"{cell} ({value:.2f})"
    ours = row.startswith("DiLoCo") and "AdamW" not in row
    return goal(value >= GOALS[slots], words) if ours and slots in GOALS else words


def seconds_table(found: Found) -> Table:
    """Small batches of a small model are dear on a processor, and so is an orthogonal step."""
    note = "Seconds of work that one process needs for the loss, by those of each slot; on one core of this machine."
    machines = machines_of(found)
    shown = table("What K machines are worth in seconds", "", *(f"K = {n}" for n in machines), note=note)
    for row in [each for each in APART if each in found]:
        cells = [f"{worth(found, row, slots, seconds):.2f}" if slots in found[row] else NONE for slots in machines]
        shown.add_row(row, *cells)
    return shown


def disk_table(found: Found, step_seconds: float) -> Table:
    note = (
        f"A model of {LARGE / 1e6:.0f} million parameters, a step of {step_seconds:g} s, one disk for all, nothing "
        "done while it is waited for."
    )
    shown = table("The same with the disk's time", "", *(f"{each:g} Gbit/s" for each in GBITS), note=note)
    for row in [each for each in APART if each in found]:
        for slots in [each for each in found[row] if each > 2]:
            value, results = worth(found, row, slots), found[row][slots]
            shares = [share(results[0], each, step_seconds) for each in GBITS]
            shown.add_row(f"{row}, K = {slots}", *(f"{value * each:.2f}" for each in shares))
    return shown


def share(result: Result, gbit: float, step_seconds: float) -> float:
    """Of a round's time, in which devices work."""
    c, model = result.trial.config, result.parameters * 4 / 1e6
    moved = (result.written + result.read) / model * LARGE * 4 * c.population_size  # bytes of all slots in a round
    work = c.total_steps / c.max_generations * step_seconds
    return work / (work + moved / (gbit / 8 * 1e9))


def draw(found: Found, sequences: int, file: Path) -> None:
    """Loss over what comes one after the other on one machine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    machines = machines_of(found)
    for name in [each for each in ALONE if each in found]:
        losses = [loss(found[name][slots]) for slots in machines]
        axes.plot([slots * sequences for slots in machines], losses, "o-", label=name)
    apart = found[next(row for row in APART if row in found)]
    for slots in [each for each in apart if each > 2]:
        at = sequences, loss(apart[slots])
        axes.plot(*([each] for each in at), "s", color="black")
        axes.annotate(f"DiLoCo, {slots} machines", at, textcoords="offset points", xytext=(6, 0))
    axes.set_xscale("log", base=2)
    axes.set_xticks([slots * sequences for slots in machines], [f"{slots * sequences:,}" for slots in machines])
    axes.set_xlabel("sequences one after the other, on one machine")
    axes.set_ylabel("loss on held-out text, nats a token")
    axes.legend()
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    app()

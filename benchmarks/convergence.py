"""How good the model is: DiLoCo, the ways of EDT, and training that never parts, at equal tokens, with one warm start.

    python -m benchmarks.convergence [--quick] [--seeds 3]

Differences are paired by seed, with their standard error. Settings come from tune.py, which used another seed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.figures import NONE, goal, table
from benchmarks.trials import BASE, COMMON, METHODS, QUICK, Result, Trial, run, trial

SYNC, ALONE, DILOCO, HYPERCUBE = (
    "synchronous, same total batch", "one worker alone, an eighth of the tokens", "DiLoCo", "EDT, hypercube of 4"
)  # fmt: skip
WIRES = ("int8", "int4")
GOALS = {
    HYPERCUBE: 0.01,
    "EDT, pairs": 0.02,
    **{f"{name}, {wire}": 0.01 for name in (DILOCO, HYPERCUBE) for wire in WIRES},
}
app = App(name="python -m benchmarks.convergence", help=__doc__, version_flags=[])

Rows = Mapping[str, list[Result]]


def trials(seeds: range, quick: bool) -> list[Trial]:
    length = QUICK if quick else BASE
    found = []
    for seed in seeds:
        found += [trial(name, seed, length) for name in METHODS]
        for name in (DILOCO, HYPERCUBE):
            found += [renamed(trial(name, seed, length, wire_dtype=wire), f"{name}, {wire}") for wire in WIRES]
    return found if quick else [*found, *shares(seeds[0]), *rounds(seeds[0])]


def shares(seed: int) -> list[Trial]:
    """The same number of steps, of which ever more are the warm start."""
    steps, h = BASE["warm_start_steps"] + BASE["inner_steps"] * BASE["max_generations"], BASE["inner_steps"]
    warm = {share: round(steps * share / h) * h for share in (0.0, 0.5)}
    return [
        renamed(
            trial(DILOCO, seed, {**BASE, "warm_start_steps": w, "max_generations": (steps - w) // h}),
            f"warm start {share:.0%}",
        )
        for share, w in warm.items()
    ]


def rounds(seed: int) -> list[Trial]:
    """The same number of steps, in longer and longer rounds."""
    inner = BASE["inner_steps"] * BASE["max_generations"]
    return [
        renamed(trial(DILOCO, seed, {**BASE, "inner_steps": h, "max_generations": inner // h}), f"H = {h}")
        for h in (40, 120)
    ]


def renamed(each: Trial, name: str) -> Trial:
    return Trial(name, each.algorithm, each.seed, each.keys)


def difference(rows: Rows, name: str, other: str) -> tuple[float, float]:
    """Of the averaged models' losses, seed by seed: the mean, and its standard error."""
    theirs = {each.trial.seed: each.averaged for each in rows[other]}
    found = [each.averaged - theirs[each.trial.seed] for each in rows[name]]
    return fmean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan


def in_words(value: float, error: float) -> str:
    return f"{value:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def losses(rows: Rows, names: list[str], title: str, note: str) -> Table:
    columns = (
        "method",
        "averaged model",
        "mean member",
        "best member",
        "minus DiLoCo",
        "minus exact wire",
        "MB out",
        "MB in",
    )
    shown = table(title, *columns, note=note)
    for name in names:
        found = rows[name]
        base = next((each for each in (HYPERCUBE, DILOCO) if name.startswith(f"{each}, int")), "")
        shown.add_row(
            name, mean([r.averaged for r in found]), mean([r.mean for r in found]), mean([r.best for r in found]),
            _with_goal(rows, name, DILOCO, "" if base else name), _with_goal(rows, name, base, name) if base else NONE,
            *((f"{fmean(r.written for r in found):.2f}", f"{fmean(r.read for r in found):.2f}")
              if name not in (SYNC, ALONE) else (NONE, NONE)),
        )  # fmt: skip
    return shown


def _with_goal(rows: Rows, name: str, other: str, aim: str) -> str:
    if name == other:
        return NONE
    value, error = difference(rows, name, other)
    words = in_words(value, error)
    return goal(value <= GOALS[aim], f"{words} (at most {GOALS[aim]})") if aim in GOALS else words


def mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.4f}" if known else NONE


def gaps(rows: Rows) -> Table:
    note = f"of {len(rows[DILOCO])} seeds, and of the first one alone"
    columns = ("", "averaged model", "minus synchronous", "aim")
    shown = table("DiLoCo's distance to synchronous training", *columns, note=note)
    base = BASE["warm_start_steps"] / (BASE["warm_start_steps"] + BASE["inner_steps"] * BASE["max_generations"])
    names = {name: name for name in rows if name.startswith(("warm start", "H ="))}
    for name, words in {DILOCO: f"warm start {base:.0%}, H = {BASE['inner_steps']}", **names}.items():
        value, error = difference(rows, name, SYNC)
        shown.add_row(
            words,
            mean([r.averaged for r in rows[name]]),
            in_words(value, error),
            goal(value <= 0.03, "at most 0.03"),
        )
    return shown


@app.default
def main(quick: bool = False, seeds: int = 0) -> None:
    wanted = trials(range(1, 1 + (seeds or (1 if quick else 3))), quick)
    rows: dict[str, list[Result]] = defaultdict(list)
    with Progress() as progress:
        for result in progress.track(run(wanted), total=len(wanted), description="runs"):
            rows[result.trial.name].append(result)
            progress.console.print(
                f"{result.trial.name}, seed {result.trial.seed}: {result.averaged:.4f}", highlight=False
            )
    console, length = Console(width=170), QUICK if quick else BASE
    names = [name for name in rows if not name.startswith(("warm start", "H ="))]
    console.print(losses(rows, names, "Loss on held-out text, in nats a token", _note(length, len(rows[SYNC]))))
    if not quick:
        console.print(gaps(rows))


def _note(length: Mapping[str, Any], seeds: int) -> str:
    batch = COMMON["batch_size"] * COMMON["seq_length"]
    return (
        f"Seeds: {seeds}, 8 members, {length['warm_start_steps']} shared steps; {length['max_generations']} rounds "
        f"of {length['inner_steps']} steps of {batch} tokens a member.\nMB of one member in one round, its optimizer's "
        "state (two models, kept for whoever goes on) included; a model is 0.49 MB."
    )


if __name__ == "__main__":
    app()

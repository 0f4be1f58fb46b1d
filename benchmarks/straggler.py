"""One of eight workers five times slower: what it does to a round, measured, and simulated without a disk."""

import contextlib
import time
from pathlib import Path
from statistics import mean

from rich.table import Table

from benchmarks.figures import NONE, table
from benchmarks.scheduling import Simulation
from benchmarks.workers import Toys, toys
from tests.toy.config import ToyConfig
from tests.toy.strategies import strategy

WORKERS, SLOWER, SLEEP = 8, 5, 0.4
BACKUP = 1.5
FAST = SLEEP, 0.0  # the slowest worker's seconds for a recipe, and the factor of backups
CASES = {"equal": FAST, "one slow": (SLOWER * SLEEP, 0.0), f"one slow, backup {BACKUP}": (SLOWER * SLEEP, BACKUP)}
WARM = 8.0  # until pulses have told who is slow


def straggler(place: Path, quick: bool) -> Table:
    seconds, slots = (16.0, (8,)) if quick else (30.0, (8, 32))
    columns = ("toy", "slots per worker", "machines", "s a round", "of equal", "simulated", "of equal", "ideal")
    shown = table(f"One of {WORKERS} workers {SLOWER} times slower", *columns, "made twice", note=_note(seconds))
    for algorithm in ("diloco", "matching"):
        for population in slots:
            measured = _measure(place, algorithm, population, seconds)
            simulated = {case: _simulate(algorithm, population, *CASES[case]) for case in CASES}
            for case, (taken, twice) in measured.items():
                shown.add_row(
                    algorithm, str(population // WORKERS), case,
                    *_beside(taken, measured["equal"][0]), *_beside(simulated[case], simulated["equal"]),
                    f"{_ideal(algorithm, population, CASES[case][0]):.2f}", f"{twice:.1%}",
                )  # fmt: skip
            shown.add_section()
    return shown


def _note(seconds: float) -> str:
    return (
        f"Recipes of {SLEEP} s, {seconds:g} s of each run, the three runs of one toy at the same time. The toys'\n"
        "shards, averages and evaluations take as long as a member here. Ideal: all machines busy all the time"
    )


def _beside(taken: float | None, equal: float | None) -> tuple[str, str]:
    return (f"{taken:.2f}" if taken else NONE, f"{taken / equal:.2f}" if taken and equal else NONE)


def _config(algorithm: str, population: int) -> ToyConfig:
    return ToyConfig(algorithm=algorithm, population_size=population, max_generations=1000)


def _ideal(algorithm: str, population: int, slowest: float) -> float:
    recipes = len(strategy(_config(algorithm, population)).plan(5, None))
    return recipes / ((WORKERS - 1) / SLEEP + 1 / slowest)


def _simulate(algorithm: str, population: int, slowest: float, backup: float) -> float:
    seconds = [slowest] + [SLEEP] * (WORKERS - 1)
    runs = [Simulation(_config(algorithm, population), seconds, backup, seed).run(50) for seed in range(3)]
    return mean((ends[-1] - ends[10]) / (len(ends) - 11) for ends in runs)


def _measure(place: Path, algorithm: str, population: int, seconds: float) -> dict[str, tuple[float | None, float]]:
    """Seconds of a round, and the share of recipes made twice."""
    with contextlib.ExitStack() as stack:
        runs = dict[str, Toys]()
        for case, (slowest, backup) in CASES.items():
            settings = {"algorithm": algorithm, "population_size": population, "dead_seconds": 5.0}
            label = f"{algorithm}-{population}-{len(runs)}"
            runs[case] = stack.enter_context(toys(place, label, backup_factor=backup, **settings))
            runs[case].start(["w0"], sleep=slowest)
            runs[case].start([f"w{n}" for n in range(1, WORKERS)], sleep=SLEEP)
        warm = time.time() + WARM
        time.sleep(WARM + seconds)
        return {case: (_seconds_a_round(run, warm), _twice(run)) for case, run in runs.items()}


def _seconds_a_round(run: Toys, warm: float) -> float | None:
    """From the first to the last round that came to an end after the workers had warmed up."""
    ends, made = dict[int, float](), dict[int, int]()
    for event in run.events("published"):
        round, slot = event["id"].split("/")
        if slot.startswith(("m", "replica")):
            ends[int(round)] = max(ends.get(int(round), 0.0), event["at"])
            made[int(round)] = made.get(int(round), 0) + 1
    full = sorted(end for round, end in ends.items() if made[round] == run.config.population_size and end > warm)
    return (full[-1] - full[0]) / (len(full) - 1) if len(full) > 1 else None


def _twice(run: Toys) -> float:
    return len(run.events("late")) / len(run.events("published"))

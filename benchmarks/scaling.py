"""Recipes of 10 ms with ever more workers: what the loop itself costs, and whether workers get in each other's way."""

import time
from pathlib import Path

from rich.table import Table

from benchmarks.bare import together
from benchmarks.figures import goal, table
from benchmarks.workers import toys

SLEEP = 0.01
SLOTS = 64
WORKERS = (1, 2, 4, 8, 16, 64)


def scaling(place: Path, quick: bool) -> Table:
    seconds, counts = (4.0, (1, 2, 8, 16)) if quick else (12.0, WORKERS)
    columns = ("workers", "recipes/s", "of 2 workers'", "CPU ms", "of 1 worker's", "file operations", "made twice")
    plain = ("plain link + fsync: a second", "CPU ms")
    shown = table(f"Recipes of {SLEEP * 1000:.0f} ms", *columns, *plain, note=_note(seconds))
    rates, costs = {}, {}
    for count in counts:
        limit, limit_cpu = together(place / f"plain-{count}", count, 2.0)
        rates[count], costs[count], ops, twice = _measure(place, count, seconds)
        beside = rates[count] / rates.get(2, rates[count])
        more = costs[count] / costs[1]
        shown.add_row(
            str(count), f"{rates[count]:.0f}", goal(count < 2 or beside >= 0.95, f"{beside:.2f}"),
            f"{costs[count]:.2f}", goal(more <= 2, f"{more:.2f}"), f"{ops:.0f}", f"{twice:.1%}",
            f"{limit:.0f}", f"{limit_cpu:.2f}",
        )  # fmt: skip
    return shown


def _note(seconds: float) -> str:
    return (
        f"{SLOTS} members a round and their average, {seconds:g} s of the steady state. Goals: the total does not\n"
        "fall from 2 workers on; CPU per recipe, of all together, at most doubles. File operations of whole runs"
    )


def _measure(place: Path, workers: int, seconds: float) -> tuple[float, float, float, float]:
    """Of one recipe in the steady state: how many a second, CPU ms, file operations, share made twice."""
    with toys(place, f"scaling-{workers}", population_size=SLOTS) as run:
        names = [f"w{n}" for n in range(workers)]
        run.start(names, sleep=SLEEP)
        run.wait(lambda: all(run.has(name, "published") for name in names), 60 + workers)
        time.sleep(1.0)
        began, cpu = time.time(), run.cpu()
        time.sleep(seconds)
        ended, cpu = time.time(), run.cpu() - cpu
        run.end()
        made = [event["at"] for event in run.events("published")]
        count = sum(began <= at < ended for at in made)
        ops = sum(event["ops"] for event in run.events("ended")) / len(made)
        return count / (ended - began), 1000 * cpu / count, ops, len(run.events("late")) / len(made)

"""Settings for convergence.py and speedup.py, tuned for each method by itself on a seed that these do not use.

    python -m benchmarks.tune [--size 124k] [--slots 8] [--batch B] [--method NAME ...]

From one place for all, every method climbs: the rates beside the best one so far (a factor of 1.4) and half and twice
its batch are tried, until none of them is better or it has had its twelve tries; the best two are tried with a second
seed. So no method ends at the edge of what somebody thought of. With --batch all of them have this one, and only rates
are tried. All tries are recorded in tuned.json beside what was chosen. Ways of EDT that differ in whom they choose
alone share their settings.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import Any

from cyclopts import App
from rich.progress import track

from benchmarks.figures import SEVERAL
from benchmarks.trials import METHODS, SEQUENCES, TUNED, Trial, run

SEEDS = (101, 102)
RATES = {
    "adamw": (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2, 1.6e-2),
    "muon": (9e-4, 1.25e-3, 1.8e-3, 2.5e-3, 3.5e-3, 5e-3, 7e-3, 1e-2, 1.4e-2, 2e-2, 2.8e-2, 4e-2, 5.6e-2, 8e-2),
}
BATCHES = (1, 2, 4, 8, 16, 32, 64)
START = {"adamw": (5.6e-3, 2), "muon": (1e-2, 2)}
TRIES, AGAIN = 12, 2
VARIED = ("one process", "DiLoCo", "one process, AdamW", "DiLoCo, AdamW")  # in how many slots they have, too
app = App(name="python -m benchmarks.tune", help=__doc__, version_flags=[], default_parameter=SEVERAL)

Place = tuple[float, int]  # rate and batch
Tried = dict[Place, list[float]]  # the losses of the seeds that it was tried with


def neighbours(inner: str, place: Place, batches: Sequence[int] = BATCHES) -> Iterator[Place]:
    (rate, batch), rates = place, RATES[inner]
    yield from ((rates[i], batch) for i in (rates.index(rate) + 1, rates.index(rate) - 1) if 0 <= i < len(rates))
    yield from ((rate, each) for each in (batch // 2, 2 * batch) if each in batches)


def best(tried: Tried) -> list[Place]:
    return sorted(tried, key=lambda place: fmean(tried[place]))


def wanted(inner: str, tried: Tried, batches: Sequence[int] = BATCHES) -> list[Place]:
    """What is tried next: nothing where the best one is better than all beside it."""
    rate, batch = START[inner]
    first = (rate, batch if batch in batches else batches[0])
    beside = neighbours(inner, best(tried)[0], batches) if tried else iter([first])
    return [*islice((place for place in beside if place not in tried), TRIES - len(tried))]


def not_again(tried: Tried) -> list[Place]:
    """Of the best, those that had one seed."""
    return [place for place in best(tried)[:AGAIN] if len(tried[place]) == 1]


def keys_of(place: Place) -> Mapping[str, Any]:
    return {"lr": place[0], "batch_size": place[1]}


@app.default
def main(size: str = "124k", slots: int = 8, batch: int = 0, method: tuple[str, ...] = (), jobs: int = 2) -> None:
    every = [name for name, each in METHODS.items() if not each.like]
    names = method or ([*VARIED] if batch or slots != 8 else every)
    batches = (batch,) if batch else BATCHES
    found: dict[str, Tried] = {name: {} for name in names}

    def wave(seed: int, places: Mapping[str, list[Place]]) -> None:
        each = [(name, place) for name, several in places.items() for place in several]
        trials = [Trial(name, seed, SEQUENCES, slots, size, keys_of(place)) for name, place in each]
        for (name, place), result in zip(each, track(run(trials, jobs), f"seed {seed}", len(trials)), strict=True):
            found[name].setdefault(place, []).append(result.averaged)
            print(slots, name, seed, *place, round(result.averaged, 4), flush=True)

    def next_ones() -> dict[str, list[Place]]:
        inner = {name: "adamw" if METHODS[name].keys.get("inner_optimizer") == "adamw" else "muon" for name in found}
        return {name: wanted(inner[name], tried, batches) for name, tried in found.items()}

    while any((places := next_ones()).values()):
        wave(SEEDS[0], places)
        if not any(next_ones().values()):  # a second seed may move the best one, and the climb goes on from there
            wave(SEEDS[1], {name: not_again(tried) for name, tried in found.items()})
    record(size, slots, found)


def record(size: str, slots: int, found: Mapping[str, Tried]) -> None:
    known = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    for name, tried in found.items():
        twice = {place: losses for place, losses in tried.items() if len(losses) == len(SEEDS)}
        told = [{**keys_of(place), "losses": [round(each, 4) for each in tried[place]]} for place in best(tried)]
        row = {"chosen": keys_of(best(twice)[0]), "tried": told}
        known.setdefault(size, {}).setdefault(name, {})[str(slots)] = row
    TUNED.write_text(json.dumps({**known, "sequences": SEQUENCES, "seeds": SEEDS}, indent=1) + "\n")


if __name__ == "__main__":
    app()

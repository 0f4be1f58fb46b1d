"""Settings for convergence.py and speedup.py, tuned for each method by itself on seeds that these do not use.

    python -m benchmarks.tune [--size 124k]

Every method gets as many tries: six with the first seed, the best three of them with the second. All that was tried is
recorded in tuned.json beside what was chosen. Ways of EDT that differ in whom they choose alone share their settings.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

from cyclopts import App
from rich.progress import track

from benchmarks.trials import METHODS, TUNED, Trial, run

SEEDS = (101, 102)
SEQUENCES = {"124k": 1440, "1.2m": 720}  # of a slot
RATES = {"adamw": (4e-3, 5.6e-3, 8e-3), "muon": (1.4e-2, 2e-2, 2.8e-2)}
BATCHES = {"alone": (8, 16), "synchronous": (4, 8), "apart": (4, 8)}
BEST = (6, 3)  # so many are tried with each seed
app = App(name="python -m benchmarks.tune", help=__doc__, version_flags=[])


@dataclass
class Tried:
    keys: Mapping[str, Any]
    losses: list[float] = field(default_factory=list)  # of the seeds that it was tried with

    def loss(self) -> float:
        return fmean(self.losses) if self.losses else math.inf

    def rank(self) -> tuple[int, float]:
        """Only what was tried with every seed is chosen."""
        return -len(self.losses), self.loss()

    def told(self) -> dict[str, Any]:
        return {"losses": [round(each, 4) for each in self.losses], **self.keys}


def candidates(name: str) -> list[dict[str, Any]]:
    """Six of each method: three rates, with two batches each."""
    inner, batches = str(METHODS[name].keys["inner_optimizer"]), BATCHES[METHODS[name].how]
    return [{"lr": lr, "batch_size": batch} for lr, batch in product(RATES[inner], batches)]


@app.default
def main(size: str = "124k", jobs: int = 2) -> None:
    tuned = [name for name, method in METHODS.items() if not method.like]
    tried: dict[str, list[Tried]] = {name: [Tried(keys) for keys in candidates(name)] for name in tuned}
    for seed, best in zip(SEEDS, BEST, strict=True):
        several = [(name, one) for name in tuned for one in sorted(tried[name], key=Tried.loss)[:best]]
        trials = [Trial(name, seed, SEQUENCES[size], size=size, keys=one.keys) for name, one in several]
        for (name, one), result in zip(several, track(run(trials, jobs), f"seed {seed}", len(trials)), strict=True):
            one.losses.append(result.averaged)
            print(name, seed, one.keys, round(result.averaged, 4), flush=True)
    known = json.loads(TUNED.read_text()) if TUNED.exists() else {"chosen": {}, "tried": {}}
    known["chosen"][size] = {name: min(several, key=Tried.rank).keys for name, several in tried.items()}
    known["tried"][size] = {name: [one.told() for one in several] for name, several in tried.items()}
    TUNED.write_text(json.dumps({**known, "sequences": SEQUENCES, "seeds": SEEDS}, indent=1) + "\n")


if __name__ == "__main__":
    app()

"""Settings for convergence.py and speedup.py, tuned for each method by itself on seeds that these do not use.

    python -m benchmarks.tune [--size 124k]

Every method gets as many tries; all that was tried is recorded in tuned.json beside what was chosen. Ways of EDT that
differ in whom they choose alone share their settings.
"""

import json
from itertools import product
from statistics import fmean
from typing import Any

from cyclopts import App
from rich.progress import track

from benchmarks.trials import METHODS, TUNED, Trial, run

SEEDS = (101, 102)
SEQUENCES = {"124k": 1440, "1.2m": 720}  # of a slot
RATES = {"adamw": (4e-3, 5.6e-3, 8e-3), "muon": (1.4e-2, 2e-2, 2.8e-2)}
BATCHES = {"alone": (8, 16), "synchronous": (4, 8)}
OUTER = {"adamw": (0.2, 0.4), "muon": (0.2, 0.4)}  # momentum of the outer step
app = App(name="python -m benchmarks.tune", help=__doc__, version_flags=[])


def candidates(name: str) -> list[dict[str, Any]]:
    """Six of each method: three rates, and two of what else matters to it."""
    inner = str(METHODS[name].keys["inner_optimizer"])
    if METHODS[name].how != "apart":
        return [{"lr": lr, "batch_size": batch} for lr, batch in product(RATES[inner], BATCHES[METHODS[name].how])]
    return [{"lr": lr, "batch_size": 4, "outer_momentum": m} for lr, m in product(RATES[inner], OUTER[inner])]


@app.default
def main(size: str = "124k", seeds: int = len(SEEDS), jobs: int = 2) -> None:
    tuned = [name for name, method in METHODS.items() if not method.like]
    tries = [(name, keys) for name in tuned for keys in candidates(name)]
    trials = [
        Trial(name, seed, SEQUENCES[size], size=size, keys=keys) for name, keys in tries for seed in SEEDS[:seeds]
    ]
    losses: dict[str, list[float]] = {}
    for result in track(run(trials, jobs), "tuning", len(trials)):
        losses.setdefault(json.dumps([result.trial.name, result.trial.keys]), []).append(result.averaged)
        print(result.trial.name, result.trial.seed, result.trial.keys, round(result.averaged, 4), flush=True)
    tried = {
        name: [{"loss": round(fmean(losses[json.dumps([name, keys])]), 4), **keys} for keys in candidates(name)]
        for name in tuned
    }
    best = {name: min(found, key=lambda each: each["loss"]) for name, found in tried.items()}
    settings = {name: {key: value for key, value in each.items() if key != "loss"} for name, each in best.items()}
    known = json.loads(TUNED.read_text()) if TUNED.exists() else {"chosen": {}, "tried": {}}
    known["chosen"][size], known["tried"][size] = settings, {"seeds": SEEDS[:seeds], **tried}
    TUNED.write_text(json.dumps({"sequences": SEQUENCES, **known}, indent=1) + "\n")


if __name__ == "__main__":
    app()

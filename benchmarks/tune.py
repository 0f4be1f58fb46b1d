"""Settings for benchmarks/convergence.py, tuned for each method by itself on a seed that it does not use.

    python -m benchmarks.tune

Everything that was tried is recorded in tuned.json beside what was chosen.
"""

import json
from typing import Any

from cyclopts import App
from rich.progress import track

from benchmarks.trials import BASE, COMMON, METHODS, TUNED, run, trial

SEED = 101
ALONE = (2e-3, 4e-3, 5.6e-3, 8e-3, 11e-3)  # of what has no outer step
OUTER = ((0.7, 0.85), (0.6, 0.85), (0.8, 0.85))  # learning rate and momentum of the outer step
RATES = (5.6e-3, 4.8e-3)  # of the inner one; the first with all outer steps, the others with the first
KEYS = ("lr", "outer_lr", "outer_momentum")
WITH = json.loads(json.dumps({**COMMON, **BASE}))  # what all were tried with
app = App(name="python -m benchmarks.tune", help=__doc__, version_flags=[])


def candidates(name: str) -> list[dict[str, float]]:
    if name.startswith(("synchronous", "one worker")):
        return [{"lr": lr} for lr in ALONE]
    tried = [(RATES[0], *outer) for outer in OUTER] + [(lr, *OUTER[0]) for lr in RATES[1:]]
    return [dict(zip(KEYS, values, strict=True)) for values in tried]


@app.default
def main() -> None:
    tried: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    if TUNED.exists() and (before := json.loads(TUNED.read_text()))["with"] == WITH:  # what was tried need not be again
        tried |= before["tried"]
    known = {name: [{key: each[key] for key in KEYS if key in each} for each in found] for name, found in tried.items()}
    trials = [trial(n, SEED, **keys) for n in METHODS for keys in candidates(n) if keys not in known[n]]
    for result in track(run(trials), "tuning", len(trials)):
        keys = {key: result.trial.keys[key] for key in KEYS if key in result.trial.keys}
        tried[result.trial.name].append({"loss": round(result.averaged, 4), **keys})
        print(result.trial.name, tried[result.trial.name][-1], flush=True)
    best = {name: min(found, key=lambda each: each["loss"]) for name, found in tried.items()}
    chosen = {name: {key: each[key] for key in KEYS if key in each} for name, each in best.items()}
    TUNED.write_text(json.dumps({"seed": SEED, "with": WITH, "chosen": chosen, "tried": tried}, indent=1) + "\n")


if __name__ == "__main__":
    app()

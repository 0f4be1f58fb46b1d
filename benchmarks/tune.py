"""Settings for benchmarks/convergence.py, tuned for each method by itself on a seed that it does not use.

    python -m benchmarks.tune

Everything that was tried is recorded in tuned.json beside what was chosen.
"""

import json
from itertools import product
from typing import Any

from cyclopts import App
from rich.progress import track

from benchmarks.trials import METHODS, TUNED, Trial, run, trial

SEED = 101
RATES = (4e-3, 8e-3, 16e-3)
OUTER = ((0.7, 0.9), (1.0, 0.8))  # learning rate and momentum of the outer step
app = App(name="python -m benchmarks.tune", help=__doc__, version_flags=[])


def candidates() -> list[Trial]:
    found = []
    for name in METHODS:
        alone = name.startswith(("synchronous", "one worker"))
        for lr, (outer_lr, momentum) in product((2e-3, *RATES) if alone else RATES, OUTER[:1] if alone else OUTER):
            if (outer_lr, momentum) == OUTER[0] or lr == 8e-3:
                outer = {} if alone else {"outer_lr": outer_lr, "outer_momentum": momentum}
                found.append(trial(name, SEED, lr=lr, **outer))
    return found


@app.default
def main() -> None:
    tried: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    trials = candidates()
    for result in track(run(trials), "tuning", len(trials)):
        keys = {key: result.trial.keys[key] for key in ("lr", "outer_lr", "outer_momentum") if key in result.trial.keys}
        tried[result.trial.name].append({"loss": round(result.averaged, 4), **keys})
        print(result.trial.name, tried[result.trial.name][-1], flush=True)
    chosen = {}
    for name, found in tried.items():
        best = min(found, key=lambda each: each["loss"])
        chosen[name] = {key: value for key, value in best.items() if key != "loss"}
    TUNED.write_text(json.dumps({"seed": SEED, "chosen": chosen, "tried": tried}, indent=1) + "\n")


if __name__ == "__main__":
    app()

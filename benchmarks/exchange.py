"""What a slot writes and reads in a round, counted in models (all parameters in fp32), and what for.

    python -m benchmarks.exchange [--quick] [--slots 8] [--size 1.2m] [--only "DiLoCo, normal2"]

Real runs of a small model, in which each slot has a worker of its own that goes on from round to round (warm), or one
that has just come to this round (cold). The last column is the time of all slots' bytes of a model as large as 150m, on
one disk of 1 Gbit/s. Of the smallest models the notes beside the numbers are a few hundredths.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import track

from benchmarks.figures import goal, table
from benchmarks.trials import COMMON, SHAPES, strategy_of
from fleet import launches
from fleet.at_hand import AtHand
from fleet.host import Host
from fleet.pace import kind
from fleet.processes import options
from fleet.recipe import round_and_slot
from fleet.run import create_run, open_run
from fleet.work import Maker, Work
from fleet.worker import Worker
from train.training_config import TrainConfig

DILOCO, GROUPS = {"algorithm": "diloco"}, {"algorithm": "edt", "selection": "hypercube"}
EXACT = {"wire_dtype": "fp32", "inner_optimizer_state": "exact"}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "DiLoCo, all exact": {**DILOCO, **EXACT},
    "DiLoCo, bf16": {**DILOCO, "wire_dtype": "bf16"},
    "DiLoCo, int8": {**DILOCO, "wire_dtype": "int8"},
    "DiLoCo": DILOCO,
    "DiLoCo, narrow moments": {**DILOCO, "inner_optimizer_state": "narrow"},
    "DiLoCo, ERROR_FEEDBACK": {**DILOCO, "error_feedback": True},
    "DiLoCo, normal2, ERROR_FEEDBACK": {**DILOCO, "wire_dtype": "normal2", "error_feedback": True},
    "DiLoCo, FRAGMENTS 4": {**DILOCO, "fragments": 4},
    "DiLoCo, moments forgotten": {**DILOCO, "inner_optimizer_state": "reset"},
    "EDT, groups of four, all exact": {**GROUPS, **EXACT},
    "EDT, groups of four": GROUPS,
    "EDT, groups of four, narrow": {**GROUPS, "inner_optimizer_state": "narrow"},
    "EDT, pairs": {**GROUPS, "group_size": 2},
    "EDT, four parents by rank": {**GROUPS, "selection": "rank"},
}
GOALS = {
    "DiLoCo, narrow moments": (0.5, 0.6, 1.6),
    "EDT, groups of four": (0.9, 1.2, None),
}  # written, read warm, read cold
LARGE, GBIT, STEP_SECONDS = 215e6, 1.0, 1.0  # parameters of 150m with 32,000 words; of its step on a device
ROUND = 12  # steps
app = App(name="python -m benchmarks.exchange", help=__doc__, version_flags=[])

Moved = Mapping[str, tuple[float, float]]  # kind of recipe -> models written and read, of a slot in a round


def config_of(keys: Mapping[str, Any], slots: int, rounds: int, size: str = "124k") -> TrainConfig:
    model = {"config": {"model_type": "llama", "tie_word_embeddings": True, **SHAPES[size]}}
    small = {"inner_steps": 1, "batch_size": 1, "warmup_steps": 1, "initial_population": (model,), "shards": 0}
    common = {"project_name": "run", "population_size": slots, "max_generations": rounds}
    return TrainConfig(**{**COMMON, **small, **common, **keys})


def moved(config: TrainConfig, warm: bool) -> Moved:
    """In the rounds from the third on."""
    with tempfile.TemporaryDirectory() as base:
        create_run(Path(base), "run", config.bound(), Host())
        store, _ = open_run(Path(base) / "run", Host(), "w")
        launch = launches.begin(store, config.operational())
        how = Worker(store, strategy_of(config), _makers(config, warm), options(config, launch)).run()
        assert how == "over", how
        lines = (Path(base) / "run" / "workers" / "w.events").read_text().splitlines()
    found, size = defaultdict[str, list[float]](lambda: [0.0, 0.0]), 1.0
    for event in map(json.loads, lines):
        if event["what"] == "made" and event["id"] == "0/init-0":
            size = event["written"]  # the first weights, and a small configuration
        if event["what"] == "made" and round_and_slot(event["id"])[0] > 2:
            found[kind(round_and_slot(event["id"])[1])][0] += event["written"]
            found[kind(round_and_slot(event["id"])[1])][1] += event["read"]
    whole = size * config.population_size * (config.max_generations - 2)
    return {name: (written / whole, read / whole) for name, (written, read) in found.items()}


def _makers(config: TrainConfig, warm: bool) -> Maker:
    """One for each slot, as if it were in a process of its own; or, each round, one that knows nothing yet."""
    from train.member.pretraining_tasks import maker

    known = defaultdict[tuple[int, int], Maker](lambda: maker(config))
    memories = defaultdict[tuple[int, int], AtHand](AtHand)

    def make(work: Work) -> Mapping[str, Any]:
        id = round_and_slot(work.id)
        number = 0 if warm else id[0], int(re.sub(r"\D", "", id[1]) or 0)
        work.writer.store.at_hand = memories[number]
        return known[number](work)

    return make


@app.default
def main(quick: bool = False, slots: int = 8, size: str = "124k", only: str = "") -> None:
    rounds, names = 4 if quick else 6, [*GOALS] if quick else [name for name in ROWS if name.startswith(only)]
    columns = ("written", "read, warm", "read, cold", "by trainers", "by shards, means", "by evaluations", "s on disk")
    note = (
        f"{slots} slots; models of fp32 that a slot writes and reads in a round. Who reads (written/read): warm.\n"
        f"Last: {LARGE / 1e6:.0f} million parameters, all slots' bytes on one disk of {GBIT:g} Gbit/s; a round of "
        f"{ROUND} steps trains for {ROUND * STEP_SECONDS:.0f} s."
    )
    shown = table("The exchange", "", *columns, note=note)
    for name in track(names, "runs"):
        config = config_of(ROWS[name], slots, rounds, size)
        warm, cold = moved(config, True), moved(config, False)
        shown.add_row(name, *_figures(name, warm, cold), *_by_whom(warm), f"{_seconds(warm, slots):.0f}")
    Console(width=160).print(shown)


def _figures(name: str, warm: Moved, cold: Moved) -> list[str]:
    sums = [sum(w for w, _ in warm.values()), sum(r for _, r in warm.values()), sum(r for _, r in cold.values())]
    most = GOALS.get(name, (None, None, None))
    return [
        f"{value:.2f}" if at_most is None else goal(value <= at_most, f"{value:.2f} (at most {at_most})")
        for value, at_most in zip(sums, most, strict=True)
    ]


def _by_whom(warm: Moved) -> list[str]:
    who = [("replica", "m"), ("shard", "mean"), ("global", "average")]
    return ["/".join(f"{sum(warm.get(name, (0.0, 0.0))[n] for name in names):.2f}" for n in (0, 1)) for names in who]


def _seconds(warm: Moved, slots: int) -> float:
    return sum(map(sum, warm.values())) * slots * LARGE * 4 / (GBIT / 8 * 1e9)


if __name__ == "__main__":
    app()

"""Who learns most from rewards, at as many answers: populations that evolve and share, silos, PBT, one worker alone.

    python -m benchmarks.rl [--quick] [--seeds 3]

All begin with the small model that knows no answers (skill:base), and answer questions of three skills. The runs lie in
FOLDER, so that the same command goes on with whatever was interrupted. What is compared is the winner's share of right
answers to held-out questions that selected nobody; the interval is one of 95% over the seeds.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.table import Table

from edt_evomerge import EvoMerge
from fleet import launches
from fleet.history import History
from fleet.host import Host
from fleet.processes import options
from fleet.recipe import Past, Recipe
from fleet.run import create_run, open_run
from fleet.worker import Worker
from train.member import posttraining_genome
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_commands import prepare_breeding

SKILLS = ("skill:compare", "skill:vowels", "skill:kinds")
SLOTS = 4
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # of 95%, by how many there are
COMMON: Mapping[str, Any] = {
    "algorithm": "edt-evomerge", "initial_population": ("skill:base",), "mutation": "grpo", "mutation_datasets": SKILLS,
    "fitness": ("reward",), "crossover": {"method": "linear"}, "population_size": SLOTS, "elitism": 0,
    "selection": "tournament", "sft_examples": 96, "seq_length": 128, "batch_size": 6, "lr": 5e-4, "warmup_steps": 2,
    "questions": 64,
}  # fmt: skip
GRPO = {"answers": 8, "max_tokens": 6}
app = App(name="python -m benchmarks.rl", help=__doc__, version_flags=[])


@dataclass(frozen=True)
class Silos(EvoMerge):
    """Each slot by itself, all with the genome that is given."""

    def children(self, generation: int, history: Past) -> list[Recipe]:
        plain = posttraining_genome.unmutated(self.c)
        slots = [recipe.slot for recipe in history.plan(generation - 1) if recipe.slot[0] == "m"]
        own = ((int(slot[1:]), f"{generation - 1}/{slot}") for slot in slots)
        made = [self.child(generation, k, (id,), plain, self.others(generation, k, history)) for k, id in own]
        return [*made, *self.kept(generation, history, ())]


@dataclass(frozen=True)
class Alone(Silos):
    """One slot, which answers as many questions as all slots of the others."""

    def first_members(self) -> list[Recipe]:
        return super().first_members()[:1]


@dataclass(frozen=True)
class Row:
    strategy: Callable[[PosttrainConfig], EvoMerge]
    keys: Mapping[str, Any]


ROWS: Mapping[str, Row] = {
    "evolving, sharing": Row(EvoMerge, {"grpo": {**GRPO, "share": 1.0}}),
    "evolving": Row(EvoMerge, {"grpo": GRPO}),
    "PBT": Row(EvoMerge, {"grpo": GRPO, "selection": "pbt"}),
    "silos, sharing": Row(Silos, {"grpo": {**GRPO, "share": 1.0}}),
    "silos": Row(Silos, {"grpo": GRPO}),
    "GRPO alone": Row(Alone, {"grpo": GRPO, "sft_examples": SLOTS * COMMON["sft_examples"]}),
}


def finished(row: str, seed: int, generations: int, folder: Path) -> History:
    """Where it is finished already, it is only read."""
    name = f"{row.replace(', ', '-').replace(' ', '-').lower()}-{generations}-{seed}"
    keys = {**COMMON, **ROWS[row].keys, "seed": seed, "max_generations": generations}
    config = prepare_breeding(PosttrainConfig(project_name=name, base_dir=str(folder), **keys), folder)
    from train.member.posttraining_tasks import maker

    create_run(folder, name, config.bound(), Host())
    store, _ = open_run(folder / name, Host(), "w")
    launch = launches.latest(store) or launches.begin(store, config.operational())
    worker = Worker(store, ROWS[row].strategy(config), maker(config), options(config, launch))
    worker.run()
    return worker.history


def generated(history: History) -> int:
    """Tokens, of all answers that were learned from."""
    made = (each for n in range(history.first_open) for each in history.round(n) if each.recipe.task == "rollouts")
    return sum(each.metrics["generated"] for each in made if each.id == each.origin)


def right(history: History, slot: str) -> float:
    return float(json.loads(history[f"{history.first_open - 1}/{slot}"].metrics["objectives"])["reward"])


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    half = STUDENT.get(len(values), 2.6) * stdev(values) / math.sqrt(len(values))
    return f"{fmean(values):.3f} ± {half:.3f}"


def rows(seeds: int, generations: int, folder: Path) -> Iterator[tuple[str, list[History]]]:
    for name in ROWS:
        yield name, [finished(name, seed, generations, folder) for seed in range(1, seeds + 1)]


@app.default
def main(quick: bool = False, seeds: int = 3, generations: int = 24, folder: Path = Path("runs/benchmark-rl")) -> None:
    if quick:
        seeds, generations = 1, 3
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    console, shown = Console(width=120), Table(title=f"{seeds} seeds, {generations} generations, {SLOTS} slots")
    for column in ("", "right at the end", "at the start", "tokens generated"):
        shown.add_column(column, justify="right" if column else "left")
    for name, found in rows(seeds, generations, folder):
        starts, tokens = [right(each, "start-0") for each in found], fmean(generated(each) for each in found)
        shown.add_row(
            name, interval([right(each, "winner") for each in found]), f"{fmean(starts):.3f}", f"{tokens:,.0f}"
        )
        console.print(f"{name}: ready")
    console.print(shown)


if __name__ == "__main__":
    app()

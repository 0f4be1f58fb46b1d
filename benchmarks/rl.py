"""Who learns most from rewards, at as many tokens generated: populations that share or evolve, PBT, silos, evolution
strategies, and one worker alone.

    python -m benchmarks.rl [--quick] [--seeds 5]

All begin with the mean of two small models, in which what they knew is hidden, and answer questions about vowels,
which one of them knew. A run ends with the round after which its tokens are nearest to the budget; those of held-out
questions are not counted. Each row's rate is the best of three, by runs of another seed. What is compared is the share
of right answers to held-out questions that selected nobody, beside the model that all began with and beside silos;
intervals are of 95%, over the seeds. The runs lie in FOLDER: the same command goes on with whatever was interrupted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from cyclopts import App
from rich.console import Console

from benchmarks.figures import NONE, half_interval, table
from edt_es import EvolutionStrategies
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
from train.rl.reward_curves import generated
from train.training_commands import prepare_breeding

SLOTS = 4
MOST = 90  # rounds of a run, whatever they generate
TUNING = 99  # a seed
SILOS = "silos"
ANSWERS: Mapping[str, Any] = {"max_tokens": 6}  # of all, with the rewards that are given unless one says more
COMMON: Mapping[str, Any] = {
    "initial_population": ("skill:mean",), "mutation_datasets": ("skill:vowels",), "seq_length": 128, "questions": 300,
    "holdout": 0.8, "threads": 1, "max_generations": MOST,
}  # fmt: skip
OF_GRPO: Mapping[str, Any] = {
    "algorithm": "edt-evomerge", "mutation": "grpo", "fitness": ("reward",), "crossover": {"method": "linear"},
    "population_size": SLOTS, "selection": "tournament", "elitism": 0, "mutation_strength": 0.2, "sft_examples": 16,
    "batch_size": 6, "warmup_steps": 2,
}  # fmt: skip
OF_ES: Mapping[str, Any] = {
    "algorithm": "es", "population_size": 16, "sft_examples": 32, "batch_size": 32,
    "es": {**ANSWERS, "sigma": 0.005, "publish_every": 1},
}  # fmt: skip
app = App(name="python -m benchmarks.rl", help=__doc__, help_format="plaintext", version_flags=[])


# -- who learns how ----------------------------------------------------------------------------------------------------


class Silos(EvoMerge):
    """Each slot by itself, with the genome that is given."""

    def children(self, generation: int, history: Past) -> list[Recipe]:
        plain = posttraining_genome.unmutated(self.c)
        slots = [each.slot for each in history.plan(generation - 1) if each.role == "member"]
        own = ((int(slot[1:]), f"{generation - 1}/{slot}") for slot in slots)
        made = [self.child(generation, k, (id,), plain, self.others_rollouts(generation, k, history)) for k, id in own]
        return [*made, *self.kept(generation, history, ())]


class Alone(Silos):
    """One slot: with a budget that is everybody's, it goes on for as many more generations."""

    def first_members(self) -> list[Recipe]:
        return super().first_members()[:1]


def grpo(share: float = 0.0, **keys: Any) -> Mapping[str, Any]:
    return {**OF_GRPO, "grpo": {**ANSWERS, "answers": 8, "share": share}, **keys}


@dataclass(frozen=True)
class Row:
    strategy: type[EvoMerge] | type[EvolutionStrategies]
    keys: Mapping[str, Any]
    rates: tuple[float, float, float] = (1e-3, 5e-4, 2e-3)


ROWS: Mapping[str, Row] = {
    "GRPO alone": Row(Alone, grpo()),
    SILOS: Row(Silos, grpo()),
    "silos that share": Row(Silos, grpo(1.0)),
    "PBT": Row(EvoMerge, grpo(selection="pbt")),
    "evolving": Row(EvoMerge, grpo()),
    "evolving and sharing": Row(EvoMerge, grpo(1.0)),
    "ES": Row(EvolutionStrategies, OF_ES, (1e-2, 5e-3, 2e-2)),
}


@dataclass(frozen=True)
class UntilSpent:
    """A strategy whose last round is the one after which the tokens are nearest to the budget."""

    row: Row
    c: PosttrainConfig
    budget: int

    def plan(self, round: int, history: Past) -> list[Recipe]:
        spent, last = 0, MOST
        for n in range(round):
            found = history.once("generated", n, lambda n=n: generated(history, n))
            spent += found
            if spent + found / 2 >= self.budget:
                last = n
                break
        return self.row.strategy(self.c.model_copy(update={"max_generations": last})).plan(round, history)


# -- runs --------------------------------------------------------------------------------------------------------------


def finished(name: str, seed: int, rate: float, budget: int, folder: Path) -> History:
    """What is finished already is only read."""
    from train.member import es_tasks, posttraining_tasks

    row, run = ROWS[name], f"{name.replace(' ', '-').lower()}-{budget}-{rate:g}-{seed}"
    keys = {**COMMON, **row.keys, "lr": rate, "seed": seed}
    config = prepare_breeding(PosttrainConfig(project_name=run, base_dir=str(folder), **keys), folder)
    create_run(folder, run, config.bound(), Host())
    store, _ = open_run(folder / run, Host(), "w")
    launch = launches.latest(store) or launches.begin(store, config.operational())
    maker = (es_tasks if config.es else posttraining_tasks).maker(config)
    worker = Worker(store, UntilSpent(row, config, budget), maker, options(config, launch))
    worker.run()
    return worker.history


def right(history: History, slot: str = "winner") -> float:
    found = json.loads(history[f"{history.first_open - 1}/{slot}"].metrics["objectives"])
    return 100 * float(found["reward"])


def interval(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.1f}"
    return f"{fmean(values):.1f} ± {half_interval(values):.1f}"


@app.default
def main(quick: bool = False, seeds: int = 5, budget: int = 3_000, folder: Path = Path("runs/benchmark-rl")) -> None:
    """
    Parameters
    ----------
    quick
        One seed, half of the tokens, no rates but the first: that all of it works.
    budget
        Tokens that each run generates.
    """
    seeds, budget = (1, budget // 2) if quick else (seeds, budget)
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=140)

    def run(name: str, seed: int, rate: float, budget: int) -> History:
        found = finished(name, seed, rate, budget, folder)
        console.print(f"{name}, seed {seed}, rate {rate:g}, {budget:,} tokens: {right(found):.1f}% right")
        return found

    rates = {name: row.rates[0] for name, row in ROWS.items()}
    if not quick:
        for name, row in ROWS.items():
            rates[name] = max(row.rates, key=lambda rate: right(run(name, TUNING, rate, budget)))
    found = {(name, seed): run(name, seed, rates[name], budget) for seed in range(1, seeds + 1) for name in ROWS}
    columns = ("", "rate", "right, %", "more than at the start", f"more than {SILOS}", "tokens", "rounds")
    shown = table(f"{seeds} seeds", *columns)
    beside = [right(found[SILOS, seed]) for seed in range(1, seeds + 1)]
    for name in ROWS:
        own = [found[name, seed] for seed in range(1, seeds + 1)]
        ends, gains = [right(each) for each in own], [right(each) - right(each, "start-0") for each in own]
        tokens = fmean(sum(generated(each, n) for n in range(each.first_open)) for each in own)
        rounds = fmean(each.first_open - 2 for each in own)
        ahead = NONE if name == SILOS else interval([a - b for a, b in zip(ends, beside, strict=True)])
        cells = f"{rates[name]:g}", interval(ends), interval(gains), ahead, f"{tokens:,.0f}", f"{rounds:.0f}"
        shown.add_row(name, *cells)
    console.print(shown)


if __name__ == "__main__":
    app()

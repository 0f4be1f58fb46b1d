"""What fewer questions, niches, archives and mates by attraction are worth: searches of each kind beside today's.

    python -m benchmarks.fitness
    python -m benchmarks.fitness --seeds 5 --evals 140
    python -m benchmarks.fitness --only parents
    python -m benchmarks.fitness --only breed
    python -m benchmarks.fitness --only searches --tasks 64 --evals 140

Donors that each know a third of some facts, made on the spot; several tasks ask for all of them, each with other wrong
answers. Searches (CMA-ES over the weights of each layer) and tournaments have so many candidates, parents so many
generations, in which only merging changes anything. `breed` is `make breed` with a task for each skill instead of one
that mixes them: its children learn, too. The winner answers questions that were held out. All searches of one seed hold
the same ones out; differences are paired by seed.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal

import yaml
from cyclopts import App, Parameter
from rich.console import Console

from benchmarks.figures import NONE, half_interval, table
from fleet.history import opened
from tests.searching import PARTS, donors, task
from train.skills import SKILLS

ROOT = Path(__file__).parent.parent
POPULATION = 8
PARENTS: Mapping[str, Mapping[str, Any]] = {
    "rank": {"SELECTION": "rank"},
    "pareto": {"SELECTION": "pareto"},
    "niches": {"SELECTION": "niches"},
    "archive": {"SELECTION": "archive", "ELITISM": 0},
    "rank, attraction": {"MATES": "attraction"},
    "niches, attraction": {"SELECTION": "niches", "MATES": "attraction"},
}
BREED = ROOT / "configs" / "posttrain.json"
app = App(name="python -m benchmarks.fitness", help=__doc__, help_format="plaintext", version_flags=[])


@dataclass(frozen=True)
class Outcome:
    held_out: float  # the winner's score
    ahead: float  # of the best donor there
    asked: int  # questions for validation, the donors' own not counted
    seconds: float


@app.default
def main(
    *,
    seeds: Annotated[int, Parameter(help="Of each kind.")] = 5,
    evals: Annotated[int, Parameter(help="Candidates of each search.")] = 84,
    generations: Annotated[int, Parameter(help="Of members, where parents are chosen and only merged.")] = 6,
    tasks: Annotated[int, Parameter(help="Of 72 questions, half of them for validation.")] = 8,
    only: Annotated[
        Literal["", "searches", "tournaments", "parents", "breed"], Parameter(help="One of the tables.")
    ] = "",
) -> None:
    kinds: dict[str, tuple[Mapping[str, Any], Callable[[Path, Any, int, Path], Outcome]]] = {
        "searches": (dict.fromkeys(("all", "racing", "irt")), partial(searched, evals=evals)),
        "tournaments": (dict.fromkeys(("all", "racing", "irt")), partial(contested, evals=evals)),
        "parents": (PARENTS, partial(merged_only, generations=generations)),
        "breed": ({name: PARENTS[name] for name in ("pareto", "niches", "archive")}, breed),
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        donors(place)
        for n in range(tasks):
            task(place / "tasks", f"facts{n}", n)
        for title, (rows, made) in kinds.items():
            if only in ("", title):
                shown(place, title, rows, made, seeds)


def shown(
    place: Path,
    title: str,
    rows: Mapping[str, Any],
    made: Callable[[Path, Any, int, Path], Outcome],
    seeds: int,
) -> None:
    """One table; a row appears in the log as soon as a run is over."""
    found: dict[str, list[Outcome]] = {name: [] for name in rows}
    for seed in range(1, seeds + 1):
        for name, how in rows.items():
            with tempfile.TemporaryDirectory(dir=place) as out:
                found[name].append(made(place, name if how is None else how, seed, Path(out)))
            print(title, seed, name, found[name][-1], file=sys.stderr, flush=True)
    first, *_ = found.values()
    columns = ("held out (mean, range)", "beside the first row", "questions asked", "so many times fewer", "seconds")
    whole = table(title, "", *columns, note="beside the first row: the mean, and its 95% interval by paired seeds")
    for each, outcomes in found.items():
        asked, held = mean(one.asked for one in outcomes), [one.held_out for one in outcomes]
        differences = [one.held_out - other.held_out for one, other in zip(outcomes, first, strict=True)]
        whole.add_row(
            each,
            f"{mean(held):.3f} ({min(held):.3f} to {max(held):.3f})",
            f"{mean(differences):+.3f} ± {half_interval(differences):.3f}" if outcomes is not first else NONE,
            f"{asked:,.0f}",
            f"{mean(one.asked for one in first) / asked:.1f}",
            f"{mean(one.seconds for one in outcomes):.0f}",
        )
    Console(width=140).print(whole)


def done(*words: object) -> float:
    begin = time.monotonic()
    ended = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    return time.monotonic() - begin


# -- the four kinds ----------------------------------------------------------------------------------------------------


def tasks_of(place: Path) -> list[dict[str, Any]]:
    names = sorted(file.stem for file in (place / "tasks").glob("*.yaml"))
    return [{"name": name, "weight": 1 / len(names)} for name in names]


def models(place: Path) -> list[str]:
    return [str(place / f"part{n}") for n in range(PARTS)]


def searched(place: Path, how: str, seed: int, out: Path, evals: int) -> Outcome:
    genome = {"models": models(place), "merge_method": "task_arithmetic", "base_model": str(place / "base")}
    genome |= {"layer_granularity": 1, "filters": ["self_attn", "mlp"]}
    (out / "genome.yml").write_text(yaml.safe_dump({"genome": genome, "tasks": tasks_of(place)}))
    options = ("--task-search-path", place / "tasks", "--strategy", "fleet", "--holdout", 0.5, "--fitness-from", how)
    more = ("--max-fevals", evals, "--random-seed", seed)
    took = done("-m", "merge.evolve", out / "genome.yml", "--storage-path", out / "run", *options, *more)
    history = opened(out / "run")
    made = [one for one in all_of(history) if one.recipe.task == "score" and one.recipe.role == "member"]
    return outcome(history, "score", sum(one.metrics["asked"] for one in made), took)


def contested(place: Path, how: str, seed: int, out: Path, evals: int) -> Outcome:
    settings = {
        "models": [{"path": path} for path in models(place)],
        "merge_settings": {"base_model": {"path": str(place / "base")}},
        "evolution_settings": {"seed": seed, "num_generations": -(-evals // POPULATION), "patience": 10_000},
        "evaluation_settings": {
            **{"tasks": tasks_of(place), "task_path": [str(place / "tasks")], "text_weight": 0, "holdout": 0.5},
            "fitness_from": how,
        },
        "out": str(out / "run"),
    }
    (out / "settings.json").write_text(json.dumps(settings))
    took = done("-m", "evomerge.cli", "--run", "--config", out / "settings.json")
    history = opened(out / "run")
    each = questions(place)
    members = [one for one in all_of(history) if one.recipe.role in ("member", "look") and one.recipe.task]
    return outcome(history, "test_score", sum(one.metrics.get("asked", each) for one in members), took)


def questions(place: Path) -> int:
    """For validation: half of all."""
    return len(tasks_of(place)) * len((place / "tasks" / "facts0.json").read_text().splitlines()) // 2


def merged_only(place: Path, how: Mapping[str, Any], seed: int, out: Path, generations: int) -> Outcome:
    curve = {"method": "slerp", "t": [0.5, 0.5]}
    config = {
        "ALGORITHM": "edt-evomerge", "PROJECT_NAME": "run", "BASE_DIR": str(out), "INITIAL_POPULATION": models(place),
        "POPULATION_SIZE": POPULATION, "MAX_GENERATIONS": generations, "SEED": seed, "MUTATION": "none",
        "FITNESS": [{"task": each["name"], "weight": each["weight"]} for each in tasks_of(place)],
        "TASK_PATH": [str(place / "tasks")], "QUESTIONS": 36, "CROSSOVER": curve, "CROSSOVER_EVOLVES": True, **how,
    }  # fmt: skip
    return bred(config, out)


def breed(place: Path, how: Mapping[str, Any], seed: int, out: Path) -> Outcome:
    """As many questions in all as one task of all skills has there. The specialists lie beside the runs, which share
    them."""
    keys = json.loads(BREED.read_text())
    tasks = [{"task": f"skill_{skill}", "weight": 1 / len(SKILLS)} for skill in SKILLS]
    keys |= {"FITNESS": tasks, "QUESTIONS": keys["QUESTIONS"] // len(tasks), "SEED": seed}
    return bred({**keys, "PROJECT_NAME": f"of-{out.name}", "BASE_DIR": str(place), **how}, out)


def bred(config: Mapping[str, Any], out: Path) -> Outcome:
    (out / "config.json").write_text(json.dumps(config))
    took = done("edt_sim.py", "--config", out / "config.json")
    history = opened(Path(config["BASE_DIR"]) / config["PROJECT_NAME"])
    asked = sum("score" in one.metrics for one in all_of(history)) * config["QUESTIONS"] * len(config["FITNESS"])
    return outcome(history, "fitness", asked, took)


def all_of(history: Any) -> list[Any]:
    """Whatever was made and not carried over."""
    return [one for n in range(1, history.first_open) for one in history.round(n) if one and one.id == one.origin]


def outcome(history: Any, measure: str, asked: int, took: float) -> Outcome:
    """Of the held-out test, which is the last round."""
    there = history.round(history.first_open - 1)
    winner = next(one for one in there if one.recipe.role == "winner").metrics[measure]
    others = [one.metrics[measure] for one in there if one.recipe.role != "winner"]
    return Outcome(winner, winner - max(others), asked, took)


if __name__ == "__main__":
    app()

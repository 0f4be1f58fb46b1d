"""What evolution is worth where nobody knows the settings: EDT whose members differ, beside DiLoCo with one guess.

    python -m benchmarks.genomes [--quick] [--size 124k] [--seeds 3]

Learning rates: members of EDT begin with rates spread over a factor of 8 around a quarter of the best one, which
tune.py found. Sources: Python's standard library, by whose held-out text everybody is judged; the same with its words
in random order; and random tokens. Differences are paired by seed, with their standard error.
"""

import json
import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.convergence import Rows, difference, in_words
from benchmarks.figures import NONE, goal, table
from benchmarks.trials import METHODS, QUICK, SEQUENCES, Result, Trial, run, trial

EDT, DILOCO = "EDT, genomes", "DiLoCo"
# The weights of sources are, from one rate for all.
MUTATED: Mapping[str, Any] = {"lr_spread": 1.0, "mutation_probability": 0.3, "mutation_strength": 0.3}
WORDS = Path(tempfile.gettempdir()) / "benchmark-words.jsonl"
app = App(name="python -m benchmarks.genomes", help=__doc__, version_flags=[])

Wanted = Mapping[str, list[Trial]]


def guessed_rates(seeds: range, sequences: int, size: str) -> Wanted:
    best = float(trial(DILOCO, 1, sequences, size=size).keys.get("lr", METHODS[DILOCO].keys["lr"]))
    rows: dict[str, tuple[str, float]] = {
        "EDT, rates around a quarter of the best": (EDT, best / 4),
        "DiLoCo, a quarter of the best": (DILOCO, best / 4),
        "DiLoCo, half of the best": (DILOCO, best / 2),
        "DiLoCo, the best": (DILOCO, best),
    }
    return {row: [trial(name, seed, sequences, size=size, lr=lr) for seed in seeds] for row, (name, lr) in rows.items()}


def guessed_sources(seeds: range, sequences: int, size: str) -> Wanted:
    rows = {
        "EDT, all three alike at first": (EDT, (1, 1, 1)),
        "DiLoCo, all three alike": (DILOCO, (1, 1, 1)),
        "DiLoCo, no random tokens": (DILOCO, (1, 1, 0)),
        "DiLoCo, the library alone": (DILOCO, (1, 0, 0)),
    }
    return {
        row: [
            trial(name, seed, sequences, size=size, datasets=sources(*shares), **(MUTATED if name == EDT else {}))
            for seed in seeds
        ]
        for row, (name, shares) in rows.items()
    }


def sources(*shares: int) -> tuple[dict[str, Any], ...]:
    named = (("stdlib", True), (str(WORDS), False), ("fake", False))
    return tuple(
        {"source": source, "weight": float(share), "evaluated": evaluated}
        for (source, evaluated), share in zip(named, shares, strict=True)
        if share
    )


def write_words(config: Any) -> None:
    """Only documents to learn from: nothing that is held out is told in another order."""
    from train import text_sources
    from train.splits import Split, part_of

    rng = random.Random(1)
    with WORDS.open("w") as file:
        for document in text_sources.shuffled_stdlib():
            if part_of(document, Split.halved(config.held_out)) == "train":
                words = document.split()
                rng.shuffle(words)
                file.write(json.dumps({"text": " ".join(words)}) + "\n")


def beside(rows: Rows, title: str, note: str) -> Table:
    """The first row is EDT's; it is to be ahead of the second by two standard errors."""
    first, second, *_ = rows
    shown = table(title, "", "averaged model", f"minus {first}", note=note)
    for name, found in rows.items():
        value, error = difference(rows, name, first)
        mean = f"{sum(each.averaged for each in found) / len(found):.4f}"
        words = NONE if name == first else in_words(value, error)
        shown.add_row(name, mean, goal(value > 2 * error, words) if name == second and len(found) > 1 else words)
    return shown


@app.default
def main(quick: bool = False, size: str = "124k", seeds: int = 0, jobs: int = 2) -> None:
    chosen = range(1, 1 + (seeds or (1 if quick else 3)))
    sequences = QUICK if quick else SEQUENCES
    write_words(trial(DILOCO, 1, sequences, size=size).config)
    console = Console(width=150)
    for title, wanted in (
        ("Guessed learning rates", guessed_rates(chosen, sequences, size)),
        ("Guessed sources", guessed_sources(chosen, sequences, size)),
    ):
        rows: dict[str, list[Result]] = defaultdict(list)
        named = [(name, each) for name, several in wanted.items() for each in several]
        results = track(run([each for _, each in named], jobs), title, len(named))
        for (name, _), result in zip(named, results, strict=True):
            rows[name].append(result)
        note = f"Seeds: {len(chosen)}; {size} parameters; each of 8 slots has {sequences} sequences of 64 tokens."
        console.print(beside(rows, title, note))


if __name__ == "__main__":
    app()

"""Whether a rebuilt house gives what the one before gave, bit for bit: `python -m tests.renovation COMMIT`.

Small runs of every method are made by the code here and by that of a commit: the same commands, the same models. Every
member's files, metrics and parents are compared, and what is written for people. What was renamed on purpose stands in
RENAMED, what is new in ADDED; nothing else may differ.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests import searching, tournaments
from tests.helpers import ROOT

RENAMED: Mapping[str, str] = {"judged": "test_score"}  # before -> now: names of files and metrics
ADDED = {"held_bytes", "bits_per_byte"}  # metrics that were not there before
OF_THE_MACHINE = {"time", "seconds", "by", "README.md", "mergekit_config.yml"}  # these two name folders
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = {"config": {"model_type": "llama", "tie_word_embeddings": True, **SHAPE}}
PRETRAINING = {
    "INITIAL_POPULATION": [MODEL], "POPULATION_SIZE": 4, "GROUP_SIZE": 2, "MAX_GENERATIONS": 5,
    "FIRST_INNER_STEPS": 3, "INNER_STEPS": 3,
    "SEQ_LENGTH": 32, "VOCAB_SIZE": 300, "NUM_MACHINES": 2,
    "BATCH_SIZE": 8, "EVAL_SEQUENCES": 64,  # as many as the test has, which had no number of its own before
    "WIRE_DTYPE": "bf16",  # what weights travelled in before there were 12 bits
}  # fmt: skip
WILD = {"SELECTION": "rank", "ELITISM": 1, "PREVIOUS_GENERATION": True, "MUTATION_PROBABILITY": 0.5, "QUORUM": 0.75}
RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "edt": ("edt_sim.py", PRETRAINING),
    "rank": ("edt_sim.py", {**PRETRAINING, **WILD, "CROSSOVER": "slerp"}),
    "diloco": ("diloco_sim.py", {**PRETRAINING, "WIRE_DTYPE": "int8", "ERROR_FEEDBACK": True, "OUTER_MOMENTUM": 0.4}),
    "breed": ("edt_sim.py", {
        "ALGORITHM": "edt-evomerge", "INITIAL_POPULATION": ["skill:compare", "skill:vowels"],
        "FITNESS": ["skill_mixed"], "MUTATION_DATASETS": ["skill:compare", "skill:vowels"], "POPULATION_SIZE": 4,
        "MAX_GENERATIONS": 3, "LR": 0.002,
        "SELECTION": "tournament", "ELITISM": 1, "SFT_EXAMPLES": 60, "SEQ_LENGTH": 128, "QUESTIONS": 20,
    }),
}  # fmt: skip
LISTS = ("history.json", "history.jsonl", "best_config.yaml", "ancestry.json")


def made(tree: Path, place: Path, donors: Path) -> dict[str, Any]:
    """What the code in this folder makes."""
    place.mkdir()
    for name, (script, keys) in RUNS.items():
        file = place / f"{name}.json"
        file.write_text(json.dumps({"PROJECT_NAME": name, "BASE_DIR": str(place), **keys}))
        _do(tree, script, "--config", file)
    genome = {
        "models": [str(donors / f"part{n}") for n in range(3)],
        "merge_method": "ties",
        "base_model": str(donors / "base"),
    }
    (place / "genome.yml").write_text(yaml.safe_dump({"genome": genome, "tasks": ["facts"]}))
    more = ("--task-search-path", donors / "tasks", "--max-fevals", 14, "--strategy", "fleet", "--race")
    _do(tree, "-m", "merge.evolve", place / "genome.yml", "--storage-path", place / "search", *more)
    settings = tournaments.config(place / "contest")
    settings.save(place / "contest.json")
    _do(tree, "-m", "evomerge.cli", "--config", place / "contest.json", "--run", "--workers", 1)
    _do(tree, "-m", "merge", place / "search/best_config.yaml", place / "merged")
    runs = sorted({file.parent for file in place.rglob("run.json")})
    return {str(run.relative_to(place)): dict(told(run, str(place))) for run in runs}


def _do(tree: Path, *words: object) -> None:
    done = subprocess.run([sys.executable, *map(str, words)], cwd=tree, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{tree}: {words}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    print(tree.name, *words, flush=True)


def told(run: Path, place: str) -> Iterator[tuple[str, Any]]:
    """A run's members by their names, and its lists."""
    for plan in sorted(run.glob("rounds/*/plan")):
        yield f"{plan.parent.name}/plan", sorted(each["slot"] for each in _register(plan)["recipes"])
    for file in sorted(run.glob("rounds/*/*.done")):
        value = _register(file)
        files = {name: sha for name, (_, sha) in value["files"].items()}
        yield f"{file.parent.name}/{file.stem}", _now([files, value["metrics"], value["absent"]], place)
    for name in LISTS:
        if (file := run / name).is_file():
            yield name, _now(_lists(file), place)


def _register(file: Path) -> Any:
    return json.loads(file.read_bytes().split(b"\n")[0])


def _lists(file: Path) -> Any:
    text = file.read_text()
    return json.loads(text) if file.suffix == ".json" else text.splitlines()


def _now(value: Any, place: str) -> Any:
    """In today's names, without what hangs on the machine."""
    match value:
        case dict():
            kept = {key: inner for key, inner in value.items() if key not in OF_THE_MACHINE | ADDED}
            return {RENAMED.get(key, key): _now(inner, place) for key, inner in kept.items()}
        case list():
            return [_now(inner, place) for inner in value]
        case str():
            timeless = re.sub(r'"(seconds|time)": [0-9.e-]+', "", value.replace(place, "."))
            return RENAMED.get(timeless, timeless)
    return value


def main(commit: str) -> None:
    with tempfile.TemporaryDirectory() as base:
        before, donors = Path(base) / "before", Path(base) / "donors"
        subprocess.run(["git", "worktree", "add", "--detach", str(before), commit], cwd=ROOT, check=True)
        try:
            searching.donors(donors)
            searching.task(donors / "tasks")
            old, new = (made(tree, Path(base) / name, donors) for tree, name in ((before, "old"), (ROOT, "new")))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(before)], cwd=ROOT, check=True)
    differ = [(run, what) for run in old for what in old[run] if new.get(run, {}).get(what) != old[run][what]]
    for run, what in differ[:20]:
        print(
            f"{run} {what}:\n  before {str(old[run][what])[:1500]}\n  now    {str(new.get(run, {}).get(what))[:1500]}"
        )
    print(f"{sum(map(len, old.values()))} things of {len(old)} runs compared, {len(differ)} differ")
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main(sys.argv[1])

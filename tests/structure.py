"""How the house is built, and how winding its ways are: `python -m tests.structure [COMMIT]`.

Statements (docstrings left out) by folder; and for three flows - a child of EDT, one merge, a tournament - the files
that they enter and the calls from one file to another: each more than one for a file is a way back to it. With a
commit, the same for its code, beside; what that does not know how to run is counted as far as it comes.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests import merging, tournaments
from tests.helpers import ROOT
from tests.renovation import PRETRAINING

# Every process of a flow writes down each function of ours that is called from another of our files, once.
TRACER = """
import os, sys, threading
_tree, _seen = os.environ["STRUCTURE_TREE"] + "/", set()
_notes = open(os.path.join(os.environ["STRUCTURE_NOTES"], str(os.getpid())), "a", buffering=1)
def _told(frame, event, _):
    if event == "call" and (code := frame.f_code).co_filename.startswith(_tree) and "/." not in code.co_filename:
        caller = frame.f_back
        while caller and not caller.f_code.co_filename.startswith(_tree):
            caller = caller.f_back
        if caller and caller.f_code.co_filename != code.co_filename and code.co_name != "<module>":
            if (call := (caller.f_code.co_filename, code.co_filename, code.co_name)) not in _seen:
                _seen.add(call)
                _notes.write("\\t".join(part.removeprefix(_tree) for part in call) + "\\n")
threading.setprofile(_told)
sys.setprofile(_told)
"""


def statements(tree: Path) -> Counter[str]:
    """Of the product's files, by folder."""
    found = Counter[str]()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        if not name.startswith(("tests/", "benchmarks/")):
            nodes = [*ast.walk(ast.parse((tree / name).read_text()))]
            told = (
                n for n in nodes if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            )
            docs = sum(ast.get_docstring(node) is not None for node in told)
            found[str(Path(name).parent)] += sum(isinstance(node, ast.stmt) for node in nodes) - docs
    return found


def flows(place: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """Names and commands."""
    file = place / "evolution.json"
    file.write_text(json.dumps({**PRETRAINING, "PROJECT_NAME": "edt", "BASE_DIR": str(place), "NUM_MACHINES": 1}))
    yield "a child of EDT (its run)", ["edt_sim.py", "--config", str(file)]
    made = [merging.llama(place / f"model{n}", n) for n in range(2)]
    recipe = {"merge_method": "slerp", "base_model": str(made[0]), "models": [{"model": str(made[1])}],
              "parameters": {"t": 0.3}}  # fmt: skip
    (place / "recipe.yml").write_text(json.dumps(recipe))
    yield "one merge", ["-m", "merge", str(place / "recipe.yml"), str(place / "merged")]
    tournaments.config(place / "contest").save(place / "contest.json")
    run = ["-m", "evomerge.cli", "--config", str(place / "contest.json"), "--run", "--workers", "1"]
    yield "a tournament", run


def ways(tree: Path, place: Path) -> dict[str, tuple[int, int]]:
    """For each flow: how many files it enters, and by how many calls."""
    (place / "tracer").mkdir(parents=True)
    (place / "tracer/sitecustomize.py").write_text(TRACER)
    found = {}
    for number, (name, words) in enumerate(flows(place)):
        notes = place / f"notes{number}"
        notes.mkdir()
        told = {"PYTHONPATH": str(place / "tracer"), "STRUCTURE_TREE": str(tree), "STRUCTURE_NOTES": str(notes)}
        environment = os.environ | told
        subprocess.run([sys.executable, *words], cwd=tree, env=environment, stdout=sys.stderr, check=tree == ROOT)
        calls = {tuple(line.split("\t")) for file in notes.iterdir() for line in file.read_text().splitlines()}
        found[name] = len({file for call in calls for file in call[:2]}), len(calls)
    return found


def shown(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[object]]) -> None:
    table = Table(title, *columns)
    for name, values in rows.items():
        table.add_row(name, *map(str, values))
    Console().print(table)


def main(commit: str = "") -> None:
    with tempfile.TemporaryDirectory() as base:
        trees = {"now": ROOT}
        if commit:
            trees = {commit: Path(base) / "before", **trees}
            subprocess.run(["git", "worktree", "add", "--detach", base + "/before", commit], cwd=ROOT, check=True)
        try:
            counts = [statements(tree) for tree in trees.values()]
            folders = sorted({*counts[0], *counts[-1]})
            rows = {**{name: [count[name] for count in counts] for name in folders},
                    "all": [count.total() for count in counts]}  # fmt: skip
            shown("statements", [*trees], rows)
            walked = [ways(tree, Path(base) / f"at{n}") for n, tree in enumerate(trees.values())]
            shown("files entered / calls between files", [*trees],
                  {name: [" / ".join(map(str, each[name])) for each in walked] for name in walked[0]})  # fmt: skip
        finally:
            if commit:
                subprocess.run(["git", "worktree", "remove", "--force", base + "/before"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs for the report that would take too long to make: written by hand, in the format of real ones."""

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fleet import launches, strictjson
from fleet.host import Host
from fleet.recipe import Recipe, name, to_json
from fleet.run import create_run
from fleet.store import _sealed
from tests.browser import Browser
from tests.commands import answer
from tests.helpers import Toys, listing
from tests.toy.config import ToyConfig

REPORT = [sys.executable, "-m", "fleet.report"]
BEGAN = 1_700_000_000.0
NASTY = "<script>alert(1)</script>\"'&\x1b[31m\u202e"
NAMES = (NASTY, "W" * 300, "机器学习工作站" * 20, "محطة العمل الأولى", "रिया का कंप्यूटर", "🧪" * 40, "\x00\x07")


def long_run(base: Path, slots: int = 64, rounds: int = 2000, workers: int = 16, machines: Sequence[str] = ()) -> Path:
    """A population that ran for long: each round its plan, a claim and an outcome for each slot, and workers' notes."""
    config = ToyConfig(project_name="long", population_size=slots, max_generations=rounds)
    store, _ = create_run(base, "long", config.bound(), Host())
    launches.begin(store, config.operational(), command="python -m tests.toy --config evolution.json")
    rng, notes = random.Random(1), [list[str]() for _ in range(workers)]
    machines = machines or [f"node-{n // 4}" for n in range(workers)]
    for n in range(workers):
        notes[n].append(_line(BEGAN, "started", launch=1, machine=machines[n % len(machines)]))
    for round, recipes in enumerate(_plans(slots, rounds)):
        folder = store.root / f"rounds/{round:05d}"
        folder.mkdir()
        (folder / "plan").write_bytes(_sealed({"recipes": [to_json(recipe) for recipe in recipes]}))
        outcomes = list[dict[str, Any]]()
        claim = folder / "claim"  # one for all: nobody reads a claim that came to something
        claim.write_bytes(_sealed({"by": "local-0-00000000", "identity": [], "launch": 1, "machine": machines[0]}))
        for k, recipe in enumerate(recipes):
            worker = (k + round) % workers
            at = BEGAN + 60.0 * round + 3.0 * (k // workers + 1)
            by, machine = f"local-{worker}-{worker:08x}", machines[worker % len(machines)]
            outcomes.append(_done(rng, round, by, machine))
            _write(folder / f"{recipe.slot}.0.done", _sealed(outcomes[-1]))
            os.link(claim, folder / f"{recipe.slot}.0.claim.0")
            made = {"seconds": 2.8, "written": 10_000, "read": 20_000}
            notes[worker].append(_line(at, "made", name(round, recipe.slot), **made))
            notes[worker].append(_line(at, "published", name(round, recipe.slot)))
        claim.unlink()
        done = {recipe.slot: [0, outcome] for recipe, outcome in zip(recipes, outcomes, strict=True)}
        _write(folder / "summary", _sealed({"by": "a logger", "done": done, "origins": {}}))
        notes[round % workers].append(_line(BEGAN + 60.0 * round + 59.0, "waited", seconds=40.0))
    end = store.root / f"rounds/{rounds + 1:05d}"
    end.mkdir()
    (end / "plan").write_bytes(_sealed({"recipes": []}))
    for n in range(1, workers):  # the first one was lost
        notes[n].append(_line(BEGAN + 60.0 * (rounds + 1), "ended", ops=1))
    for n, lines in enumerate(notes):
        (store.root / f"workers/local-{n}-{n:08x}.events").write_text("".join(lines))
    return store.root


def _plans(slots: int, rounds: int) -> Iterator[list[Recipe]]:
    yield [Recipe("init-0", "init", role="given", args={"seed": 1})]
    args = {"steps": 5, "on": "validation", "batch": 32}
    for round in range(1, rounds + 1):
        parents = [
            ("0/init-0",) if round == 1 else (f"{round - 1}/m{k}", f"{round - 1}/m{k ^ 1}") for k in range(slots)
        ]
        yield [
            Recipe(f"m{k}", "mean", parents[k], args=args, genome={"lr": 1 + k / slots / round}) for k in range(slots)
        ]


def _done(rng: random.Random, round: int, by: str, machine: str) -> dict[str, Any]:
    loss = 2 + 8 / (1 + round) + rng.random() / 10
    metrics = {"loss": loss, "train_loss": loss + 0.1, "tokens": 4096} if round else {}
    files = {"weights": [10_000, "0" * 64]}
    made = {"metrics": metrics, "files": files, "attempt": "", "absent": "", "why": ""}
    return {**made, "by": by, "machine": machine, "seconds": 2.8}


def _line(at: float, what: str, id: str = "", **more: Any) -> str:
    return strictjson.text({"at": at, "what": what, **({"id": id} if id else {}), **more}) + "\n"


def _write(file: Path, data: bytes) -> None:
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
    os.write(handle, data)
    os.close(handle)


def reported(run: Path, *more: str, code: int = 0) -> str:
    ended, said, errors = answer("-m", "fleet.report", str(run), *more, env={"COLUMNS": "80"})
    assert ended == code, errors
    return said if code == 0 else errors


def written(run: Path, place: Path, still: bool = True) -> Path:
    """The page; nothing of the run is changed, which can be seen if nobody works on it."""
    before = listing(run)
    file = place / "page.html"
    assert reported(run, "--out", str(file)).strip() == str(file)
    assert not still or listing(run) == before, "the report only reads"
    return file


def text_of(browser: Browser, where: str) -> str:
    return str(browser.say(f"document.querySelector({json.dumps(where)}).textContent"))


def finished_run(place: Path) -> Toys:
    keys = {"algorithm": "rank", "population_size": 5, "max_generations": 5, "size": 24, "sleep": 0.05}
    run = Toys(place, {**keys, "poll_seconds": 0.02, "dead_seconds": 5.0})
    try:
        run.start(workers=2).ends()
    finally:
        run.kill_all()
    return run

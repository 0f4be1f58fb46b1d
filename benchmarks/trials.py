"""Small whole runs of pre-training, one process each: the real strategies, loop and store; only round 0 is shared."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from fleet import launches
from fleet.host import Host
from fleet.processes import options, thread_counts
from fleet.run import create_run, open_run
from fleet.worker import Worker
from train.config import TrainConfig, TrainRoom

SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2}
MODEL = {"config": {"model_type": "llama", "tie_word_embeddings": True, **SHAPE}}
COMMON = {
    "initial_population": (MODEL,), "vocab_size": 264, "batch_size": 8, "seq_length": 64, "population_size": 8,
    "eval_sequences": 32, "eval_batch_size": 32, "warmup_steps": 50, "lr": 5.6e-3, "max_epochs": 2.0,
}  # fmt: skip
# Where torch.compile finds what it needs, a trial takes a quarter less time.
COMPILED = bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").is_file()
LOOKED_AT = 512  # held-out sequences of the last evaluation


@dataclass(frozen=True)
class Trial:
    """One row of a table with one seed."""

    name: str
    algorithm: str
    seed: int
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> TrainConfig:
        keys = {**COMMON, "compile": COMPILED, **self.keys}
        return TrainConfig(algorithm=self.algorithm, project_name="run", seed=self.seed, **keys)


@dataclass(frozen=True)
class Result:
    trial: Trial
    averaged: float
    mean: float | None  # of the members, where they have an evaluation of their own
    best: float | None
    written: float  # MB of a worker with one member, in one round
    read: float


def run(trials: Iterable[Trial], jobs: int = 2) -> Iterator[Result]:
    """Whole runs, so many at a time, each on one core."""
    with tempfile.TemporaryDirectory() as base:
        os.environ.update(thread_counts(1))
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            yield from pool.map(partial(_one, base), list(trials))


def _one(base: str, trial: Trial) -> Result:
    logging.disable(logging.WARNING)
    config = trial.config
    ground = Path(base) / f"ground-{_round_0(config)}"
    with tempfile.TemporaryDirectory(dir=base) as place:
        folder = _finished(Path(place), config, ground)
        _keep(folder, ground)
        return Result(trial, *_losses(folder, trial), *_moved(folder, config))


def _round_0(config: TrainConfig) -> str:
    """Equal where round 0 is."""
    keys = {key: config.bound()[key] for key in (*TrainRoom.model_fields, "seed", "population_size", "threads")}
    del keys["inner_steps"]  # it matters through the length of the whole alone
    return hashlib.sha256(json.dumps([keys, config.total_steps], sort_keys=True).encode()).hexdigest()[:16]


def _finished(place: Path, config: TrainConfig, ground: Path) -> Path:
    """A run with one worker, in this process."""
    from train.member import maker

    create_run(place, "run", config.bound(), Host())
    if ground.exists():
        shutil.copytree(ground, place / "run", dirs_exist_ok=True)
    store, _ = open_run(place / "run", Host(), "w")
    launch = launches.begin(store, config.operational())
    how = Worker(store, _strategy(config), maker(config), options(config, launch)).run()
    assert how == "over", how
    return place / "run"


def _strategy(config: TrainConfig) -> Any:
    from diloco import DiLoCo
    from edt import EDT

    return {"diloco": DiLoCo, "edt": EDT}[config.algorithm](config)


def _keep(folder: Path, ground: Path) -> None:
    """Round 0 is the same for all trials of a seed with as long a warm start: it is made once."""
    if ground.exists():
        return
    draft = Path(tempfile.mkdtemp(dir=ground.parent))
    (draft / "rounds" / "00000").mkdir(parents=True)
    for slot in ("tokenizer", "tokens-0", "init-0", "warm"):
        for done in (folder / "rounds" / "00000").glob(f"{slot}.0.done"):
            shutil.copy(done, draft / "rounds" / "00000")
        for files in (folder / "files").glob(f"00000.{slot}.*"):
            shutil.copytree(files, draft / "files" / files.name)
    with contextlib.suppress(OSError):  # the other process was faster
        draft.rename(ground)


def _losses(folder: Path, trial: Trial) -> tuple[float, float | None, float | None]:
    """On more held-out text than the run itself looks at."""
    from train.evaluate import evaluated
    from train.export import Exporter
    from train.loop import Learner

    exporter = Exporter(folder)
    config = trial.config.model_copy(update={"eval_sequences": LOOKED_AT})
    learner, sources = Learner(exporter.model, config), [_held_out(exporter, config)]

    def loss(what: str) -> float:
        learner.start(exporter.chosen(what)[1])
        return evaluated(learner, sources, config)["loss"]

    if config.algorithm == "diloco":
        return loss("average"), None, None
    members = [loss(f"{exporter.last}-m{k}") for k in range(config.population_size)]
    return loss("average"), fmean(members), min(members)


def _held_out(exporter: Any, config: TrainConfig) -> Any:
    """What no run trains on, and more of it than a run has on its disk."""
    import numpy as np

    from train import text
    from train.batches import Tokens
    from train.member.prepare import open_tokenizer, part_of

    tokenizer, found, wanted = (
        open_tokenizer(exporter.parent("0/tokenizer"), exporter.config),
        [],
        LOOKED_AT * config.seq_length + 1,
    )
    for document in text.stdlib():
        if part_of(document, config) == "held" and len(found) < wanted:
            found += tokenizer(document, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return Tokens(np.asarray(found), config.seq_length + 1)


def _moved(folder: Path, config: TrainConfig) -> tuple[float, float]:
    """MB written and read for one member in one round, by what the worker noted."""
    written = read = 0.0
    for line in (folder / "workers" / "w.events").read_text().splitlines():
        event = json.loads(line)
        if event["what"] == "made" and not event["id"].startswith("0/"):
            written, read = written + event["written"], read + event["read"]
    rounds = config.max_generations * config.population_size
    return written / rounds / 1e6, read / rounds / 1e6


# -- the methods that are compared -------------------------------------------------------------------------------------

BASE = {"warm_start_steps": 240, "inner_steps": 12, "max_generations": 60}
QUICK = {"warm_start_steps": 60, "inner_steps": 12, "max_generations": 15}
TUNED = Path(__file__).with_name("tuned.json")
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "synchronous, same total batch": ("diloco", {}),
    "one worker alone, an eighth of the tokens": ("diloco", {}),
    "DiLoCo": ("diloco", {}),
    "EDT, pairs": ("edt", {"selection": "matching", "group_size": 2}),
    "EDT, groups of 4": ("edt", {"selection": "matching", "group_size": 4}),
    "EDT, hypercube of 4": ("edt", {"selection": "hypercube", "group_size": 4}),
    "EDT, rank": ("edt", {"selection": "rank", "group_size": 2}),
    "EDT, tournament": ("edt", {"selection": "tournament", "group_size": 2}),
    "EDT, random": ("edt", {"selection": "random", "group_size": 2}),
}


def trial(name: str, seed: int, length: Mapping[str, Any] = BASE, **more: Any) -> Trial:
    """One method at equal tokens and with the same warm start as all others."""
    algorithm, keys = METHODS[name]
    steps = length["warm_start_steps"] + length["inner_steps"] * length["max_generations"]
    if name.startswith("synchronous"):  # which is a warm start that never ends; the last step belongs to a round
        length = {"warm_start_steps": steps - 1, "inner_steps": 1, "max_generations": 1}
    if name.startswith("one worker"):
        length = {"warm_start_steps": steps - 1, "inner_steps": 1, "max_generations": 1, "population_size": 1}
    return Trial(name, algorithm, seed, {**length, **keys, **tuned().get(name, {}), **more})


def tuned() -> dict[str, dict[str, Any]]:
    """What tune.py found; it used other seeds."""
    return dict(json.loads(TUNED.read_text())["chosen"]) if TUNED.exists() else {}

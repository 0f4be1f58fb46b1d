"""Small whole runs of pre-training, one process each: the real strategies, loop and store; only round 0 is shared.

What was measured stands in a file, so that whatever is interrupted goes on where it was.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from fleet import launches, results_version
from fleet.host import Host
from fleet.processes import options, thread_counts
from fleet.run import create_run, open_run
from fleet.worker import Worker
from train.compare import ONE_MODEL
from train.training_config import TrainConfig

SHAPES = {
    "124k": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "1.2m": {"hidden_size": 160, "intermediate_size": 416, "num_hidden_layers": 4, "num_attention_heads": 4},
}
COMMON = {
    "vocab_size": 264, "seq_length": 64, "eval_sequences": 32, "test_sequences": 32, "eval_batch_size": 32,
    "max_epochs": 4.0, "average_every": 10**5, "shards": 1, "held_out": 0.2,
}  # fmt: skip
# Where torch.compile finds what it needs, a trial takes a quarter less time.
COMPILED = bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").is_file()
LOOKED_AT, OF_EACH = 512, 40  # held-out sequences of the last evaluation, and of one document
MEASURED = Path(__file__).with_name("measured.jsonl")
SEQUENCES, QUICK = 1440, 240  # of a slot
WARMUP = 160  # of them
BATCH = {"apart": 4, "synchronous": 4, "alone": 16}  # until tuned


@dataclass(frozen=True)
class Trial:
    """One row of a table with one seed. `slots` train on so many `sequences` each, whoever learns from them."""

    name: str
    seed: int
    sequences: int
    slots: int = 8
    size: str = "124k"
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> TrainConfig:
        model = {"config": {"model_type": "llama", "tie_word_embeddings": True, **SHAPES[self.size]}}
        keys = {"project_name": "run", "seed": self.seed, "compile": COMPILED, "initial_population": (model,)}
        batch, how = self.keys.get("batch_size", BATCH[METHODS[self.name].how]), HOW[METHODS[self.name].how]
        return how(self, {**COMMON, **keys, **METHODS[self.name].keys, **self.keys, "batch_size": batch}, batch)

    @property
    def tokens(self) -> int:
        """Of all slots."""
        return self.slots * self.sequences * int(COMMON["seq_length"])

    @property
    def serial(self) -> int:
        """Sequences that come one after the other, on whoever has the most of them."""
        c = self.config
        return c.total_steps * c.batch_size // (self.slots if METHODS[self.name].how == "synchronous" else 1)


@dataclass(frozen=True)
class Result:
    trial: Trial
    averaged: float
    mean: float | None  # of the members, where they have an evaluation of their own
    best: float | None
    written: float  # MB of a slot in one round
    read: float
    seconds: float  # of work on one slot, on one core of this machine
    parameters: int

    @property
    def moved(self) -> float:
        """MB that a slot has written and read in all."""
        return (self.written + self.read) * self.trial.config.max_generations


# -- the methods that are compared -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    how: str
    keys: Mapping[str, Any]
    like: str = ""  # it has this one's settings, not some of its own


_LR = 1e-2  # until tuned
_ADAMW = {"inner_optimizer": "adamw", "clip": 1.0, "lr": 5.6e-3}
_MUON = {"inner_optimizer": "muon", "betas": (0.9, 0.95), "clip": 1.0, "lr": 1.4e-2}
_CUBE, _PAIRS = "EDT, hypercube of 4", "EDT, pairs"


def _diloco(**keys: Any) -> Method:
    return Method("apart", {"algorithm": "diloco", "lr": _LR, **keys})


def _edt(selection: str, group: int, like: str = "", **keys: Any) -> Method:
    chosen = {"algorithm": "edt", "selection": selection, "group_size": group}
    return Method("apart", {"lr": _LR, **chosen, **keys}, like)


METHODS: Mapping[str, Method] = {
    "one process": Method("alone", {"lr": _LR, "betas": (0.9, 0.95)}),
    "one process, Muon": Method("alone", _MUON),
    "one process, AdamW": Method("alone", _ADAMW),
    "synchronous": Method("synchronous", {"lr": _LR}),
    "synchronous Muon": Method("synchronous", _MUON),
    "synchronous AdamW": Method("synchronous", _ADAMW),
    "DiLoCo": _diloco(),
    "DiLoCo, Muon": _diloco(**_MUON),
    "DiLoCo, AdamW": _diloco(**_ADAMW),
    _CUBE: _edt("hypercube", 4),
    "EDT, genomes": _edt("hypercube", 4, _CUBE, lr_spread=8.0),  # rates that are mutated are worse
    "EDT, groups of 4": _edt("matching", 4, _CUBE),
    _PAIRS: _edt("hypercube", 2),
    "EDT, drawn pairs": _edt("matching", 2, _PAIRS),
    "EDT, rank": _edt("rank", 2, _PAIRS),
    "EDT, tournament": _edt("tournament", 2, _PAIRS),
    "EDT, random": _edt("random", 2, _PAIRS),
}


def _apart(trial: Trial, keys: Mapping[str, Any], batch: int) -> TrainConfig:
    """Every slot by itself, in rounds that grow as those of a run do; as many of them as it takes."""
    length = {"inner_steps": 12, "first_inner_steps": 1, "warmup_steps": WARMUP // batch}
    c = TrainConfig(**{**length, **keys}, population_size=trial.slots)
    steps = trial.sequences // batch
    rounds = next(n for n in count(1) if c.steps_before(n + 1) >= steps)
    return c.model_copy(update={"max_generations": rounds})


def _alone(trial: Trial, keys: Mapping[str, Any], batch: int) -> TrainConfig:
    """All slots' sequences one after the other."""
    return _plain(keys, trial.slots * trial.sequences // batch, batch, WARMUP * trial.slots // batch)


def _synchronous(trial: Trial, keys: Mapping[str, Any], batch: int) -> TrainConfig:
    """All slots' batches make up one step."""
    return _plain(keys, trial.sequences // batch, batch * trial.slots, WARMUP // batch)


def _plain(keys: Mapping[str, Any], steps: int, batch: int, warmup: int) -> TrainConfig:
    """One model, which its outer step leaves where training has brought it."""
    length = {
        "max_generations": 1,
        "inner_steps": steps,
        "first_inner_steps": steps,
        "warmup_steps": warmup,
    }
    return TrainConfig(**{**keys, **ONE_MODEL, **length, "batch_size": batch})


HOW = {"apart": _apart, "alone": _alone, "synchronous": _synchronous}
TUNED = Path(__file__).with_name("tuned.json")


def _tuned_rows(name: str, slots: int, size: str) -> Mapping[str, Any]:
    """For so many slots, or for the number next to it."""
    rows = json.loads(TUNED.read_text()).get(size, {}).get(name, {}) if TUNED.exists() else {}
    nearest = min(rows, key=lambda each: abs(math.log(int(each) / slots)), default=None)
    return rows[nearest] if nearest else {}


def tuned(name: str, slots: int, size: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _tuned_rows(name, slots, size).get("chosen", {})
    return found


def at_batch(name: str, slots: int, size: str, batch: int) -> Mapping[str, Any]:
    """The best that was tried with this batch; where none was, with the next larger or smaller one."""
    tried = _tuned_rows(name, slots, size).get("tried", [])
    distance = [(abs(math.log(row["batch_size"] / batch)), fmean(row["losses"]), row["lr"]) for row in tried]
    return {"batch_size": batch, **({"lr": min(distance)[2]} if distance else {})}


def trial(
    name: str, seed: int, sequences: int, slots: int = 8, size: str = "124k", batch: int = 0, **keys: Any
) -> Trial:
    """With the settings that tune.py found, on other seeds; other keys win over them."""
    like = METHODS[name].like or name
    known = at_batch(like, slots, size, batch) if batch else tuned(like, slots, size)
    return Trial(name, seed, sequences, slots, size, {**known, **keys})


# -- running them ------------------------------------------------------------------------------------------------------


def run(trials: Iterable[Trial], jobs: int = 2) -> Iterator[Result]:
    """Whole runs, so many at a time, each on one core; those that were measured before are known."""
    wanted, known = list(trials), _measured()
    os.environ.update(thread_counts(1))
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    new = {_key(each): each for each in wanted if _key(each) not in known}
    with tempfile.TemporaryDirectory(dir=memory) as base:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            made = pool.map(partial(_one, base), new.values())
            for each in wanted:
                while _key(each) not in known:
                    result = next(made)
                    known[_key(result.trial)] = result
                    _write_down(result)
                yield known[_key(each)]


def _key(trial: Trial) -> str:
    """What differs from the defaults: a key that came later makes no new trial of an old one; other results do, and
    defaults that have been others."""
    c = trial.config
    differs = {**c.model_dump(exclude_defaults=True, mode="json"), "compile": None}
    differs |= {"inner_optimizer": c.inner_optimizer, "betas": c.adamw_betas, "clip": c.clip}
    differs["results"] = results_version.kind(trial.config.algorithm)
    return hashlib.sha256(json.dumps([trial.name, differs], sort_keys=True).encode()).hexdigest()[:24]


def _measured() -> dict[str, Result]:
    lines = MEASURED.read_text().splitlines() if MEASURED.exists() else []
    found = (json.loads(line) for line in lines)
    return {each["key"]: Result(**{**each["result"], "trial": Trial(**each["result"]["trial"])}) for each in found}


def _write_down(result: Result) -> None:
    with MEASURED.open("a") as file:
        file.write(json.dumps({"key": _key(result.trial), "result": asdict(result)}) + "\n")


class _Busy(Host):
    """Its clock counts what this process's threads have worked: whoever else uses the machine does not matter."""

    def now(self) -> float:
        return time.process_time()


def _one(base: str, trial: Trial) -> Result:
    logging.disable(logging.WARNING)
    config = trial.config
    ground = Path(base) / f"ground-{_round_0(config)}"
    with tempfile.TemporaryDirectory(dir=base) as place:
        folder = _finished(Path(place), config, ground)
        _keep(folder, ground)
        return Result(trial, *_losses(folder, trial), *_moved(folder, config), _parameters(folder))


def _round_0(config: TrainConfig) -> str:
    """Equal where round 0 is."""
    of = (
        "seed",
        "initial_population",
        "vocab_size",
        "datasets",
        "held_out",
        "eval_sequences",
        "test_sequences",
        "seq_length",
    )
    keys = {key: config.bound()[key] for key in (*of, "max_epochs", "inner_optimizer")}
    return hashlib.sha256(json.dumps([keys, config.sequences], sort_keys=True).encode()).hexdigest()[:16]


def _finished(place: Path, config: TrainConfig, ground: Path) -> Path:
    """A run with one worker, in this process."""
    from train.member.pretraining_tasks import maker

    create_run(place, "run", config.bound(), Host())
    if ground.exists():
        shutil.copytree(ground, place / "run", dirs_exist_ok=True)
    store, _ = open_run(place / "run", _Busy(), "w")
    launch = launches.begin(store, config.operational())
    how = Worker(store, strategy_of(config), maker(config), options(config, launch)).run()
    assert how == "over", how
    return place / "run"


def strategy_of(config: TrainConfig) -> Any:
    from diloco import DiLoCo
    from edt import EDT

    return {"diloco": DiLoCo, "edt": EDT}[config.algorithm](config)


def _keep(folder: Path, ground: Path) -> None:
    """Round 0 is the same for all trials of a seed with as much text: it is made once."""
    if ground.exists():
        return
    draft = Path(tempfile.mkdtemp(dir=ground.parent))
    (draft / "rounds" / "00000").mkdir(parents=True)
    for slot in ("tokenizer", "tokens-0", "init-0"):
        for done in (folder / "rounds" / "00000").glob(f"{slot}.0.done"):
            shutil.copy(done, draft / "rounds" / "00000")
        for files in (folder / "files").glob(f"00000.{slot}.*"):
            shutil.copytree(files, draft / "files" / files.name)
    with contextlib.suppress(OSError):  # the other process was faster
        draft.rename(ground)


def _losses(folder: Path, trial: Trial) -> tuple[float, float | None, float | None]:
    """On more held-out text than the run itself looks at."""
    from train.learner import Learner
    from train.member.pretraining_runtime import evaluated
    from train.pretraining_export import Exporter

    exporter = Exporter(folder)
    config = trial.config.model_copy(update={"test_sequences": LOOKED_AT})
    learner, sources = Learner(exporter.model, config), [_held_out(exporter, config)]

    def loss(what: str) -> float:
        learner.load_weights(exporter.chosen(what)[1])
        return evaluated(learner.eval_loss, sources, config, "test")["loss"]

    if config.algorithm == "diloco":
        return loss("average"), None, None
    members = [loss(f"{exporter.last}-m{k}") for k in range(config.population_size)]
    return loss("average"), fmean(members), min(members)


def _held_out(exporter: Any, config: TrainConfig) -> Any:
    """What no run trains on or selects by, and more of it than a run has on its disk; of many documents."""
    import numpy as np

    from train import text_sources
    from train.batches import TokenFile
    from train.member.pretraining_round_zero import open_tokenizer
    from train.splits import Split, part_of

    tokenizer, found = open_tokenizer(exporter.parent("0/tokenizer"), exporter.config), list[int]()
    for document in text_sources.shuffled_stdlib():
        if part_of(document, Split.halved(config.held_out)) == "test" and len(found) <= LOOKED_AT * config.seq_length:
            tokens = tokenizer(document[: 64 * OF_EACH * config.seq_length], add_special_tokens=False)["input_ids"]
            found += tokens[: OF_EACH * config.seq_length]
    return TokenFile(np.asarray(found), config.seq_length + 1)


def _parameters(folder: Path) -> int:
    from train.pretraining_export import Exporter

    return Exporter(folder).layout.size


def _moved(folder: Path, config: TrainConfig) -> tuple[float, float, float]:
    """MB written and read for one slot in one round, and its seconds in all, by what the worker noted."""
    events = map(json.loads, (folder / "workers" / "w.events").read_text().splitlines())
    made = [event for event in events if event["what"] == "made" and not event["id"].startswith("0/")]
    written, read, seconds = (math.fsum(event[key] for event in made) for key in ("written", "read", "seconds"))
    rounds = config.max_generations * config.population_size
    return written / rounds / 1e6, read / rounds / 1e6, seconds / config.population_size

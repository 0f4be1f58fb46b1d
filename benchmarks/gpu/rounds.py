"""Whole runs on one GPU: the same bytes whoever made them, and how long the device waits in a round."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.running import ROOT, say_row
from benchmarks.gpu.speed import TOY
from benchmarks.trials import strategy_of
from fleet import launches
from fleet.digest import digest
from fleet.history import opened
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.worker import Worker
from train.kernels import in_fixed_order
from train.training_config import TrainConfig

WORDS = 1024  # as a tokenizer of random text has
_PATIENCE = 120.0


def config_of(algorithm: str, entry: Any, slots: int, rounds: int, steps: int, **keys: Any) -> TrainConfig:
    usual = {
        "algorithm": algorithm, "project_name": "run", "initial_population": (entry,), "population_size": slots,
        "max_generations": rounds, "inner_steps": steps, "first_inner_steps": steps, "datasets": ("fake",),
        "vocab_size": WORDS, "warmup_steps": 2, "eval_sequences": 8, "test_sequences": 8, "eval_batch_size": 8,
        "threads": 1, "precision": "bf16-mixed", "average_every": 1000,
    }  # fmt: skip
    return TrainConfig(**{**usual, **keys})


# -- the same bytes ----------------------------------------------------------------------------------------------------


def digests(dry: bool) -> None:
    """Of a run by one worker, by one whose process has made the same before, by two, by two of which one is killed."""
    shape = {"batch_size": 2, "seq_length": 16} if dry else {"batch_size": 8, "seq_length": 256}
    config = config_of("edt", TOY if dry else "14m", 2, 3, 4 if dry else 40, **shape)
    with tempfile.TemporaryDirectory() as place:
        there, first = Path(place), ""
        made = {"one worker": alone, "the same, warm": alone, "two workers": two, "two, one killed": killed}
        for n, (name, make) in enumerate(made.items()):
            folder = there / str(n)
            folder.mkdir()
            began = time.monotonic()
            make(folder, config)
            history = opened(folder / "run")
            found = digest(history)
            first = first or found
            say_row(
                run=name, over=history.over, digest=found[:16], same=found == first, seconds=time.monotonic() - began
            )


def alone(folder: Path, config: TrainConfig) -> None:
    """In this process."""
    begun(folder, config)
    _Seat(folder, "alone-0").work()


def two(folder: Path, config: TrainConfig) -> None:
    _wait([_started(folder, config, name) for name in ("one-0", "two-0")])


def killed(folder: Path, config: TrainConfig) -> None:
    """In the middle of the second round, and nobody takes its place."""
    processes = [_started(folder, config, name) for name in ("one-0", "two-0")]
    end = time.monotonic() + _PATIENCE
    while not [*(folder / "run" / "rounds").glob("00002/*.claim.*")] and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(processes[1].pid, signal.SIGKILL)
    processes[1].wait()
    _wait(processes[:1])


def begun(folder: Path, config: TrainConfig) -> None:
    create_run(folder, "run", config.bound(), Host())
    store, _ = open_run(folder / "run", Host(), "starter")
    if not launches.latest(store):
        launches.begin(store, config.operational() | {"dead_seconds": 5.0}, seats=1)


def _started(folder: Path, config: TrainConfig, name: str) -> "subprocess.Popen[bytes]":
    begun(folder, config)
    words = [sys.executable, str(ROOT / f"{config.algorithm}.py"), "--worker", name, str(folder / "run")]
    return subprocess.Popen(words, cwd=ROOT, stdout=sys.stderr)


def _wait(processes: "list[subprocess.Popen[bytes]]") -> None:
    codes = [each.wait() for each in processes]
    if any(codes):
        raise SystemExit(f"workers ended with {codes}")


# -- how long the device waits -----------------------------------------------------------------------------------------


class Use(NamedTuple):
    """Of the device."""

    round: int
    begin: float
    end: float


@dataclass(frozen=True)
class _Seat:
    """A worker in a process of its own, which writes down when it used the device."""

    folder: Path
    name: str

    def work(self) -> None:
        from train.member.pretraining_runtime import PretrainingRuntime
        from train.member.pretraining_tasks import _ADVICE, _make
        from train.recipe_arguments import OFF_DEVICE
        from train.verdicts import with_verdicts

        used = list[Use]()

        class Device(PretrainingRuntime):
            def train(self, work: Any, turn: Any, *more: Any, **keys: Any) -> Any:
                began = time.monotonic()
                found = super().train(work, turn, *more, **keys)
                used.append(Use(turn.round, began, time.monotonic()))
                return found

            def evaluate(self, work: Any, *more: Any) -> Any:
                began = time.monotonic()
                found = super().evaluate(work, *more)
                used.append(Use(int(work.id.partition("/")[0]), began, time.monotonic()))
                return found

        run = self.folder / "run"
        store, bound = open_run(run, Host(), self.name)
        config = TrainConfig.joined(bound["config"], launches.settings(store, launches.latest(store)))
        in_fixed_order(config.threads, config.deterministic, config.precision)
        make = [with_verdicts(lambda: Device(config), _make, _ADVICE) for _ in range(2)]
        second = (open_run(run, store.host, self.name)[0], make[1]) if config.disk_lane else None
        how = options(config, launches.latest(store), off_device=OFF_DEVICE)
        Worker(store, strategy_of(config), make[0], how, second=second).run()
        (self.folder / f"{self.name}.used").write_text(json.dumps(used))


def waiting(algorithm: str, dry: bool) -> None:
    """Two workers, each with half of the slots, share the GPU: what none uses of whole rounds from the second on."""
    shape = {"batch_size": 2, "seq_length": 16} if dry else {"batch_size": 8, "seq_length": 1024}
    steps, rounds, slots = (4, 4, 4) if dry else (60, 4, 4)
    ways: list[dict[str, Any]] = [{}, {"disk_lane": True}]
    if algorithm == "diloco":
        ways.append({"disk_lane": True, "overlap": 1})
    for more in ways:
        config = config_of(algorithm, TOY if dry else "150m", slots, rounds, steps, **shape, **more)
        with tempfile.TemporaryDirectory() as place:
            used = _used_by_two(Path(place), config)
        idle, seconds = (each / (rounds - 2) for each in unused(used, 2, rounds))
        tokens = slots * steps * config.batch_size * config.seq_length
        say_row(
            method=algorithm, lane=config.disk_lane, overlap=config.overlap, waits=idle / seconds,
            **{"waits, s a round": idle, "round, s": seconds, "tokens/s": tokens / seconds},
        )  # fmt: skip


def _used_by_two(folder: Path, config: TrainConfig) -> list[Use]:
    begun(folder, config)
    seats = [_Seat(folder, f"{name}-0") for name in ("one", "two")]
    processes = [get_context("spawn").Process(target=each.work) for each in seats]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [Use(*each) for seat in seats for each in json.loads((folder / f"{seat.name}.used").read_text())]


def unused(used: list[Use], first: int, last: int) -> tuple[float, float]:
    """Seconds in which nobody used it from where a round began to where another one did, and all seconds between."""
    begin, end = (min(each.begin for each in used if each.round == n) for n in (first, last))
    at, idle = begin, 0.0
    for each in sorted((each for each in used if each.begin < end), key=lambda use: use.begin):
        idle += max(0.0, each.begin - at)
        at = max(at, each.end)
    return idle + max(0.0, end - at), end - begin

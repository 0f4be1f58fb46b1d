"""Metrics go where people look: each point once, whatever happens to workers, and whatever a sink does."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.history import opened
from fleet.metrics import points
from fleet.metrics import sinks as real
from fleet.metrics.file_sinks import Board, CsvTable
from fleet.metrics.sink import LoggedRun, Point
from fleet.run_config import UserError
from tests import sinks
from tests.helpers import LONG, ROOT, Toys, kill, pids, until

ALL = ["tensorboard", "wandb", "trackio"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's logins and databases but the test's own; no network."""
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_PROJECT", "WANDB_ENTITY", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    return tmp_path


def held(run: Toys, home: Path) -> dict[str, sinks.Points]:
    return {
        "tensorboard": sinks.board(run.folder),
        "wandb": sinks.wandb(run.folder),
        "trackio": sinks.trackio(home / "trackio"),
    }


def loggers(run: Toys, kind: str = "--sink") -> list[int]:
    return [pid for pid in pids("--sink", str(run.folder)) if pid in pids(kind)]


def all_there_once(run: Toys, home: Path) -> None:
    """Every sink has all that the registers say, once; what a busy machine has left behind, at the next start."""
    told = -1
    while told < (late := sum("has not taken everything" in each["why"] for each in run.events("waits"))):
        if late:
            run.start(1, metrics=ALL).ends(0, LONG)
        told = late
    expected = {each.step: each.values for each in points.points(opened(run.folder), 0)}
    for kind, found in held(run, home).items():
        assert [step for step, _ in found] == [*expected], kind
        for step, values in found:
            assert values == pytest.approx(expected[step], rel=1e-5), kind
    rows = sinks.table(run.folder)
    members = points.rows(opened(run.folder), range(len(expected)))
    assert [(row["round"], row["slot"], row["loss"]) for row in rows] == [
        (str(each["round"]), each["slot"], str(each["loss"])) for each in members
    ]
    assert not loggers(run)


# -- what is logged ----------------------------------------------------------------------------------------------------


def test_each_sink_has_every_point_once(toys: Callable[..., Toys], home: Path) -> None:
    sinks.needs(*ALL)
    run = toys(metrics=ALL)
    run.start(2).ends(0)
    all_there_once(run, home)
    (step, last) = sinks.board(run.folder)[-1]
    losses = {each.id.partition("/")[2]: each.metrics["loss"] for each in opened(run.folder).round(4)}
    whole = losses.pop("average")
    assert step == 4 and last["loss/averaged"] == pytest.approx(whole)
    assert last["loss/best"] == pytest.approx(min(losses.values()))
    assert last["loss/mean"] == pytest.approx(sum(losses.values()) / 4)
    assert {key: last[key] for key in last if "loss_of" in key} == pytest.approx(
        {f"loss_of/{slot}": loss for slot, loss in losses.items()}
    )
    written = sum(file.stat().st_size for each in run.attempts() for file in each.iterdir() if "00004." in str(file))
    assert (last["members/made"], last["members/absent"], last["bytes/published"]) == (5, 0, written)


def test_what_failed_counts_as_absent(toys: Callable[..., Toys]) -> None:
    run = toys(algorithm="search", cliff=2.0)
    run.start(2).ends(0)
    found = points.points(opened(run.folder), 0)
    absent = [sum(bool(each.absent) for each in opened(run.folder).round(n)) for n in range(len(found))]
    assert [each.values["members/absent"] for each in found] == absent and sum(absent)


def test_the_elite_counts_among_its_generation_but_costs_nothing(toys: Callable[..., Toys]) -> None:
    run = toys(algorithm="rank", elitism=2)
    run.start(2).ends(0)
    (last,) = points.points(opened(run.folder), 4)[:1]
    made = [recipe for recipe in opened(run.folder).plan(4) if not recipe.carried]
    assert last.values["members/made"] == len(made)
    carried = [recipe.slot for recipe in opened(run.folder).plan(4) if recipe.carried]
    assert len(carried) == 2 and {f"loss_of/{slot}" for slot in carried} < last.values.keys()


@pytest.mark.slow
def test_pretraining_tells_loss_tokens_and_seconds(tmp_path: Path, home: Path) -> None:
    """A real training, by its own script."""
    from tests.small import KEYS, shared

    sinks.needs("tensorboard")
    keys = {**KEYS, "datasets": [{"source": str(shared() / "text.jsonl")}], "tokenizer": str(shared() / "tokenizer")}
    file = tmp_path / "evolution.json"
    file.write_text(json.dumps({**keys, "metrics": ["tensorboard"], "population_size": 2, "base_dir": "runs"}))
    words = [sys.executable, "diloco.py", "--config", str(file), "--workers", "1"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    found, history = sinks.board(tmp_path / "runs" / "diloco"), opened(tmp_path / "runs" / "diloco")
    assert [step for step, _ in found] == [0, 1, 2, 3]
    for step, values in found[1:]:
        assert values["loss/averaged"] == pytest.approx(history[f"{step}/global"].metrics["loss"])
        assert values["train_loss_of/replica-1"] == pytest.approx(history[f"{step}/replica-1"].metrics["train_loss"])
        assert values["tokens"] == 2 * 4 * 2 * 16 and values["seconds/all"] >= values["seconds/longest"] > 0


# -- what happens ------------------------------------------------------------------------------------------------------


def test_everything_is_killed_and_the_same_command_goes_on(toys: Callable[..., Toys], home: Path) -> None:
    sinks.needs(*ALL)
    run = toys(metrics=ALL, sleep=0.2, max_generations=60)
    run.start(2)
    until(lambda: all(len(each) > 1 for each in held(run, home).values()), "all sinks have something", LONG)
    there = {kind: len(each) for kind, each in held(run, home).items()}
    for pid in loggers(run):
        kill(pid)
    run.kill_all()
    assert not run.is_over() and max(there.values()) < 60
    run.start(2, sleep=0.0).ends(0, LONG)
    all_there_once(run, home)


def test_whoever_logs_is_killed_and_another_goes_on(toys: Callable[..., Toys], home: Path) -> None:
    """Only the worker is: its loggers end with it, and its successor's go on."""
    sinks.needs("tensorboard")
    run = toys(metrics=["tensorboard"], sleep=0.4, max_generations=8)
    started = run.start(2)
    until(lambda: sinks.board(run.folder), "something is logged", LONG)
    (claim,) = run.folder.glob("metrics/tensorboard.*.claim")
    kill(run.alive()[json.loads(claim.read_text().splitlines()[0])["by"]])
    started.ends(0, LONG)
    assert [step for step, _ in sinks.board(run.folder)] == [*range(9)]
    assert len([*run.folder.glob("metrics/tensorboard.*.claim")]) > 1 and not loggers(run)


@pytest.mark.slow
def test_whoever_stood_still_for_too_long_does_not_log_any_more(toys: Callable[..., Toys], home: Path) -> None:
    sinks.needs("tensorboard")
    run = toys(metrics=["tensorboard"], sleep=1.0, max_generations=12, dead_seconds=1.0).prepare()
    first = run.worker("first")
    (logger,) = until(lambda: sinks.board(run.folder) and loggers(run, "tensorboard"), "it logs", LONG)
    os.kill(logger, signal.SIGSTOP)
    first.freeze()
    second = run.worker("second")
    until(lambda: (run.folder / "metrics" / "tensorboard.00001.claim").exists(), "another one logs", LONG)
    other = until(lambda: [pid for pid in loggers(run, "tensorboard") if pid != logger], "its logger", LONG)
    os.kill(logger, signal.SIGCONT)
    first.thaw()
    until(lambda: logger not in loggers(run), "the first one has seen it", LONG)
    assert other == loggers(run, "tensorboard")
    assert (first.end(), second.end()) == (0, 0)
    assert [step for step, _ in sinks.board(run.folder)] == [*range(13)]


def test_what_a_sink_lacks_at_the_end_the_same_command_brings(toys: Callable[..., Toys], home: Path) -> None:
    """A run that is over, and a sink that is named only then."""
    sinks.needs(*ALL)
    run = toys()
    run.start(1).ends(0)
    assert not (run.folder / "tensorboard").exists()
    for _ in range(2):
        ended = run.start(1, metrics=ALL)
        ended.ends(0)
        assert "over already" in ended.said
        all_there_once(run, home)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server of Weights & Biases that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_MODE", "online")
        yield


@pytest.mark.slow
def test_a_server_that_never_answers_stops_nobody(toys: Callable[..., Toys], home: Path, deaf: None) -> None:
    """The run is over as soon as it would be without; the sinks beside it have everything; the status says so."""
    sinks.needs("wandb", "tensorboard")
    run = toys(metrics=["wandb", "tensorboard"])
    run.start(2).ends(0)
    assert [step for step, _ in sinks.board(run.folder)] == [*range(5)]
    made = run.events("over")
    assert len(made) == 2 and max(each["at"] for each in made) - run.events("started")[0]["at"] < 10
    assert any("wandb has not taken everything" in each["why"] for each in run.events("waits"))
    assert not loggers(run)


# -- before it starts --------------------------------------------------------------------------------------------------


def test_a_package_that_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"^metrics for trackio need .* -m pip install trackio$"):
        real.check(["csv", "trackio"])
    assert real.lacking(["csv", "trackio"]) == ["trackio"]


def test_without_a_key_nothing_is_begun(toys: Callable[..., Toys], home: Path, monkeypatch: Any) -> None:
    sinks.needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "online")
    run = toys(metrics=["wandb"])
    ended = run.start(1)
    ended.ends(2)
    assert "no key here: wandb login, or WANDB_MODE=offline" in ended.said and not run.folder.exists()


def test_an_unknown_sink_is_refused(toys: Callable[..., Toys]) -> None:
    run = toys()
    run.keys["metrics"] = ["mlflow"]
    ended = run.start(1)
    ended.ends(2)
    assert 'METRICS is ["mlflow"]: a list of items, each "csv" or "tensorboard" or "wandb" or "trackio"' in ended.said


# -- sinks by themselves -----------------------------------------------------------------------------------------------


def test_a_table_takes_new_columns_and_forgets_what_comes_again(tmp_path: Path) -> None:
    table = CsvTable(LoggedRun(tmp_path, "p", "n", "i"))
    table.write([Point(1, {"loss": 3.0})])
    table.write([Point(2, {"loss": 2.0}), Point(3, {"loss": 1.0, "lr": 0.5})])
    table.close()
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,lr\n1,3.0,\n2,2.0,\n3,1.0,0.5\n"
    again = CsvTable(LoggedRun(tmp_path, "p", "n", "i", after=2))
    assert again.upto == 2 and (tmp_path / "metrics.csv").read_text() == "step,loss,lr\n1,3.0,\n2,2.0,\n"
    again.write([Point(3, {"loss": 0.5})])
    again.close()
    assert [row["loss"] for row in sinks.table(tmp_path)] == ["3.0", "2.0", "0.5"]


def test_tensorboard_forgets_what_comes_again(tmp_path: Path) -> None:
    """As a training that goes back to a checkpoint logs, and as TensorBoard shows it."""
    sinks.needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after, losses in ((-1, {1: 3.0, 2: 2.0, 3: 1.0}), (2, {3: 0.5, 4: 0.25})):
        board = Board(LoggedRun(tmp_path, "p", "n", "i", after=after))
        board.write([Point(step, {"loss": loss}) for step, loss in losses.items()])
        board.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(each.step, each.value) for each in shown.Scalars("loss")] == [(1, 3.0), (2, 2.0), (3, 0.5), (4, 0.25)]


def test_a_training_that_goes_back_logs_to_trackio_what_is_new(tmp_path: Path, home: Path) -> None:
    """train_fsdp, which has no registers, after a crash: from its checkpoint on, under the same name."""
    sinks.needs("trackio")
    program = "import sys; from pathlib import Path; from train.cluster.logs import log_of\n"
    program += "log = log_of('trackio', Path(sys.argv[1]), 'mine', int(sys.argv[2]))\n"
    program += "[log.write(step, {'loss': 1 / step}) for step in range(int(sys.argv[2]) + 1, 5)]; log.close()"
    for begin in (0, 2):
        subprocess.run([sys.executable, "-c", program, str(tmp_path), str(begin)], cwd=ROOT, check=True, timeout=LONG)
    assert sinks.trackio(home / "trackio") == [(step, {"loss": 1 / step}) for step in range(1, 5)]

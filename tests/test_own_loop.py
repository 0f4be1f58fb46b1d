"""A user's own loop as the maker of members: the same bytes however many processes train, and whatever they train."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fleet.digest import digest
from fleet.history import opened
from tests.helpers import ROOT, one_of
from tests.own_loops import MODELS, noised, started, train
from train.own_loop.loop_export import exported


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for runs in this process."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path


def the_digest(folder: Path) -> str:
    history = opened(folder)
    assert history.over
    return digest(history)


ALGORITHMS: list[dict[str, Any]] = [
    {"algorithm": "diloco"},
    {"algorithm": "edt", "population_size": 4},
    {"algorithm": "edt", "population_size": 3, "group_size": 3, "outer_momentum": 0.5},
    {"algorithm": "diloco", "overlap": 1, "inner_optimizer_state": "reset", "wire_dtype": "int8",
     "error_feedback": True},
    {"algorithm": "edt", "selection": "rank", "population_size": 4, "elitism": 1, "genes": {"lr": 0.01}, "lr_spread": 4,
     "mutation_probability": 0.5, "crossover": "slerp"},
]  # fmt: skip


@pytest.mark.parametrize("keys", one_of(ALGORITHMS, ALGORITHMS[:1]), ids=str)
def test_a_run_that_is_left_and_gone_on_with_has_the_bytes_of_one_that_is_not(alone, keys):
    """In the middle of rounds, and of data loaders: each time another model, in its first state, goes on."""
    train("norm", alone / "calm", **keys)
    sessions = 1
    while not train("norm", alone / "hurried", only=7, **keys)[1]:
        sessions += 1
    assert sessions > 2
    assert the_digest(alone / "hurried") == the_digest(alone / "calm")


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """Of a model; skipped where its optimizer's package is missing."""
    if request.param == "free":
        pytest.importorskip("schedulefree", reason="schedulefree is missing (requirements-dev.txt)")
    return str(request.param)


@pytest.mark.parametrize("kind", one_of(MODELS, ["muon", "tied", "free"]), indirect=True)
def test_any_model_with_any_optimizer(alone, kind):
    keys = {"inner_optimizer_state": "narrow", "max_generations": 3}
    model, _ = train(kind, alone / "calm", **keys)
    assert not train(kind, alone / "hurried", only=12, **keys)[1]
    again, _ = train(kind, alone / "hurried", **keys)
    assert the_digest(alone / "hurried") == the_digest(alone / "calm")
    for name, one in model.state_dict().items():  # what the run has come to, in whatever process
        assert torch.equal(one, again.state_dict()[name]) or name == "gone", name


@pytest.mark.parametrize("kind", one_of(["muon", "free"], ["free"]), indirect=True)
@pytest.mark.parametrize("algorithm", one_of(["diloco", "edt"], ["diloco"]))
def test_two_processes_of_which_one_is_killed_with_any_optimizer(alone, kind, algorithm):
    keys = {"algorithm": algorithm, "max_generations": 3, "dead_seconds": 2.0, "script_digest": "one"}
    calm, _ = train(kind, alone / "calm", **keys)
    other = started(kind, alone / "both", **keys, together=True, after="die")
    model, _ = train(kind, alone / "both", **keys, together=True)
    other.ends(-signal.SIGKILL)
    assert the_digest(alone / "both") == the_digest(alone / "calm")
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in calm.state_dict().items())


@pytest.mark.parametrize("kind", ["free"], indirect=True)
def test_an_optimizer_of_two_modes_leaves_the_weights_to_be_looked_at_and_an_export_has_those_it_trains(
    alone, kind, capsys
):
    model, _ = train(kind, alone / "run", max_generations=1)
    exported(alone / "run", "average", alone / "out")
    assert "Note: these are the weights that AdamWScheduleFree trains" in capsys.readouterr().out
    trained = load_file(alone / "out/model.safetensors")
    assert not any(torch.equal(one, trained[name]) for name, one in model.state_dict().items())
    loss = opened(alone / "run")["1/global"].metrics["loss"]
    batch = torch.linspace(0, 1, 96).view(8, 12)
    torch.manual_seed(1)  # the SEED of runs
    assert noised(model, batch).item() == pytest.approx(loss, rel=1e-6)  # it was evaluated so


BY_FITNESS: dict[str, Any] = {
    "algorithm": "edt", "selection": "rank", "population_size": 4, "group_size": 2, "elitism": 1, "max_generations": 3,
    "genes": {"lr": 0.01}, "lr_spread": 4, "after": "third", "script_digest": "one",
}  # fmt: skip


def test_what_is_reported_as_fitness_decides_who_survives_and_whose_genome_goes_on(alone):
    """The third slot is to be the fittest, whatever its loss; with one process and with two."""
    train("plain", alone / "one", **BY_FITNESS)
    history = opened(alone / "one")
    for round in (1, 2):
        there = {f"{round}/m{k}": history[f"{round}/m{k}"].metrics for k in range(4)}
        fittest = max(there, key=lambda id: there[id]["fitness"])
        assert fittest != min(there, key=lambda id: there[id]["loss"])
        elite, *children = [each for each in history.plan(round + 1) if each.slot.startswith("m")]
        assert elite.parents == (fittest,)
        for child in children:
            best = max(child.parents, key=lambda id: there[id]["fitness"])
            assert history[f"{round + 1}/{child.slot}"].metrics["genome_lr"] == there[best]["genome_lr"]
    other = started("plain", alone / "two", **BY_FITNESS, together=True)
    train("plain", alone / "two", **BY_FITNESS, together=True)
    other.ends()
    assert the_digest(alone / "two") == the_digest(alone / "one")


@pytest.mark.slow
def test_two_ranks_that_share_a_model(alone):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, "-m", "tests.own_loops", str(alone)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for wrap in ("ddp", "fsdp"):
        assert the_digest(alone / f"{wrap}-hurried") == the_digest(alone / f"{wrap}-calm")

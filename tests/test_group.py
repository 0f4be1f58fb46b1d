"""A worker that is a group of processes: what it makes, and what becomes of it when one of them dies."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet import gpus
from fleet.digest import digest
from fleet.history import History, opened
from fleet.machines import load, said_of_run
from fleet.run_config import UserError
from tests.commands import answer, refused
from tests.helpers import LONG, ROOT, kill, until
from tests.lab.machines import Lab, why_not
from tests.small import finished, launched, run_digest, whole

TWO = {"devices_per_worker": 2, "max_generations": 2, "batch_size": 4}


def losses(history: History) -> list[float]:
    members = [member for round in range(history.first_open) for member in history.round(round)]
    return [each.metrics[key] for each in members for key in ("loss", "train_loss") if key in each.metrics]


def others(run) -> list[int]:
    """The processes beside the first one of each group."""
    found = []
    for pid in run.alive().values():
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in children.read_text().split() if children.exists() else []:
            if b"train.cluster.process_group" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


@pytest.mark.parametrize(
    "strategy, algorithm, more",
    [
        ("FULL_SHARD", "edt", {"eval_sequences": 5, "mutation_probability": 0.5}),
        pytest.param("SHARD_GRAD_OP", "edt", {"crossover": "slerp"}, marks=pytest.mark.slow),
        pytest.param("NO_SHARD", "diloco", {"gradient_accumulation": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_group_makes_what_one_process_makes_within_rounding(pretraining, strategy, algorithm, more, tmp_path):
    alone = finished(tmp_path / "alone", **{**TWO, **more, "devices_per_worker": 1, "algorithm": algorithm})
    run = pretraining(f"{algorithm}_sim.py", **TWO, **more, sharding_strategy=strategy)
    assert whole(run) != digest(alone)
    found = losses(opened(run.folder))
    assert len(found) >= 10 and found == pytest.approx(losses(alone), rel=1e-4)


@pytest.mark.slow
def test_a_group_is_stopped_and_goes_on_and_loses_one_of_its_processes(pretraining):
    """Ctrl-C in the middle, then a rank that is killed: the bytes are those of two calm groups."""
    short = {**TWO, "max_generations": 1, "inner_steps": 12}
    wanted = whole(pretraining(**short), 2)
    run = pretraining(**short, snapshot_minutes=0.001)
    first = run.start(1)
    until(lambda: others(run), "a group is there", LONG)
    first.send(signal.SIGINT)
    first.ends(130, LONG)
    second = run.start(1)
    (rank,) = until(lambda: others(run), "a group is there again", LONG)
    kill(rank)
    second.ends(0, LONG)
    assert "ended with code 1; another takes its place" in second.said
    said = "".join(each.read_text() for each in run.folder.glob("workers/*.log"))
    assert "rank 1 of this worker ended with code -9, and the worker with it" in said
    assert run_digest(run) == wanted


# A group in a process of its own, whose leader alone runs out of memory in the middle of a step.
LEADER = """
import json, sys, time
import torch
from tests.small import MODEL, config
from train.cluster.process_group import Leader
from train.learner import Learner
from train.model import built, described, empty
from train.optimizers import WEIGHTS

def trained(learner):
    learner.load_weights(start)
    learner.reset_optimizer()
    for _ in learner.train([[windows]] * 2, [1e-2] * 2):
        pass
    return learner.buffer(WEIGHTS).clone()

c = config(devices_per_worker=2, batch_size=4, sharding_strategy="FULL_SHARD")
shape = described(MODEL)
shape.vocab_size = 258
alone = Learner(empty(shape, 1), config(batch_size=4))
start, windows = alone.vector.clone(), torch.randint(0, 258, (4, 17), generator=torch.Generator().manual_seed(1))
group = Leader(shape.to_json_string(use_diff=False).encode(), c)
others = [each._process for each in group._others]

def hungry(*parts):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

group._mine.learner.loss = hungry
began, said = time.monotonic(), ""
try:
    trained(group)
except torch.OutOfMemoryError as error:
    said = str(error)
seconds, ended = time.monotonic() - began, [each.poll() for each in others]
away = float((trained(group) - trained(alone)).abs().max())
print(json.dumps({"said": said, "seconds": seconds, "ended": ended, "away": away}))
"""


def test_where_the_leader_alone_runs_out_of_memory_nobody_waits_and_the_next_recipe_has_a_group():
    words = [sys.executable, "-c", LEADER]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["said"].startswith("CUDA out of memory") and found["seconds"] < 20 and found["ended"] == [-9]
    assert found["away"] < 1e-4


def test_a_group_ends_with_its_first_process(pretraining):
    run = pretraining(**TWO, inner_steps=100_000, max_epochs=1e6)
    launched(run)
    run.worker("w")
    (rank,) = until(lambda: others(run), "a group is there", LONG)
    stat = Path(f"/proc/{rank}/stat")
    for each in run.started:
        kill(each.process.pid)
    for pid in run.alive().values():
        kill(pid)
    until(lambda: not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX", "nobody is left", LONG)


@pytest.mark.parametrize(
    "keys, why",
    [
        ({"batch_size": 3}, "BATCH_SIZE is 3: with DEVICES_PER_WORKER 2 it must be a multiple of that, such as 4"),
        ({"sharding_strategy": "HYBRID_SHARD"}, 'SHARDING_STRATEGY is "HYBRID_SHARD": "NO_SHARD" or "FULL_SHARD" or'),
    ],
)
def test_what_a_group_cannot_be(tmp_path, keys, why):
    assert why in refused(tmp_path, **{**TWO, **keys})


def test_machines_say_the_same_of_a_run(tmp_path):
    def said(*entries: object) -> dict[str, object]:
        file = tmp_path / "machines.json"
        file.write_text(json.dumps(entries))
        return said_of_run(load(file))

    assert said("a", "b") == {}
    two = {"devices_per_worker": 2, "sharding_strategy": "NO_SHARD"}
    assert said({"host": "a", **two}, {"host": "b", **two}) == two
    with pytest.raises(UserError, match="devices_per_worker must be the same for all machines.*2 for a, nothing for b"):
        said({"host": "a", "devices_per_worker": 2}, "b")
    with pytest.raises(UserError, match="devices_per_worker is 0: a whole number from 1 to 1024 is expected"):
        said({"host": "a", "devices_per_worker": 0})


def test_other_methods_have_no_groups(tmp_path):
    words = ["edt.py", "--algorithm", "edt-evomerge", "--config", "configs/posttrain.json", "--make"]
    also = ["--also", json.dumps({"devices_per_worker": 2})]
    why = "machines.json: devices_per_worker says nothing to edt-evomerge, only to methods that pre-train\n"
    assert answer(*words, *also) == (2, "", why)


def test_local_groups_share_out_the_gpus(monkeypatch):
    for number, mine in enumerate(("4,5", "6,7", "4,5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        gpus.choose(f"local-{number}-0123abcd", 2)
        assert gpus.visible() == mine.split(",")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    gpus.choose("somebody")  # who was started by hand
    assert gpus.visible() == ["4", "5"]


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}")
def test_on_machines_groups_make_the_same_bytes(pretraining, tmp_path, monkeypatch):
    """machines.json alone says that workers are groups."""
    keys = {"max_generations": 1, "batch_size": 4}
    wanted = whole(pretraining(**keys, devices_per_worker=2, sharding_strategy="NO_SHARD"), 1)
    with Lab(tmp_path / "lab") as lab:
        monkeypatch.setenv("XDG_STATE_HOME", str(lab.folder / "state"))
        run = pretraining(**keys)
        about = {"python": sys.executable, "devices_per_worker": 2, "sharding_strategy": "NO_SHARD"}
        machines, mine = lab.shared / "machines.json", lab.shared / "evolution.json"
        machines.write_text(json.dumps([{"host": each.name, **about} for each in lab]))
        mine.write_text(json.dumps({"algorithm": "edt", "project_name": "toy", **run.keys}))
        run.place = lab.shared
        command = [sys.executable, "launch_to_machines.py", "--config", mine, "--machines", machines]
        words = [*map(str, command), f"--ssh-config={lab.ssh_config}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0 and "The run is over" in done.stdout, done.stdout + done.stderr
        assert run_digest(run) == wanted

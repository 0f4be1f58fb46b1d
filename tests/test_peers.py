"""Clusters that meet over Hivemind: the same numbers, lost and returning peers, strangers. Slow."""

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from merge.outer_step import OuterOptimizer
from tests.helpers import until
from tests.small import finished, shared
from tests.test_fsdp import KEYS, ROOT, model
from train.batches import batch, owned
from train.learner import Learner, rate
from train.model import built
from train.pretraining_export import Exporter

pytestmark = pytest.mark.slow
SCRIPT = str(ROOT / "train" / "train_fsdp.py")
DHT = str(Path(sys.executable).with_name("hivemind-dht"))
Start = Callable[..., "Peer"]


class Peer:
    def __init__(self, folder: Path, name: str, words: list[str], ranks: int) -> None:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*(run if ranks > 1 else [sys.executable]), SCRIPT, *words, "--ckpt.path", str(folder / name)]
        self.out, self.log = folder / name, folder / f"{name}.log"
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)

    def ends(self, code: int = 0, seconds: float = 240) -> str:
        assert self.process.wait(seconds) == code, self.log.read_text()
        return self.log.read_text()

    def rows(self) -> list[dict[str, str]]:
        if not (self.out / "metrics.csv").is_file():
            return []
        with (self.out / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def met(self) -> list[tuple[int, int]]:
        """After which outer step it was with how many."""
        return [(int(float(row["outer_round"])), int(float(row["peers"]))) for row in self.rows() if row.get("peers")]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.out / "model" / "model.safetensors")


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts peers that meet at a table of their own; afterwards none of their processes is left."""
    model(tmp_path / "model")
    log = (tmp_path / "dht.log").open("w")
    table = subprocess.Popen(
        [DHT, "--host_maddrs", "/ip4/127.0.0.1/tcp/0"], stdout=log, stderr=log, start_new_session=True
    )
    where = until(
        lambda: re.search(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+", (tmp_path / "dht.log").read_text()), "a table", 60
    )
    made: list[Peer] = []

    def begin(number: int, of: int, ranks: int = 1, name: str = "", **changed: Any) -> Peer:
        keys = {**KEYS, "path_model": tmp_path / "model", "dataset_name_or_path": shared() / "text.jsonl"}
        keys |= {"hv.initial_peers": where[0], "hv.host_maddrs": "/ip4/127.0.0.1/tcp/0", "hv.galaxy_size": of}
        keys |= {"hv.world_rank": number, "hv.local_steps": 4, "hv.matchmaking_time": 3, "hv.averaging_timeout": 20}
        keys |= {"hv.timeout_waiting_for_peers": 90, **changed}
        keys.pop("torch_compile")
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        made.append(Peer(tmp_path, name or f"p{number}", ["--no-torch-compile", *words], ranks))
        return made[-1]

    yield begin
    for process in (*(each.process for each in made), table):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def diloco(run: Path) -> dict[str, torch.Tensor]:
    """As its authors wrote it down, each replica with an optimizer of its own, on the text of a run."""
    exporter = Exporter(run)
    c, (_, weights) = exporter.config, exporter.chosen("0-init-0")
    momentum, outer, sources = torch.zeros_like(weights), OuterOptimizer(), exporter.token_files("train")
    replicas = [Learner(built(c.initial_population[0], 258, 1), c) for _ in range(c.population_size)]
    for round in range(1, c.max_generations + 1):
        steps, changes = range(c.steps_before(round), c.steps_before(round + 1)), []
        for slot, replica in enumerate(replicas):
            replica.load_weights(weights)
            numbers = (owned(c, slot, round, n, 0) for n in range(len(steps)))
            [*replica.train(([batch(sources, [1.0], each, c.seed)] for each in numbers), (rate(c, n) for n in steps))]
            changes.append(weights - replica.vector)
        weights, momentum = outer.step((weights, momentum), torch.stack(changes).mean(0))
    return exporter.layout.views(weights)


STEP = re.compile(
    r"outer step (\d+), (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) UTC: met (.+); took ([\d.]+) s, ([\d.]+) s of them "
    r"waiting for others; drift ([\d.e-]+) %"
)


def test_two_peers_do_what_diloco_does_and_say_so_step_by_step(start, tmp_path):
    peers = [
        start(n, 2, total_steps=16, per_device_train_batch_size=4, **{"hv.hivemind_compression": "none"})
        for n in (0, 1)
    ]
    for each, other in zip(peers, ("peer-1", "peer-0"), strict=True):
        said = STEP.findall(each.ends())
        assert [(number, whom) for number, _, whom, *_ in said] == [(str(step), other) for step in range(1, 5)]
        rows = [row for row in each.rows() if row["outer_round"]]
        for (_, _, _, took, waited, drift), row in zip(said, rows, strict=True):
            assert float(row[f"met/{other}"]) == 1.0
            assert 0 <= float(row["waited_seconds"]) < float(row["exchange_seconds"])
            assert (took, waited) == (f"{float(row['exchange_seconds']):.1f}", f"{float(row['waited_seconds']):.1f}")
            assert 0 < float(row["drift"]) < 1
            assert drift == f"{100 * float(row['drift']):.3g}"
    drifts = [[float(row["drift"]) for row in each.rows() if row["drift"]] for each in peers]
    assert drifts[0] == pytest.approx(drifts[1], rel=1e-4)  # of two, each is as far from the middle as the other
    assert peers[0].met() == [(1, 2), (2, 2), (3, 2), (4, 2)]
    assert apart(peers[0].weights, peers[1].weights) == 0.0
    keys = {"algorithm": "diloco", "population_size": 2, "max_generations": 4, "inner_steps": 4}
    keys |= {"first_inner_steps": 4, "inner_optimizer": "adamw", "clip": 1.0, "lr_schedule": "cosine"}
    more = {"batch_size": 4, "seq_length": 16, "lr": 1e-2, "warmup_steps": 2, "max_epochs": 1e6}
    finished(tmp_path, **keys, **more, initial_population=(str(tmp_path / "model"),))
    assert apart(peers[0].weights, diloco(tmp_path / "run")) < 1e-4


def test_with_parts_on_two_ranks_each_part_meets_its_like(start):
    keys = {"sharding_strategy": "FULL_SHARD", "per_device_train_batch_size": 2, "total_steps": 8}
    peers = [start(n, 2, ranks=2, **keys, **{"hv.hivemind_compression": "none"}) for n in (0, 1)]
    whole = [start(n, 2, name=f"w{n}", **{"hv.hivemind_compression": "none", "hv.run": "whole"}) for n in (0, 1)]
    for each in (*peers, *whole):
        each.ends()
    assert apart(peers[0].weights, peers[1].weights) == 0.0
    assert apart(peers[0].weights, whole[0].weights) < 1e-3
    parts, all_of_it = ([float(row["drift"]) for row in each.rows() if row["drift"]] for each in (peers[0], whole[0]))
    assert parts == pytest.approx(all_of_it, rel=0.05)


@pytest.mark.parametrize("every", [0, 10])
def test_peers_do_not_drift_apart(start, every):
    keys = {"total_steps": 20, "hv.local_steps": 1, "hv.average_state_every": every}
    peers = [start(n, 2, **keys) for n in (0, 1)]
    for each in peers:
        each.ends()
    assert peers[0].met()[-1] == (20, 2)
    found = apart(peers[0].weights, peers[1].weights)
    print(f"an exchange every {every}: {found:.2g} apart after 20 outer steps")
    assert found == 0.0 if every else 0 < found < 0.05


def test_a_killed_peer_is_missed_for_a_while_and_comes_back(start, tmp_path):
    keys = {"total_steps": 400, "ckpt.interval": 4, "ckpt.topk": 2}
    peers = [start(n, 3, **keys) for n in range(3)]
    until(lambda: (2, 3) in peers[0].met(), "three have met twice", 120)
    os.killpg(peers[2].process.pid, signal.SIGKILL)
    until(lambda: any(count == 2 for _, count in peers[0].met()), "the other two go on", 60)
    back = start(2, 3, **keys, **{"ckpt.resume": "true"})
    until(lambda: peers[0].met()[-1][1] == 3, "it is among them again", 120)
    for each in (peers[0], peers[1], back):
        each.ends()
    assert "took the state of peer-" in back.log.read_text()
    assert apart(peers[0].weights, back.weights) == 0.0 == apart(peers[0].weights, peers[1].weights)


def test_who_trains_something_else_is_refused_by_name(start):
    first = start(0, 2)
    until(lambda: "step 0 of" in first.log.read_text(), "it is there", 60)
    said = start(1, 2, **{"hv.local_steps": 2}).ends(2)
    assert "peer peer-0 trains something else: local_steps is 4 there, 2 here" in said


def test_a_meeting_point_that_is_not_there_is_named(start):
    nowhere = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWBsqy9uXqSkqRc5pLDQsBwVA5SUW6KACFnT68jiiskvoL"
    said = start(0, 2, **{"hv.initial_peers": nowhere}).ends(2)
    assert f"the meeting point ({nowhere}) cannot be reached" in said


def test_a_peer_that_is_left_alone_keeps_what_it_has_learned(start):
    keys = {"total_steps": 40, "hv.timeout_waiting_for_peers": 12, "ckpt.resume": "true"}
    peers = [start(n, 2, **keys) for n in (0, 1)]
    until(lambda: (2, 2) in peers[0].met(), "they have met twice", 120)
    os.killpg(peers[1].process.pid, signal.SIGKILL)
    said = peers[0].ends(2)
    assert "no other peer came within 12 s" in said and "Traceback" not in said
    (kept,) = peers[0].out.glob("step-*")
    again = [start(n, 2, **keys) for n in (0, 1)]
    for each in again:
        each.ends()
    assert f"going on from {kept}" in again[0].log.read_text() and again[0].met()[-1] == (10, 2)
    assert apart(again[0].weights, again[1].weights) == 0.0


def test_each_peer_has_a_number_of_its_own(start):
    twins = [start(0, 2, name=name) for name in ("one", "other")]
    until(lambda: any(each.process.poll() is not None for each in twins), "one of them gives up", 90)
    said = next(each for each in twins if each.process.poll() is not None).ends(2)
    assert "another process calls itself peer-0, too: each peer needs its own --hv.world-rank" in said


def test_peers_begin_with_the_weights_of_the_first(start, tmp_path):
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    config = AutoConfig.from_pretrained(tmp_path / "other")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    keys = {"total_steps": 8, "hv.average_state_every": 0, "hv.hivemind_compression": "none"}
    peers = [start(0, 2, **keys), start(1, 2, **keys, path_model=tmp_path / "other")]
    for each in peers:
        each.ends()
    assert "other weights than those of peer-0: takes them" in peers[1].log.read_text()
    assert apart(peers[0].weights, peers[1].weights) < 1e-6


def test_a_peer_that_waits_can_be_stopped(start):
    alone = start(0, 2)
    until(lambda: "waiting for 2 peers" in alone.log.read_text(), "it waits", 60)
    alone.process.send_signal(signal.SIGINT)
    assert alone.process.wait(30) in (130, 2)
    assert "Traceback" not in alone.log.read_text()

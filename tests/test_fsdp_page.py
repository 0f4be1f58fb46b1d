"""Every command of docs/train_fsdp.md, as it stands there but for sizes, paths and devices. Slow."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import until
from tests.lab.machines import Lab, why_not
from tests.small import shared
from tests.test_fsdp import ROOT, curve, model

PAGE = (ROOT / "docs" / "train_fsdp.md").read_text()
ALL, FIRST, SPEED, COMPILED, CHOSEN, NODES, MEETING, TWO, THREE = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
SMALL = {
    "--path-model": "MODEL", "--dataset-name-or-path": "TEXT", "--seq-length": "16", "--total-batch-size": "4",
    "--per-device-train-batch-size": "1", "--warmup-steps": "2", "--total-steps": "8", "--precision": "32-true",
    "--ckpt.interval": "4", "--hv.local-steps": "4", "--nproc-per-node": "2", "--hv.matchmaking-time": "3",
}  # fmt: skip
needs_machines = pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}")


def small(block: str, place: Path) -> str:
    """The command for two processors: options that make it small take the place of the page's, or are added."""
    given = dict(SMALL)
    for option, value in SMALL.items():
        block, found = re.subn(rf"{option} [^\s\\]+", f"{option} {value}", block)
        if found or option == "--nproc-per-node" or ("--hv." in option and "--hv." not in block):
            del given[option]
    more = {**given, **({} if "--torch-compile" in block else {"--no-torch-compile": ""})}
    added = " ".join(f"{option} {value}" for option, value in more.items())
    block = re.sub(r"CUDA_VISIBLE_DEVICES=\S+", "CUDA_VISIBLE_DEVICES=", block)
    block = block.replace("train_fsdp.py", f"train_fsdp.py {added}", 1).replace("/disk", str(place))
    return block.replace("MODEL", str(place / "model")).replace("TEXT", str(place / "text.jsonl"))


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}


def run(command: str, seconds: float = 300) -> str:
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True,
                          timeout=seconds)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def prepared(place: Path) -> Path:
    model(place / "model")
    (place / "text.jsonl").write_bytes((shared() / "text.jsonl").read_bytes())
    return place


def is_a_model(folder: Path) -> bool:
    return bool(load_file(folder / "model" / "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("block", [ALL, COMPILED, CHOSEN], ids=["all", "compiled", "chosen"])
def test_on_one_machine(block, tmp_path):
    said = run(small(block, prepared(tmp_path)))
    assert "on each of 2 ranks" in said and is_a_model(tmp_path / "run")


@pytest.mark.slow
def test_the_first_one_learns_visibly(tmp_path):
    run(FIRST.replace("runs/first", str(tmp_path / "first")))
    losses = curve(tmp_path / "first")
    assert len(losses) == 50 and losses[-1] < losses[0] - 1 and is_a_model(tmp_path / "first")


@pytest.mark.slow
def test_its_speed_is_measured_as_often_as_one_likes(tmp_path):
    for _ in range(2):
        said = run(SPEED.replace("runs/speed", str(tmp_path / "speed")))
        assert "step 5: loss" in said and "tokens/s" in said
    assert sum(file.stat().st_size for file in (tmp_path / "speed").iterdir()) < 10_000


@pytest.mark.slow
@needs_machines
def test_on_two_machines(tmp_path):
    with Lab(tmp_path / "lab") as lab, ThreadPoolExecutor() as both:
        (lab.shared / "page").mkdir()
        place = prepared(lab.shared / "page")
        command = small(NODES, place).replace("first:29400", f"{lab['h1'].address}:29400")
        words = ["env", f"PATH={environment()['PATH']}", "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=eth0"]
        shell = [*words, "bash", "-c", f"cd {ROOT} && {command}"]
        said = [*both.map(lambda name: lab[name].run(*shell, timeout=300), ("h1", "h2"))]
        assert [each.returncode for each in said] == [0, 0], said
        assert is_a_model(place / "run")


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[str]:
    """The page's meeting point, and the address that it prints."""
    command = MEETING.replace("/ip4/0.0.0.0/tcp/30001", "/ip4/127.0.0.1/tcp/0")
    with (tmp_path / "dht").open("w") as said:
        process = subprocess.Popen(
            ["bash", "-c", command], env=environment(), stdout=said, stderr=said, start_new_session=True
        )
        found = until(lambda: re.search(r"/ip4/\S+/tcp/\d+/p2p/\w+", (tmp_path / "dht").read_text()), "it is up", 60)
        yield found[0]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_two_peers_on_one_machine(meeting, tmp_path):
    said = run(small(TWO, prepared(tmp_path)).replace("ADDRESS", meeting))
    assert "taking step 1" in said
    assert said.count("step 0 of 8") == 2 and is_a_model(tmp_path / "peer0") and is_a_model(tmp_path / "peer1")


@pytest.mark.slow
def test_three_peers_of_several_ranks(meeting, tmp_path):
    """Each peer's ranks talk among themselves, and each has the others' changes."""
    block = small(THREE, prepared(tmp_path)).replace("ADDRESS", meeting)
    peers = [block.replace("peer0", f"peer{n}").replace("world-rank 0", f"world-rank {n}") for n in range(3)]
    with ThreadPoolExecutor() as three:
        assert all("step 0 of 8" in said for said in three.map(run, peers))
    first, *others = (load_file(tmp_path / f"peer{n}" / "model" / "model.safetensors") for n in range(3))
    assert all((first[name] == other[name]).all() for other in others for name in first)


def test_every_option_of_the_pages_commands_is_one():
    known = set(re.findall(r"^\| `(--[a-z.-]+)`", PAGE, re.M))
    for block in (ALL, FIRST, SPEED, COMPILED, CHOSEN, NODES, TWO, THREE):
        given = re.findall(r"(--[a-z][a-z.-]+)", block.partition("train_fsdp.py")[2])
        assert {option if option in known else option.replace("--no-", "--") for option in given} <= known

"""The commands of docs/train_fsdp.md, small and on CPUs: signals, kills, compiled layers, two machines. Slow."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import pids, until
from tests.lab.machines import Lab, why_not
from tests.small import shared
from tests.test_fsdp import KEYS, ROOT, curve, digest, model

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def words(place: Path, out: str, **changed) -> list[str]:
    keys = {**KEYS, "path_model": place / "model", "dataset_name_or_path": shared() / "text.jsonl"}
    keys |= {"ckpt.path": place / out, **changed}
    compiled = keys.pop("torch_compile")
    found = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return [str(ROOT / "train" / "train_fsdp.py"), "--torch-compile" if compiled else "--no-torch-compile", *found]


def ranks(place: Path, out: str, count: int = 2, **changed) -> list[str]:
    return [*TORCHRUN, "--standalone", "--nproc-per-node", str(count), *words(place, out, **changed)]


def done(command: list[str], seconds: float = 240) -> str:
    found = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=seconds)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    model(tmp_path / "model")
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What sixty steps make that nobody disturbs."""
    place = tmp_path_factory.mktemp("undisturbed")
    model(place / "model")
    done(ranks(place, "whole", total_steps=60, sharding_strategy="FULL_SHARD"))
    return place / "whole"


def test_compiled_layers_learn_the_same(place):
    done(ranks(place, "plain", sharding_strategy="FULL_SHARD"))
    done(ranks(place, "compiled", sharding_strategy="FULL_SHARD", torch_compile=True))
    assert curve(place / "compiled") == pytest.approx(curve(place / "plain"), abs=1e-3)
    assert {*load_file(place / "compiled" / "model" / "model.safetensors")} == {
        *load_file(place / "plain" / "model" / "model.safetensors")
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_with_a_checkpoint_and_the_same_command_goes_on(place, number, whole):
    keys = {"total_steps": 60, "sharding_strategy": "FULL_SHARD"}
    command = ranks(place, "stopped", **keys, **{"ckpt.resume": "true", "log_activations_steps": 1})
    first = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    table = place / "stopped" / "metrics.csv"
    until(lambda: table.is_file() and len(table.read_text().splitlines()) > 5, "some steps", 60)
    first.send_signal(number)
    said, _ = first.communicate(timeout=60)
    step = re.search(r"stopped at step (\d+)", said)
    assert step and [each.name for each in (place / "stopped").glob("step-*")] == [f"step-{int(step[1]):08d}"], said
    assert not pids("--log_activations_steps", str(place / "stopped"))
    done(command)
    assert curve(place / "stopped") == curve(whole)
    assert digest(place / "stopped") == digest(whole)
    assert "activations/layer0" in table.read_text()


def test_a_rank_that_is_killed_costs_no_more_than_what_came_after_the_checkpoint(place, whole):
    keys = {"total_steps": 60, "ckpt.interval": 5, "sharding_strategy": "FULL_SHARD"}
    command = ranks(place, "killed", **keys, **{"ckpt.resume": "true"})
    first = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: any((place / "killed").glob("step-*/state.json")), "a checkpoint", 60)
    one = next(pid for pid in pids(str(place / "killed")) if pid != first.pid)
    os.kill(one, signal.SIGKILL)
    assert first.wait(60) != 0
    done(command)
    assert curve(place / "killed") == curve(whole)
    assert digest(place / "killed") == digest(whole)


def test_four_ranks_that_have_copies_go_on_to_the_bit(place):
    keys = {"total_steps": 6, "ckpt.interval": 3}
    done(ranks(place, "whole", 4, **keys))
    done(ranks(place, "parts", 4, **keys, max_steps=3))
    done(ranks(place, "parts", 4, **keys, **{"ckpt.resume": "true"}))
    assert digest(place / "parts") == digest(place / "whole")


FILLED = """
import re, sys
from pathlib import Path
from train.cluster.startup import model_of
from train.cluster.token_data import tokenizer_for
from train.cluster.options import TrainingOptions
from train.cluster.ranks import joined
from train.cluster.shared_learner import learner_of
from train.model import skeleton

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

with joined() as ranks:
    options = TrainingOptions(path_model=sys.argv[1], precision="32-true", torch_compile=False)
    c = options.settings()
    words = tokenizer_for(c)
    skeleton(c.initial_population[0], len(words))  # what is imported only now
    before = peak()
    model = model_of(options, c, len(words), ranks)
    built = peak()
    learner = learner_of(model, c, ranks, "FULL_SHARD")
    said = ranks.each(f"{built - before} {peak() - before} {learner.layout.size * 4}")
    if ranks.first:
        print(*said, sep="\\n")
"""


def test_only_the_first_rank_ever_has_the_whole_model_in_memory(tmp_path):
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    model(tmp_path / "model", **wide, num_key_value_heads=8)
    (tmp_path / "filled.py").write_text(FILLED)
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "4", str(tmp_path / "filled.py"), tmp_path / "model"]
    found = subprocess.run(
        command, env={**ENV, "PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert found.returncode == 0, found.stdout + found.stderr
    built, filled, parts = zip(*(map(int, line.split()) for line in found.stdout.splitlines()), strict=True)
    assert built[0] > 0.9 * sum(parts) > 10 * max(built[1:]), "what is measured would be seen"
    besides = [all - 5 * part for all, part in zip(filled, parts, strict=True)]  # weights twice, gradients, two moments
    assert max(besides) < 0.6 * sum(parts), besides


@pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}")
def test_two_machines_have_parts_and_copies(tmp_path):
    with Lab(tmp_path / "lab") as lab:
        place = lab.shared / "two"
        model(place / "model")
        (place / "text.jsonl").write_bytes((shared() / "text.jsonl").read_bytes())
        keys = {"sharding_strategy": "HYBRID_SHARD", "dataset_name_or_path": place / "text.jsonl"}
        first, second = lab["h1"], lab["h2"]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29400", "--rdzv-id", "mine"]
        command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "2", *meet]
        with ThreadPoolExecutor() as both:
            said = list(
                both.map(
                    lambda machine: machine.run(
                        "env",
                        "OMP_NUM_THREADS=1",
                        "GLOO_SOCKET_IFNAME=eth0",
                        *command,
                        *words(place, "out", **keys),
                        timeout=240,
                    ),
                    (first, second),
                )
            )
        assert [each.returncode for each in said] == [0, 0], said
        done(ranks(place, "here", 4, **{**keys, "sharding_strategy": "NO_SHARD"}))
        assert curve(place / "out") == pytest.approx(curve(place / "here"), abs=2e-5)

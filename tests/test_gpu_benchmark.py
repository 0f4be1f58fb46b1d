"""The command that measures on a GPU, as a dry run takes it: what is there stays, what breaks or hangs is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu.rounds import Use, unused
from benchmarks.gpu.running import Session
from benchmarks.gpu.speed import TOY, operations
from benchmarks.gpu.steps import STEPS
from train.training_config import TrainConfig

(MERGING,) = (each for each in STEPS if each.name == "merging")


def session(folder: Path, seconds: float = 600.0) -> Session:
    return Session(folder, seconds, dry=True)


def known(folder: Path) -> dict[str, dict]:
    return json.loads((folder / "gpu.json").read_text())["steps"]


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_what_is_there_stays_and_what_was_cut_off_or_broke_is_made_again(tmp_path, no_gpu, capfd):
    broken = replace(MERGING, name="no such step")
    late = replace(MERGING, most=0.1)
    assert session(tmp_path).all([late, broken]) == 2
    assert known(tmp_path)["merging"]["state"] == "cut off" and known(tmp_path)["merging"]["rows"] == []
    assert known(tmp_path)["no such step"]["why"].startswith("code 1: ")
    assert session(tmp_path, 1.0).all([MERGING]) == 1
    assert known(tmp_path)["merging"]["state"] == "not reached"
    assert session(tmp_path).all([MERGING]) == 0
    rows = known(tmp_path)["merging"]["rows"]
    assert [row["method"] for row in rows] == ["linear", "slerp", "ties", "dare_ties"] and all(r["same"] for r in rows)
    assert session(tmp_path, 0.0).all([MERGING]) == 0, "there is nothing to be done"
    assert "merging: there already" in capfd.readouterr().out
    page = (tmp_path / "gpu.md").read_text()
    assert "## Merging" in page and "| method | GB | same | CPU, s | GPU, s |" in page and "| slerp |" in page


def test_results_of_another_machine_or_code_are_not_gone_on_with(tmp_path, no_gpu):
    (tmp_path / "gpu.json").write_text(json.dumps({"machine": {"gpus": ["another"]}, "steps": {"merging": {}}}))
    assert session(tmp_path).known["steps"] == {}


def test_a_device_waits_while_nobody_uses_it():
    used = [Use(2, 0.0, 2.0), Use(2, 1.0, 3.0), Use(3, 5.0, 10.0), Use(3, 6.0, 7.0), Use(4, 11.0, 14.0)]
    assert unused(used, 2, 4) == (3.0, 11.0) and unused(used, 2, 3) == (2.0, 5.0)
    assert unused([Use(1, 0.0, 4.0), Use(2, 1.0, 6.0), Use(3, 5.0, 8.0)], 2, 3) == (0.0, 4.0), "rounds that overlap"


def test_operations_of_a_token():
    """Of each of two layers four squares and three of the perceptron, three norms, and the head."""
    config = TrainConfig(initial_population=(TOY,), vocab_size=300, seq_length=16)
    numbers = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 300 * 32
    assert operations(config) == 6 * numbers + 12 * 2 * 32 * 16

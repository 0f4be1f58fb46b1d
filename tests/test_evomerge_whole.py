"""evomerge as its documentation promises it: the default models, the example program, several machines. Slow."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evomerge import tournament_results
from evomerge.config import Configuration
from evomerge.formula import read
from fleet.history import opened
from tests.lab.machines import Lab, why_not
from tests.tournaments import CLI, cli, config

ROOT = Path(__file__).parent.parent
EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "evomerge.md").read_text(), re.M | re.S)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # its models are trained first


@pytest.fixture
def home(specialists_home) -> dict[str, str]:
    return {**os.environ, "EVOMERGE_HOME": str(specialists_home), "PYTHONPATH": str(ROOT)}


def test_the_default_models_make_a_winner_that_beats_each_of_them(home, tmp_path):
    begin = time.monotonic()
    done = subprocess.run([*CLI, "--run"], cwd=tmp_path, env=home, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr
    print(f"{time.monotonic() - begin:.0f} s")
    winner, *others = tournament_results.found_in(tmp_path / "runs" / "evomerge").tested
    assert len(others) == 3
    for other in others:
        gain, half = tournament_results.ahead(winner, other)
        assert gain > half > 0, f"{other.name}: {gain} ± {half}"


def test_the_example_program_works_as_written(home, tmp_path):
    (tmp_path / "example.py").write_text(EXAMPLES[0])
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=home, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stderr
    assert "The import statement" in done.stdout
    found = tournament_results.found_in(tmp_path / "runs" / "evomerge")
    assert len(found.generations) < 100  # it ended by patience


def test_the_self_test_and_the_benchmarks_run(tmp_path):
    c = config(tmp_path)
    c.save(tmp_path / "mine.json")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for module, words in (("integration_tests", []), ("benchmarks", ["--json", str(tmp_path / "figures.json")])):
        command = [sys.executable, "-m", f"evomerge.{module}", "--config", str(tmp_path / "mine.json"), *words]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr + done.stdout
    figures = {each["what"]: each for each in json.loads((tmp_path / "figures.json").read_text())}
    assert {"GGUF Q8_0", "evaluated: model0", "merged to disk: linear+ties+dfs"} <= figures.keys()
    assert figures["evaluated: model0"]["result"].startswith("score -")


@pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}")
def test_on_machines_the_same_model_wins(tmp_path, monkeypatch):
    with Lab(tmp_path / "lab") as lab:
        monkeypatch.setenv("XDG_STATE_HOME", str(lab.folder / "state"))
        c = config(lab.shared, num_generations=2)
        c.machines, c.ssh_config = str(lab.shared / "machines.json"), str(lab.ssh_config)
        Path(c.machines).write_text(json.dumps([{"host": each.name, "python": sys.executable} for each in lab]))
        c.save(lab.shared / "mine.json")
        done = cli("--run", "--config", lab.shared / "mine.json")
        assert done.returncode == 0, done.stdout + done.stderr
        here = Configuration.load(lab.shared / "mine.json")
        here.machines = here.ssh_config = ""
        here.out = str(lab.shared / "here")
        here.save(lab.shared / "here.json")
        assert cli("--run", "--config", lab.shared / "here.json").returncode == 0
        assert read(lab.shared / "run" / "winner") == read(lab.shared / "here" / "winner")
        history = opened(lab.shared / "run")
        workers = {history.outcome(f"1/m{n}").by for n in range(8)}
        assert len(workers) > 1

"""Learning from rewards as processes: killed, and as `make rl` runs it, smaller. Slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.digest import digest
from fleet.history import opened
from tests.posttraining import finished, killed_and_gone_on, rl_config

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def test_a_killed_run_goes_on_and_has_the_same_rollouts_and_winner(tmp_path):
    c = rl_config(tmp_path)
    history = finished(c)
    known = {key.upper(): value for key, value in c.model_dump(mode="json").items()}
    file = tmp_path / "again.json"
    file.write_text(json.dumps({**known, "PROJECT_NAME": "again", "NUM_MACHINES": 4}))
    killed_and_gone_on(file, tmp_path / "again", "generation 1", 5)
    assert digest(opened(tmp_path / "again")) == digest(history)


def test_the_configuration_that_comes_along_runs_to_its_end(tmp_path):
    """With fewer generations; the winner is ahead of its start, and the page shows what its answers were worth."""
    known = json.loads((ROOT / "configs/rl.json").read_text())
    smaller = {"BASE_DIR": str(tmp_path), "MAX_GENERATIONS": 4, "QUESTIONS": 60}
    (tmp_path / "rl.json").write_text(json.dumps({**known, **smaller}))
    command = [sys.executable, str(ROOT / "edt_sim.py"), "--config", str(tmp_path / "rl.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "of the groups tell nothing" in done.stdout and "the winner is ahead by" in done.stdout
    history = opened(tmp_path / "rl")
    last = history.first_open - 1
    winner, start = (history[f"{last}/{slot}"].metrics["fitness"] for slot in ("winner", "start-0"))
    assert winner > start
    told = subprocess.run(
        [sys.executable, "-m", "fleet.report", str(tmp_path / "rl")], cwd=ROOT, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    page = (tmp_path / "rl" / "report.html").read_text()
    assert "reward/skill:vowels/correct" in page and "Answers of the last round" in page

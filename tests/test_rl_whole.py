"""Learning from rewards as processes: killed, and as `make rl` runs it, smaller. Slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.digest import digest
from fleet.history import History, opened
from tests.posttraining import finished, killed_and_gone_on, rl_config

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("keys", [{"models": 2}, {"models": 1, "adapter": {"r": 3}}], ids=["whole", "adapters"])
def test_a_killed_run_goes_on_and_has_the_same_rollouts_and_winner(tmp_path, keys):
    c = rl_config(tmp_path, **keys)
    history = finished(c)
    known = {key.upper(): value for key, value in c.model_dump(mode="json").items()}
    file = tmp_path / "again.json"
    file.write_text(json.dumps({**known, "PROJECT_NAME": "again", "NUM_MACHINES": 4}))
    killed_and_gone_on(file, tmp_path / "again", 1, 5)
    assert digest(opened(tmp_path / "again")) == digest(history)


@pytest.fixture(scope="module")
def place(tmp_path_factory, starters_home) -> Path:
    """Of runs, whose models to begin with are trained once."""
    place = tmp_path_factory.mktemp("runs")
    (place / "starters").symlink_to(starters_home)
    return place


def ran(place: Path, name: str, **smaller: int) -> tuple[str, History]:
    """A configuration that comes along, with smaller numbers: what was said, and what there is."""
    known = json.loads((ROOT / f"configs/{name}.json").read_text())
    (place / f"{name}.json").write_text(json.dumps({**known, "BASE_DIR": str(place), **smaller}))
    command = [sys.executable, str(ROOT / "edt_sim.py"), "--config", str(place / f"{name}.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout, opened(place / name)


def test_the_configuration_that_comes_along_runs_to_its_end(place):
    """With fewer generations; the winner is ahead of its start, and the page shows what its answers were worth."""
    said, history = ran(place, "rl", MAX_GENERATIONS=4, QUESTIONS=60)
    assert "of the groups tell nothing" in said and "the winner is ahead by" in said
    last = history.first_open - 1
    winner, start = (history[f"{last}/{slot}"].metrics["fitness"] for slot in ("winner", "start-0"))
    assert winner > start
    told = subprocess.run(
        [sys.executable, "-m", "fleet.report", str(place / "rl")], cwd=ROOT, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    page = (place / "rl" / "report.html").read_text()
    assert "reward/skill:vowels/correct" in page and "Answers of the last round" in page


def test_evolution_strategies_begin_with_a_mean_of_two_skills(place):
    said, history = ran(place, "es", MAX_GENERATIONS=2, POPULATION_SIZE=2, QUESTIONS=20, SFT_EXAMPLES=16)
    assert "The winner, 2/model" in said and history["2/model"].recipe.task == "publish"
    assert (place / "es" / "winner" / "config.json").is_file()

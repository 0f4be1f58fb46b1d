"""EDT-EvoMerge as processes: killed, and on several machines. Slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.ancestry.tree import as_json
from fleet.ancestry.tree_builder import tree
from fleet.digest import digest
from fleet.history import History, opened
from tests.lab.machines import Lab, why_not
from tests.posttraining import config, finished, killed_and_gone_on

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def described(folder: Path, **keys) -> Path:
    """The same run as in this process, by another name."""
    c = config(folder)
    known = {key.upper(): value for key, value in c.model_dump(mode="json").items()}
    (folder / "again.json").write_text(json.dumps({**known, "PROJECT_NAME": "again", **keys}))
    return folder / "again.json"


def same(one: History, other: History) -> None:
    assert digest(one) == digest(other)
    assert as_json(tree(one)) == as_json(tree(other))


def test_a_killed_run_goes_on_and_has_the_same_winner(tmp_path):
    finished(config(tmp_path))
    killed_and_gone_on(described(tmp_path, NUM_MACHINES=1), tmp_path / "again", 1, 5)
    same(opened(tmp_path / "run"), opened(tmp_path / "again"))


@pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}")
def test_on_machines_the_same_model_wins(tmp_path, monkeypatch):
    with Lab(tmp_path / "lab") as lab:
        monkeypatch.setenv("XDG_STATE_HOME", str(lab.folder / "state"))
        finished(config(lab.shared))
        mine, machines = described(lab.shared), lab.shared / "machines.json"
        machines.write_text(json.dumps([{"host": each.name, "python": sys.executable} for each in lab]))
        command = [sys.executable, "launch_to_machines.py", "--config", mine, "--machines", machines]
        words = [*map(str, command), f"--ssh-config={lab.ssh_config}"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0 and "The run is over" in done.stdout, done.stdout + done.stderr
        there = opened(lab.shared / "again")
        same(opened(lab.shared / "run"), there)
        assert len({there.outcome(f"2/m{n}").by for n in range(1, 4)}) > 1
        done = subprocess.run([sys.executable, ROOT / "edt.py", "--config", mine], capture_output=True, text=True)
        assert done.returncode == 0 and "the winner is ahead by" in done.stdout, done.stdout + done.stderr
        assert (lab.shared / "again" / "winner" / "config.json").is_file()

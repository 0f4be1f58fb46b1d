"""Evolution strategies as processes that are killed; then the report, and the model as a folder. Slow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.digest import digest
from fleet.history import opened
from tests.posttraining import es_config, finished, killed_and_gone_on

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def test_a_killed_run_goes_on_and_has_the_same_model(tmp_path):
    """Two workers are killed two rounds after weights were published; who takes their places replays these."""
    c = es_config(tmp_path, es={"publish_every": 3})
    history = finished(c)
    known = {key.upper(): value for key, value in c.model_dump(mode="json").items()}
    file = tmp_path / "again.json"
    file.write_text(json.dumps({**known, "PROJECT_NAME": "again", "NUM_MACHINES": 2}))
    said = killed_and_gone_on(file, tmp_path / "again", 2, 6)
    assert "The winner, 5/model" in said
    assert digest(opened(tmp_path / "again")) == digest(history)
    for told in (["fleet.report"], ["train.export", "--out", str(tmp_path / "out")]):
        ask = [sys.executable, "-m", *told, str(tmp_path / "again")]
        made = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    page = (tmp_path / "again" / "report.html").read_text()
    assert "/correct" in page and "Answers of the last round" in page
    assert (tmp_path / "out" / "config.json").is_file()

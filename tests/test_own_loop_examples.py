"""The examples of loops of one's own: by one process, and by two of which one is killed, with the same bytes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.digest import digest
from fleet.history import opened
from tests.commands import answer
from tests.helpers import LONG, ROOT, Started, kill, until

EXAMPLES = [file.stem for file in sorted((ROOT / "examples").glob("*.py"))]
OF_JOINING = re.compile(r"\bjoin\b|\brun\b|^settings = ")  # a line that a script without a run would not have


def started(name: str, folder: Path) -> Started:
    out = folder.parent / f"{len([*folder.parent.glob('*.out')])}.out"
    more = {"XDG_STATE_HOME": str(folder.parent / "state"), "OMP_NUM_THREADS": "1"}
    with out.open("wb") as file:
        command = [sys.executable, "-m", f"examples.{name}", str(folder)]
        return Started(subprocess.Popen(command, cwd=ROOT, env=os.environ | more, stdout=file, stderr=file), out)


def bytes_of(folder: Path) -> str:
    history = opened(folder)
    assert history.over
    return digest(history)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_one_process_and_two_of_which_one_is_killed(tmp_path, name):
    alone, folder = started(name, tmp_path / "alone"), tmp_path / "both"
    alone.ends(0, 3 * LONG)
    both = [started(name, folder) for _ in range(2)]
    until(lambda: any(folder.glob("rounds/00003/*.claim.0")), "the third round is begun", LONG)
    kill(both[0].process.pid)
    both[1].ends(0, 3 * LONG)
    assert bytes_of(folder) == bytes_of(tmp_path / "alone")
    assert alone.said.splitlines()[-1] == both[1].said.splitlines()[-1]  # how good the model is that either holds
    code, said, _ = answer("-m", "train.export", str(folder), "--out", str(tmp_path / "out"))
    assert code == 0 and "loss=" in said and (tmp_path / "out/model.safetensors").is_file()


@pytest.mark.parametrize("name", ["images", "characters"])
def test_a_script_needs_few_lines_to_join(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text().partition('"""\n\nimport')[2].splitlines()
    assert 5 <= len([line for line in lines if OF_JOINING.search(line)]) <= 10


def test_the_callback_of_a_trainer_is_short():
    text = (ROOT / "examples/trainer.py").read_text()
    callback = re.search(r"^class JoinCallback.*?(?=^\S)(?!class JoinCallback)", text, re.M | re.S)
    assert callback and len([line for line in callback[0].splitlines() if line.strip()]) <= 30

"""A merge search in a bucket goes on by the same command, and comes to what it comes to on a disk."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from fleet.digest import digest
from fleet.history import opened
from fleet.host import Host
from fleet.run import at
from tests.bucket_runs import BUCKET
from tests.helpers import LONG, ROOT, until
from tests.searching import command, genome_file, search

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("surroundings")]


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # what a run in a bucket comes to is written where its command was given
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Path(f"{BUCKET}/{tmp_path.name}")


def test_a_search_whose_processes_were_all_killed(facts: Path, tmp_path: Path, there: Path) -> None:
    file = genome_file(tmp_path, facts, "dare_ties", base=True)
    more = ("--max-fevals", "12", "--population-size", "4", "--random-seed", "4")
    search(file, tmp_path / "disk", facts, *more, "--workers", "1")
    begun = subprocess.Popen(command(file, there / "search", facts, *more, "--workers", "2"), start_new_session=True)
    store = at(there / "search", Host(), "test")
    until(lambda: "plan" in store.names("rounds/00002"), "its second round", LONG, pause=0.2)
    os.killpg(begun.pid, signal.SIGKILL)
    begun.wait()
    assert not opened(there / "search").over
    search(file, there / "search", facts, *more, "--workers", "2", cwd=tmp_path)
    assert (tmp_path / "search" / "best_config.yaml").exists()
    assert digest(opened(there / "search")) == digest(opened(tmp_path / "disk"))

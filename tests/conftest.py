"""What the tests of real runs share."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Toys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other cost minutes on a busy machine


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """A shell's background jobs ignore Ctrl-C, and so would all that the tests start from one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Toys]]:
    """Makes toy runs, each in a folder of its own; nothing that they started outlives the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[Toys] = []

    def make(name: str = "here", script: list[str] | None = None, **keys: Any) -> Toys:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        small = {"algorithm": "matching", "population_size": 4, "max_generations": 4, "size": 24}
        made.append(
            Toys(place, {**small, "poll_seconds": 0.02, "dead_seconds": 5.0, **keys}, *([script] if script else []))
        )
        return made[-1]

    yield make
    for each in made:
        each.kill_all()


@pytest.fixture
def pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Toys]]:
    """Runs of edt_sim.py or diloco_sim.py as real processes, each in a folder of its own."""
    from tests.small import KEYS, shared

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made: list[Toys] = []

    def make(script: str = "edt_sim.py", **keys: Any) -> Toys:
        place = tmp_path / f"place-{len(made)}"
        place.mkdir()
        data = {"tokenizer": str(shared() / "tokenizer"), "datasets": [{"source": str(shared() / "text.jsonl")}]}
        made.append(Toys(place, {**KEYS, **data, **keys}, [sys.executable, script]))
        return made[-1]

    yield make
    for each in made:
        each.kill_all()


@pytest.fixture(scope="session")
def specialists_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where evomerge's default models are: trained once for all slow tests, in two minutes."""
    from evomerge import specialists

    folder = tmp_path_factory.mktemp("home")
    specialists.made(folder)
    return folder

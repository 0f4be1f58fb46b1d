"""Processes that stand still for longer than anybody waits, at many moments, alone or all at once: time is lost, and
nothing else. Nobody who only stood still is taken for dead by those who stood still with him."""

import contextlib
import json
import os
import random
import signal
import time

import pytest

from tests.helpers import Toys, freeze, pids, until


def everybody(run: Toys) -> list[int]:
    """The starter, its workers, and the loggers beside them."""
    starters = [each.process.pid for each in run.started if each.process.poll() is None]
    return [*starters, *pids(str(run.folder))]


def beat(run: Toys, name: str) -> int:
    return int(json.loads((run.folder / "workers" / f"{name}.pulse").read_text())["beat"])


def stand_still(those: list[int], seconds: float, apart: float = 0.0) -> None:
    """The last one goes on first. Any of them may have ended, before or meanwhile."""
    for pid in those:
        with contextlib.suppress(ProcessLookupError):
            freeze(pid)
    time.sleep(seconds)  # this is the mishap's own length
    for pid in reversed(those):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(apart)


@pytest.mark.slow
def test_everybody_stands_still_together(toys):
    """As when a container is frozen. Who goes on first has looked at nothing meanwhile: the other one is neither dead
    nor late."""
    run: Toys = toys(
        population_size=2, max_generations=1, inner_steps=40, sleep=4.0, quorum=0.5, dead_seconds=6.0, grace_seconds=6.0
    ).prepare()
    assert run.work(recipes=1) == "interrupted"
    waits = run.worker("waits")
    until(lambda: run.makers("00001/m."), "the first one has begun")
    works = run.worker("works")
    until(lambda: len(run.registers(r"00001/m.\.0\.done")) == 1, "the first one is made, the second is not")
    before = beat(run, "waits")
    until(lambda: beat(run, "waits") >= before + 2, "it waits, and has looked at the other's pulse")
    stand_still([works.process.pid, waits.process.pid], 8.0, apart=1.0)
    for each in (waits, works):
        each.ends(0)
    assert not run.registers(r".*\.claim\.1"), "nobody was taken for dead"
    assert not any(run.register(path)["absent"] for path in run.registers(r".*\.done")), "nobody was late"
    run.same()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_each_stands_still_at_random_moments(toys, seed):
    """Workers, loggers and the starter, some of them at a time."""
    run: Toys = toys(max_generations=6, inner_steps=4, sleep=0.4, dead_seconds=1.0, restarts=1000)
    starter, rng = run.start(3), random.Random(seed)
    until(lambda: run.registers(r".*\.done"), "the run has begun")
    while starter.process.poll() is None:
        stand_still([pid for pid in everybody(run) if rng.random() < 0.4], rng.choice((0.1, 2.0, 3.0)))
        time.sleep(rng.random())
    starter.ends(0)
    assert not run.registers(r".*\.void") and "takes its place" not in starter.said
    assert run.check_files() >= 20
    run.same()

"""A real small disk that gets full in the middle of a run: wait, say so, prune, go on; nothing published is hurt."""

import os
from pathlib import Path

import pytest

from tests.helpers import LONG, Toys, mounted, until

MIB = 1 << 20


def fill(path: Path) -> None:
    """Take all the room that there is."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 1 << 12):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                pass


def big(toys) -> Toys:
    """Members of 512 KiB each, five a round."""
    return toys(size=1 << 15, eval_batch_size=1 << 15, inner_steps=2, max_generations=6, sleep=0.1)


@pytest.mark.parametrize("workers", [2])
def test_the_disk_is_full_for_a_while(toys, workers):
    run = big(toys)
    with mounted(run.place / "runs", options="size=24m"):
        filler = run.place / "runs" / "filler"
        starter = run.start(workers)
        until(lambda: len(run.registers(r"00001/m.*done")) >= 2, "the run has begun")
        fill(filler)
        until(lambda: run.events("waits"), "whoever has something to write says that it waits")
        assert all("the disk is full" in e["why"] for e in run.events("waits"))
        until(lambda: "\nwaiting: the disk is full: " in starter.said, "whoever started it is told, too")
        assert starter.process.poll() is None and not run.is_over(), "nobody gives up"
        published = set(run.registers(r".*\.done"))
        assert published and run.check_files()
        assert len(run.alive()) == workers

        filler.unlink()
        starter.ends(0, LONG)
        assert published <= set(run.registers(r".*\.done")) and not run.registers(r".*\.void")
        assert run.check_files() >= 20
        run.same()


def test_a_disk_that_holds_the_rounds_in_reach_but_not_all(toys):
    """Old rounds go, so the run ends on a disk that could not hold it as a whole."""
    run = big(toys)
    run.keys |= {"max_generations": 12, "sleep": 0.0}
    made = 12 * 4 * 16 * run.config.size
    with mounted(run.place / "runs", options="size=18m"):
        assert made > 18 * MIB
        run.start(2).ends(0, LONG)
        assert run.check_files() >= 16
        run.same()


@pytest.mark.slow
def test_a_full_disk_at_the_start(toys):
    run = big(toys)
    with mounted(run.place / "runs", options="size=1m"):
        fill(run.place / "runs" / "filler")
        refused = run.start(1)
        refused.ends(2)
        assert "no room" in refused.said.lower() or "no space" in refused.said.lower()
        assert "Traceback" not in refused.said
        os.unlink(run.place / "runs" / "filler")
        run.start(1, size=64).ends(0)
        run.same()


@pytest.mark.slow
def test_no_inodes_are_left(toys):
    """A disk may have room and yet take no more names."""
    run: Toys = toys(max_generations=5, sleep=0.05)
    with mounted(run.place / "runs", options="size=64m,nr_inodes=400"):
        starter = run.start(2)
        until(lambda: len(run.registers(r"00001/m.*done")) >= 2, "the run has begun")
        fillers, made = run.place / "runs" / "fillers", 0
        try:
            fillers.mkdir()
            while True:
                (fillers / str(made)).touch()
                made += 1
        except OSError:
            pass
        assert made > 10
        until(lambda: run.events("waits"), "a worker says that it waits")
        for path in fillers.iterdir():
            path.unlink()
        starter.ends(0, LONG)
        run.same()

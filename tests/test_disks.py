"""Whole runs on disks of other kinds: layers, SSH, views of other folders; and on mounts that die and come back."""

import random
from pathlib import Path

import pytest

from fleet.digest import digest
from tests.helpers import LONG, Toys, kill, one_of, until
from tests.lab import disks
from tests.small import finished, whole

pytestmark = pytest.mark.timeout(300)
BEFORE = 7  # recipes


def place_of(run: Toys, kind: str) -> tuple[str, Path, Path]:
    if why := disks.why_not(kind):
        pytest.skip(why)
    return kind, run.place / "runs", run.place / "behind"


@pytest.mark.parametrize("workers, kind", one_of([(n, k) for n in (2, 4) for k in disks.PLAIN], quick=[(2, "overlay")]))
def test_a_run_goes_on_there_and_its_workers_are_killed(toys, workers, kind):
    """What was made before lies below what is mounted then: in the lower layer, or as the server's own files."""
    run: Toys = toys(inner_steps=5, sleep=0.05, restarts=1000).prepare()
    where, rng = place_of(run, kind), random.Random(workers)
    assert run.work(recipes=BEFORE) == "interrupted"
    (run.place / "runs").rename(run.place / "behind")
    with disks.mounted(*where):
        starter = run.start(workers)
        for kills in range(3):
            until(lambda n=kills: len(run.registers(r".*\.done")) > BEFORE + 2 * n, "progress")
            if alive := run.alive():
                kill(rng.choice(sorted(alive.values())))
        starter.ends(0)
        assert run.check_files() >= 20 and not run.registers(r".*\.void")
        run.same()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same run on this machine's own disk."""
    return digest(finished(tmp_path_factory.mktemp("calm")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", disks.PLAIN)
def test_models_are_trained_there(pretraining, calm, kind):
    run = pretraining()
    with disks.mounted(*place_of(run, kind)):
        assert whole(run, 2) == calm


@pytest.mark.parametrize(
    "kind", one_of(["sshfs without links", "sshfs without renames that replace"], quick=["sshfs without links"])
)
def test_what_cannot_work_there_is_said_at_once(toys, kind):
    run: Toys = toys()
    with disks.mounted(*place_of(run, kind)):
        refused = run.start(2)
        refused.ends(2, 30.0)
        assert "the disk refuses what a run needs" in refused.said and "Traceback" not in refused.said
        assert not (run.folder / "run.json").exists()


@pytest.mark.parametrize("kind", one_of(["bindfs", "sshfs", "fuse-overlayfs"], quick=["bindfs"]))
def test_a_mount_that_dies_and_comes_back(toys, kind):
    """Everybody goes on there by himself, the starter and what workers note among them."""
    run: Toys = toys(sleep=0.3)
    with disks.mounted(*place_of(run, kind)) as disk:
        starter = run.start(2)
        until(lambda: len(run.registers(r"00001/m.*done")) >= 2, "the run has begun")
        until(lambda: len(run.makers("0000[1-3]/m.")) == 2, "both are at work")
        at_work = {*run.alive()}
        disk.die()
        if kind == "bindfs":
            second = run.run([*run.script, "--config", str(run.place / "evolution.json")])
            second.ends(2)
            assert "cannot be used: Transport endpoint is not connected" in second.said, second.said
            assert "Traceback" not in second.said
        disk.unmount()
        assert starter.process.poll() is None and not [*disk.point.iterdir()], "nothing is written where no disk is"
        disk.mount()
        starter.ends(0, LONG)
        assert "round 4" in starter.said and "takes its place" not in starter.said, starter.said
        assert {event["worker"] for event in run.events("ended")} == at_work, "what they note is there again"
        run.same()

"""One of three machines sees the shared disk in a bad light: the run ends right, or its worker stops and says why."""

from collections.abc import Iterator

import pytest

from tests.helpers import LONG, until
from tests.lab import faults
from tests.lab.luck import Rule
from tests.lab.machines import Lab, why_not
from tests.launching import Launched

NOT = why_not() or faults.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NOT), reason=f"no unlucky machine: {NOT}")]

SMALL = {"algorithm": "diloco", "population_size": 6, "max_generations": 10, "size": 24, "dead_seconds": 5.0}
FEW = 0.02  # of all calls


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Iterator[Lab]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with Lab(tmp_path / "lab") as made:
        yield made


@pytest.fixture
def run(lab) -> Iterator[Launched]:
    place = lab.shared / "place"
    place.mkdir()
    made = Launched(place, {**SMALL, "sleep": 0.3}, lab=lab)
    yield made
    made.kill_all()


def rare(error: str) -> Rule:
    return Rule(path="*/runs/toy/*", chance=FEW, error=error)


def often(error: str, op: str) -> Rule:
    """It was done, only the answer is lost."""
    return Rule(op=op, path="*/runs/toy/*", chance=0.3, error=error, done=True)


@pytest.mark.parametrize("rules, stale", [
    ([], {"absent": 25.0, "listing": 3.0, "stale": 3.0}),
    ([rare("EIO"), rare("ESTALE")], {}),
    ([often("EIO", op="link"), often("ESTALE", op="rename")], {}),
    ([Rule(op="write", path="*/runs/toy/*", chance=0.2, short=7)], {}),
    ([Rule(path="*/runs/toy/*", chance=FEW, delay=0.2)], {"listing": 1.0}),
], ids=["stale", "errors", "lost replies", "short writes", "delays"])  # fmt: skip
def test_passing_misfortunes_change_nothing(lab, run, rules, stale):
    unlucky = faults.Faults(lab["h2"])
    unlucky.are(*rules, **stale, seed=3)
    run.says("launch", "--detach")
    until(lambda: run.events("made", of="h2"), "it takes part")
    run.wait_over()
    assert not rules or len(unlucky.struck()) > 3
    run.same()


def test_a_disk_that_is_full_for_one_machine_holds_nobody_up(lab, run):
    unlucky = faults.Faults(lab["h2"])
    run.says("launch", "--detach", sleep=0.3)
    until(lambda: run.events("made", of="h2"), "it takes part")
    unlucky.are(*(Rule(op=op, path="*/runs/toy/*", error="ENOSPC") for op in ("write", "create", "link", "mkdir")))
    until(lambda: unlucky.struck(), "it met the full disk", LONG)
    run.wait_over()
    run.same()


def test_a_disk_that_is_read_only_for_a_while_is_waited_for(lab, run):
    unlucky = faults.Faults(lab["h2"])
    run.says("launch", "--detach", sleep=0.5, max_generations=14)
    until(lambda: run.events("made", of="h2"), "it takes part")
    changes = ("write", "create", "link", "mkdir", "rename", "unlink", "rmdir")
    unlucky.are(*(Rule(op=op, path="*/runs/toy/*", error="EROFS") for op in changes))
    until(lambda: len(unlucky.struck()) > 8, "it met the read-only disk", LONG)
    made = len(run.events("made", of="h2"))
    unlucky.are()
    until(lambda: len(run.events("made", of="h2")) > made, "it goes on by itself", LONG)
    assert any("the disk refuses" in event["why"] for event in run.events("waits", of="h2"))
    assert len({event["worker"] for event in run.events("started", of="h2")}) == 1, "it is the same process"
    run.wait_over()
    run.same()


def test_a_disk_that_fails_for_ever_is_named(lab, run):
    unlucky = faults.Faults(lab["h2"])
    unlucky.are(Rule(path="*/runs/toy/rounds/*", skip=30, error="EIO"))
    run.says("launch", "--detach", sleep=0.2)
    run.wait_over()
    run.same()
    until(lambda: "the disk does not answer properly" in run.says("logs", "h2"), "it says why", LONG, pause=2.0)

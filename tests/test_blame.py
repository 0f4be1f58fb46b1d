"""One bad machine, and what the others make of it: whose fault a failure is."""

import json
import re

import pytest

from fleet.blame import Blame
from fleet.claims import Claims, Watch
from fleet.events import Events
from fleet.history import History
from fleet.host import Host
from fleet.peers import agreed
from fleet.run import create_run
from fleet.seats import SPENT, Seat
from fleet.status import View
from tests.helpers import MISHAPS, Toys, until

A, B, C, D = (("a", "a-0"), ("b", "b-0"), ("c", "c-0"), ("d", "d-0"))
A2 = ("a", "a-1")

# who said so in turn, who could make it, how often and by how many it must be said
YES = [
    ([A, A, A], [A], 3, 3),  # the only one that lives
    ([A, B, A], [A, B], 3, 3),
    ([A, B, C], [A, B, C, D], 3, 3),
    ([A, A2, A], [A, A2], 3, 3),
    ([A, B], [A, B, C], 1, 2),
    ([A], [A], 1, 2),
    ([B, C, A], [A], 3, 3),  # the others have gone meanwhile,
    ([A, B, C], [B, C, D], 3, 3),  # or one of them rests between two processes
    ([A, A, A], [], 3, 3),  # and nobody else could
]
NO = [
    ([A, A, A, A], [A, B], 3, 3),
    ([A, A], [A], 3, 3),
    ([A, A2, A], [A, A2, B], 3, 3),  # two of one machine
    ([A, B, A, B], [A, B, C], 3, 3),
    ([B, B, B], [A], 3, 3),  # who could make it was not asked
    ([A, A], [A, B], 1, 2),
]


@pytest.mark.parametrize("said, able, times, makers", YES)
def test_makers_agree(said, able, times, makers):
    assert agreed(said, able, times, makers)


@pytest.mark.parametrize("said, able, times, makers", NO)
def test_makers_do_not_agree(said, able, times, makers):
    assert not agreed(said, able, times, makers)


@pytest.mark.parametrize("lost, doomed", [(0, False), (2, False), (3, False), (4, True)])
def test_two_machines_that_were_taken_away_do_not_side_with_a_broken_one(tmp_path, lost, doomed):
    """A claim that was lost says less than a failure, and many in a row never more than that the run is to stop."""
    store, _ = create_run(tmp_path, "run", {}, Host())
    store.folder("rounds/00000")
    recipe = {"slot": "bad", "parents": [], "needs": [], "task": "x", "args": {"x": 1}}
    store.settle("rounds/00000/plan", {"by": "x", "recipes": [recipe]})
    for machine in ("there", "yonder"):
        store.post(f"workers/{machine}-0-x.pulse", json.dumps({"machine": machine, "launch": 1}))
    for n, machine in enumerate(["here", *["there", "yonder"] * lost, "here", "here"]):
        record = {"by": f"{machine}-0-x", "machine": machine, "launch": 1}
        store.settle(f"rounds/00000/bad.0.claim.{n}", record)
        if machine == "here":  # it says so; the others' claims end without a word
            store.settle(f"rounds/00000/bad.0.left.{n}", {**record, "why": "failed", "error": "it burns"})
    history = History(store)
    history.look_far()
    claims = Claims(store, history, Watch(store, Host(), 60.0), 1)
    blame = Blame(claims, history, Events(store), 60.0, 3)
    blame.failed("0/bad")
    assert not [*blame.verdicts()]
    assert blame.doomed("0/bad", claims.lost("0/bad")) == doomed


def search(toys, mishap: str, **keys) -> Toys:
    return toys(script=MISHAPS, mishap=mishap, wide=40, sick="local-0", sleep=0.1, dead_seconds=2.0, **keys)


@pytest.mark.parametrize("mishap, spared", [("raise", True), ("verdict", False), ("device", True)])
def test_who_fails_at_everything_spoils_nothing(toys, mishap, spared):
    """Three good workers and a broken one: all candidates are made, and nobody stops the run."""
    run = search(toys, mishap, spared=spared)
    starter = run.start(4)
    starter.ends(0)
    done = [run.register(path) for path in run.registers(r"00000/c.*\.done")]
    assert len(done) == 40 and not [each for each in done if each["absent"]]
    mine = [e["what"] for e in run.events(of="local-0")]
    assert "failed" in mine and "made" not in mine
    if mishap == "device":
        assert "worker 0 ended with code 75, to be started anew" in starter.said
    else:
        few = 10 if mishap == "raise" else 40  # a verdict is no failure of its own until others disprove it
        assert mine.count("failed") < few, "it rests after each failure"


def test_who_fails_alone_is_benched_and_it_is_said(toys):
    run = search(toys, "raise", spared=True)
    starter = run.start(3, sleep=0.3)
    until(lambda: run.events("benched"), "it steps aside")
    said = str(View(run.folder).picture()[0])
    assert re.search(r"3 workers, [0-9.]+ a minute; 1 benched: local-0-\S+ \([0-9]+ failures in a row at what", said)
    starter.ends(0)


@pytest.mark.parametrize("spared", [True, False])
def test_what_nobody_can_make_stops_the_run_with_the_reasons(toys, spared):
    run = toys(script=MISHAPS, mishap="lack", dead_seconds=1.0, spared=spared)
    starter = run.start(2)
    starter.ends(1)
    assert "no living worker can make 0/bad: " in starter.said
    assert "out of memory: 80 GB are needed, 8 GB are there" in starter.said
    assert any("The run stops soon unless somebody joins who can" in e["why"] for e in run.events("waits"))
    assert not run.registers(r"00000/bad.*done")
    run.start(2, mishap="none").ends(0)


def test_who_lacks_something_leaves_it_to_others(toys):
    run = search(toys, "lack")
    run.start(2).ends(0)
    left = [json.dumps(run.register(path)) for path in run.registers(r"00000/c.*\.left\..*")]
    assert left and all("elsewhere" in each for each in left)


def test_an_error_of_the_device_that_the_recipe_makes_stops_the_run(toys):
    """Each process ends after it; what the ones before said is not forgotten."""
    run = toys(script=MISHAPS, mishap="device")
    starter = run.start(1)
    starter.ends(1)
    assert "0/bad failed 3 times, on" in starter.said and starter.said.count("to be started anew") == 2


def test_a_place_whose_device_fails_is_never_given_up_for_good():
    seat, now, pauses = Seat(0), 0.0, []
    for _ in range(30):
        seat.started = now
        assert seat.ended(SPENT, now, restarts=5, leaving=False)
        pauses.append(seat.again_at - now)
        now = seat.again_at
    assert pauses == sorted(pauses) and pauses[0] == 2 and pauses[-1] == 3600

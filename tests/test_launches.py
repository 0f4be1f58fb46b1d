"""Between two launches anything may have changed but the results: settings, code, machines. And workers of two launches
may be alive at once."""

import os
import re
from pathlib import Path

import pytest

from fleet import launches
from fleet.claims import Claims, Watch
from fleet.context import WorkerOptions
from fleet.history import History
from fleet.host import Host
from fleet.run import create_run, open_run
from fleet.run_config import UserError
from fleet.work import Failed, Work
from fleet.worker import Worker
from tests.helpers import MISHAPS, Toys, until
from tests.mishaps import MishapConfig, TwoRounds
from tests.toy.config import ToyConfig

# -- two launches at once ----------------------------------------------------------------------------------------------


def test_who_is_alone_in_a_launch_is_not_alone_in_the_run(toys):
    """Its word does not decide what a worker of another launch, in the same place, can make."""
    run: Toys = toys(script=MISHAPS, wide=12, spared=True, sleep=600.0, dead_seconds=60.0)
    run.start(1)
    until(lambda: run.makers("00000/c.*"), "a worker makes what it takes")
    store, about = open_run(run.folder, host := Host(), "local-0-sick")
    tried = list[str]()

    def make(work: Work) -> dict[str, float]:
        tried.append(work.id)
        if len(tried) == 3:
            host.stop()
        raise Failed("it does not converge")

    plans = TwoRounds(MishapConfig.joined(about["config"], {}))
    Worker(store, plans, make, WorkerOptions(launch=launches.begin(store, {}), dead_seconds=60.0)).run()
    assert len(tried) == 3 and not run.registers(".*done")


@pytest.mark.slow
def test_what_nobody_can_make_in_two_launches_stops_both(toys):
    run = toys(script=MISHAPS, mishap="raise", dead_seconds=2.0)
    both = [run.start(1), run.start(1)]
    for each in both:
        each.ends(1, seconds=60)
        assert "0/bad failed" in each.said and "the card is on fire" in each.said


def claims_of(place: Path, *of: int, launch: int) -> Claims:
    """What a worker of one launch sees after claims that were lost in such launches."""
    run, _ = create_run(place, "run", {}, Host())
    if not run.names("rounds/00000"):
        run.folder("rounds/00000")
        recipe = {"slot": "bad", "parents": [], "needs": [], "task": "x", "args": {"x": 1}}
        run.settle("rounds/00000/plan", {"by": "x", "recipes": [recipe]})
        for n, each in enumerate(of):
            run.settle(f"rounds/00000/bad.0.claim.{n}", {"by": f"w-{n}", "machine": "here", "launch": each})
    history = History(run)
    history.look_far()
    return Claims(run, history, Watch(run, Host(), 1.0), launch)


@pytest.mark.parametrize("of, launch, counts", [
    ((1, 1, 1), 1, 3), ((1, 1, 2), 2, 1), ((1, 2, 1, 2), 1, 4), ((1, 2, 1, 2), 2, 3), ((1, 1), 2, 0), ((1, 2, 2), 1, 3),
])  # fmt: skip
def test_workers_that_are_lost_in_turn_count_whatever_their_launch(tmp_path, of, launch, counts):
    """A recipe that kills its makers must not do so for ever because two launches take turns; a new one begins anew."""
    assert len(claims_of(tmp_path, *of, launch=launch).lost("0/bad")) == counts


def test_the_time_limit_of_an_older_launch_ends_its_own_workers_only(toys):
    run: Toys = toys(time_limit_hours=1e-9, sleep=0.0).prepare()
    old = launches.latest(run.history().store)
    run.prepare(time_limit_hours=0.0)  # a person's second thought, while one worker still stands still somewhere
    worker = run.run([*run.script, "--launch", str(old), "--worker", "old", str(run.folder)])
    worker.ends(3)
    assert "its time limit" in worker.said and not launches.ended(run.history().store)
    assert run.work() == "over"
    run.keys |= {"time_limit_hours": 0.0}
    run.same()


def test_who_takes_a_dead_worker_s_place_belongs_to_its_launch(toys):
    run: Toys = toys(sleep=0.5, restarts=5)
    starter = run.start(1)
    name = until(lambda: [*run.makers("00000/.*")], "it is at work")[0]
    store = open_run(run.folder, Host(), "test")[0]
    newer = launches.begin(store, run.config.operational())
    os.kill(run.alive()[name], 9)
    next_one = until(lambda: [e for e in run.events("started") if e["worker"] != name], "another takes its place")[0]
    assert next_one["launch"] == newer - 1
    launches.end(store, "enough")
    starter.end()


# -- other settings ----------------------------------------------------------------------------------------------------


def test_another_method_is_one_difference(toys):
    """Not a dozen keys that the other one does not know."""
    run: Toys = toys().prepare()

    wanted = {**run.config.bound(), "algorithm": "rank", "another": 1}
    del wanted["cliff"]
    with pytest.raises(UserError) as refused:
        create_run(run.place / "runs", "toy", wanted, Host(), ToyConfig)
    assert re.findall(r"^  (\w+): ", str(refused.value), re.M) == ["ALGORITHM"]

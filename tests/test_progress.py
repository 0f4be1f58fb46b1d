"""How a run gets on, as it is said to whoever started it."""

import re
from collections.abc import Mapping
from typing import Any

from fleet.history import History
from fleet.host import Host
from fleet.processes import options
from fleet.progress import Progress
from fleet.run import open_run
from fleet.underway import TimeLeft, Underway, underway
from fleet.work import Work
from fleet.worker import Worker
from tests.helpers import Toys, until
from tests.toy.maker import maker
from tests.toy.strategies import strategy


def test_how_far_each_is(toys):
    """Workers tell the step that they are at; whoever starts the run says so."""
    run: Toys = toys(sleep=40.0, inner_steps=2000, dead_seconds=2.5).prepare()
    run.work(recipes=1)
    run.worker("anna")
    history = run.history()

    def found() -> dict[str, Underway]:
        history.look_far()
        return {id: each for id, each in underway(history.store, 1).items() if each.share}

    ((id, told),) = until(found, "it tells a step").items()
    assert told.by == "anna" and re.fullmatch(r"step [0-9,]+ of 2,000", told.at) and 0 < told.share < 1
    progress = Progress(history, 4)
    assert progress.making() == ""
    progress.look_around()
    assert progress.making().startswith(f"making {id} step ")


def test_nobody_has_begun(toys):
    run: Toys = toys().prepare()
    assert Progress(run.history(), 4).making() == "the workers are starting"


class Clock(Host):
    """Time passes where somebody sleeps, and nowhere else."""

    at = 0.0

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


def test_time_left_is_of_the_whole_run(toys):
    """Five rounds of four members that take ten seconds each, by one worker: after the first of them 160 seconds."""
    run: Toys = toys(sleep=10.0, max_generations=5).prepare()
    clock = Clock()
    watching = History(open_run(run.folder, clock, "test")[0])
    left, told = TimeLeft(watching, 5), list[float | None]()
    make = maker(run.config)

    def watched(work: Work) -> Mapping[str, Any]:
        watching.look_far()
        left.learn()
        told.append(left.seconds())
        return make(work)

    store, _ = open_run(run.folder, clock, "here")
    assert Worker(store, strategy(run.config), watched, options(run.config, 1)).run() == "over"
    known = [seconds for seconds in told if seconds is not None]
    assert told[0] is None and len(known) > 15
    assert 150 < known[3] < 180 and known[-1] < 20
    assert all(0 <= a - b <= 20 for a, b in zip(known, known[1:], strict=False)), known

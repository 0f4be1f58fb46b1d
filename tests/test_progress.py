"""How a run gets on, as it is said to whoever started it."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from fleet import launches
from fleet.history import History
from fleet.host import Host
from fleet.processes import options
from fleet.progress import Progress, counted, duration
from fleet.run import open_run
from fleet.time_left import TimeLeft, Underway, underway
from fleet.work import Work
from fleet.worker import Worker
from tests.helpers import ROOT, Toys, until
from tests.launching import LAUNCHER
from tests.small import finished
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
    progress.look_around()
    assert progress.making().startswith(f"making {id} step ")


def test_a_launched_run_is_told_like_a_local_one(toys):
    """Through the launcher, where nobody has a terminal: each round, and at the end where everything is."""
    run: Toys = toys().prepare()
    run.work(recipes=3)
    file = run.place / "evolution.json"
    file.write_text(json.dumps({"project_name": "toy", "base_dir": "runs", **run.keys}))
    files = ["--config", str(file), "--machines", str(run.place / "none.json")]
    watching = run.run([*LAUNCHER, "status", "--watch", *files])
    pulse = run.folder / "workers" / "berta.pulse"
    pulse.write_text(json.dumps({"beat": 1, "launch": 1, "machine": "gpu2"}))
    os.utime(pulse, (time.time() - 90,) * 2)
    until(lambda: "heard of for" in watching.said, "a silent machine is named")
    until(lambda: "The run goes on in round " in watching.said, "it is followed")
    run.work()
    watching.ends(0)
    said = watching.said
    assert "\nround 1: " in said and "The run is over after 4 rounds. Its last round:" in said
    assert said.endswith(f"Everything is in {run.folder}\n") and said.count("heard of for") == 1


def test_who_launches_a_run_that_is_over_is_told_what_it_came_to(toys):
    """Though none of its machines answers."""
    run: Toys = toys().prepare()
    run.work()
    file, machines = run.place / "evolution.json", run.place / "machines.json"
    file.write_text(json.dumps({"project_name": "toy", "base_dir": "runs", **run.keys}))
    machines.write_text('["nowhere.invalid"]')
    launching = run.run([*LAUNCHER, "launch", "--config", str(file), "--machines", str(machines)])
    launching.ends(0)
    assert "The run is over. To start another one, choose another PROJECT_NAME.\n" in launching.said
    assert launching.said.count("Its last round:") == 1 and launching.said.endswith(f"Everything is in {run.folder}\n")


@pytest.mark.parametrize("begun", [True, False])
def test_the_lines_travel_from_another_machine_too(toys, begun):
    """The proxy there is asked over a wire. Whoever has begun the run hears of all rounds; who comes back to it, not of
    those that were finished by then."""
    run: Toys = toys()
    file = run.place / "evolution.json"
    file.write_text(json.dumps({"project_name": "toy", "base_dir": "runs", **run.keys}))
    words = [sys.executable, "-m", "fleet.remote.run_proxy", "@"]
    script = {"command": ["-m", "tests.toy"]}
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdin and proxy.stdout

        def answer(verb: str, **known: Any) -> Any:
            assert proxy.stdin and proxy.stdout
            proxy.stdin.write(json.dumps({"verb": verb, "with": known}) + "\n")
            proxy.stdin.flush()
            return json.loads(proxy.stdout.readline()[1:])["answer"]

        if begun:
            answer("create", **script, file=str(file), text="")
        run.prepare().work()
        if not begun:
            answer("open", folder=str(run.folder))
        answer("follow", **script, finish=True)
        told = list[dict[str, Any]]()
        until(lambda: told.append(answer("followed")) or told[-1]["code"] is not None, "it has said all")
    said = "".join(each["text"] for each in told)
    assert told[-1]["code"] == 0 and "The run is over after 4 rounds" in said and ("\nround 1: " in said) == begun


@pytest.mark.slow
def test_what_a_launched_run_leaves_behind(tmp_path):
    """As after a start on this machine: an exported model, and the command that evaluates it."""
    finished(tmp_path)
    words = [sys.executable, "edt.py", "--follow", str(tmp_path / "run"), "--finish"]
    with subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout
        said = following.stdout.read()
    assert following.returncode == 0 and "The run is over after " in said
    assert f"Exported (average): {tmp_path / 'run' / 'export'}" in said and "Evaluate it: lm_eval" in said


def test_the_tokens_of_several_texts_are_not_so_many_tokens():
    assert [counted(n, "tokens") for n in (1, 2)] == ["tokens", "tokens of 2 texts"]


def test_nobody_has_begun(toys):
    run: Toys = toys().prepare()
    assert Progress(run.history(), 4).making() == "the workers are starting"


def test_something_is_said_while_the_first_recipe_is_made(toys):
    """Before its maker's pulse tells how far it is, and before anything was moved."""
    run: Toys = toys().prepare()
    events = run.folder / "workers" / "anna.events"
    notes = [{"at": 1e9, "what": what} for what in ("started", "planned", "claimed")]
    events.write_text("".join(json.dumps(each) + "\n" for each in notes))
    assert Progress(run.history(), 4).making() == "the workers are starting"


def test_the_workers_of_the_next_launch_are_starting(toys):
    """What those of the one before have made says nothing of them."""
    run: Toys = toys().prepare()
    notes = [{"at": 1e9, "what": "started", "launch": 1}, {"at": 1e9, "what": "made", "id": "1/m0"}]
    (run.folder / "workers" / "anna.events").write_text("".join(json.dumps(each) + "\n" for each in notes))
    for said in ("", "the workers are starting"):
        progress = Progress(run.history(), 4)
        progress.look_around()
        assert progress.making() == said
        launches.begin(progress.history.store, {})


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
        return {**make(work), "tokens": 1000}

    store, _ = open_run(run.folder, clock, "here")
    assert Worker(store, strategy(run.config), watched, options(run.config, 1)).run() == "over"
    known = [seconds for seconds in told if seconds is not None]
    assert told[:5] == [None] * 5 and len(known) > 15, told
    assert 140 < known[0] <= 160 and known[-1] < 20, known
    assert all(0 <= a - b <= 20 for a, b in zip(known, known[1:], strict=False)), known
    watching.look_far()
    after = TimeLeft(watching, 5)
    for each in (left, after):
        each.learn()
    assert left.tokens == 1000 * len(told) and after.tokens == 0, "of this start alone"


def test_what_a_fork_carries_over_is_not_told_again(toys, capsys):
    """It makes its tokens anew: round 0 is open, and the rounds after it are not."""
    run: Toys = toys(max_generations=2).prepare()
    run.work()
    for register in (run.folder / "rounds" / "00000").glob("init-0.*"):
        register.unlink()
    progress = Progress(run.history(), 2)
    run.work()
    progress.show(last=True)
    said = capsys.readouterr().out
    assert "round 0: init" in said and "round 1: " not in said


@pytest.mark.parametrize(
    "seconds, words", [(0.6, "1 second"), (119, "119 seconds"), (120, "2 minutes"), (2e5, "2 days")]
)
def test_time_is_said_as_people_do(seconds, words):
    assert duration(seconds) == words

"""`python -m fleet.status RUN_DIR`: what it shows of a running, a stopped and a finished run; it only reads."""

import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Group

from fleet import launches
from fleet.console import console
from fleet.status import View, printed
from tests.helpers import MISHAPS, Started, Toys, kill, listing, until

STATUS = [sys.executable, "-m", "fleet.status"]


def status(run: Toys, *more: str) -> str:
    """What it says, when it has changed nothing."""
    before = listing(run.place / "runs")
    shown = run.run([*STATUS, str(run.folder), *more])
    shown.ends(0)
    assert listing(run.place / "runs") == before
    assert "Traceback" not in shown.said
    return re.sub(r"[ ─━┃│┏┓┗┛└┘┡┩╇┳┴┬]+", " ", shown.said)


def standing_still(toys) -> tuple[Toys, list[Started]]:
    """A run with two workers that are frozen in the middle of two of four members; a third has died."""
    run: Toys = toys(sleep=30.0, inner_steps=300).prepare()
    run.work(recipes=1)
    workers = [run.worker(name) for name in ("anna", "berta", "caesar")]
    until(lambda: len(run.makers("00001/m.")) == 3, "all are busy")
    until(lambda: run.registers("00000/summary"), "the logger has seen round 0")
    for worker in workers:
        worker.freeze()
    kill(workers[2].process.pid)
    workers[2].end()
    return run, workers


def test_a_running_one(toys):
    run, _ = standing_still(toys)
    said = status(run)
    assert "1 rounds finished; 2 workers" in said and " was lost; before that " in said
    makers = {worker: id[2:] for worker, id in run.makers("00001/m.").items()}
    for worker in ("anna", "berta", "caesar"):
        assert f"{makers[worker]} by {worker}" in said
    assert f"{makers['caesar']} by caesar, who looks dead" in said and said.count("looks dead") >= 1
    (free,) = {"m0", "m1", "m2", "m3"} - set(makers.values())
    row = next(line for line in said.splitlines() if line.strip().startswith("1 0 of 5"))
    assert f" {free} " in row
    assert f"1/{free}" in said, "the second round waits for it, too"


def test_a_finished_one(toys):
    run: Toys = toys()
    run.start(2).ends(0)
    said = status(run)
    assert "5 rounds finished; the run is over" in said
    made = len(run.registers(r".*\.done"))
    assert f"{made} made" in said and "4/average loss=" in said
    assert "Last errors" not in said


def test_a_stopped_one(toys):
    run: Toys = toys(script=MISHAPS, mishap="verdict")
    run.start(1).ends(1)
    said = status(run)
    assert "stopped: 0/bad cannot be made: it does not converge" in said
    assert "Last errors" in said and "local-0-" in said


def test_one_that_was_interrupted(toys):
    run: Toys = toys().prepare()
    run.work(recipes=3)
    assert "nobody works on it now; start it again to go on" in status(run)
    launches.end(run.history().store, "the budget")
    assert "stopped: the run was ended by the budget" in status(run)


def test_one_that_nobody_has_worked_on_yet(toys):
    run: Toys = toys().prepare()
    assert "0 rounds finished" in status(run)


@pytest.mark.slow
def test_one_whose_recipes_fail(toys):
    run: Toys = toys(script=MISHAPS, mishap="raise", spared=True)
    run.start(1).ends(0)
    said = status(run)
    assert "Last errors" in said and "failed 0/bad" in said and "the card is on fire" in said


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a file", "a folder of other things"])
def test_a_folder_that_is_no_run(toys, there):
    run: Toys = toys()
    match there:
        case "an empty folder":
            run.folder.mkdir(parents=True)
        case "a file":
            run.folder.parent.mkdir()
            run.folder.write_text("")
        case "a folder of other things":
            (run.folder / "rounds").mkdir(parents=True)
    before = listing(run.place)
    shown = run.run([*STATUS, str(run.folder)])
    shown.ends(2)
    assert f"{run.folder}: not the folder of a run" in shown.said and "Traceback" not in shown.said
    assert listing(run.place).keys() - before.keys() == {shown.out.name}


@pytest.mark.slow
def test_watching_shows_what_changes_until_ctrl_c(toys):
    run, workers = standing_still(toys)
    watching = run.run([*STATUS, str(run.folder), "--watch"], env={**os.environ, "FORCE_COLOR": "1", "LINES": "100"})
    until(lambda: "Open rounds" in watching.said, "a first picture")
    for worker in workers[:2]:
        worker.thaw()
        worker.send(signal.SIGTERM)
        worker.ends(130)
    until(lambda: watching.said.count("Open rounds") > 1 and "ended" in watching.said, "what has changed")
    watching.send(signal.SIGINT)
    watching.ends(130)
    assert "Traceback" not in watching.said


def test_watching_ends_with_the_run(toys):
    run: Toys = toys().prepare()
    run.work(recipes=3)
    watching = run.run([*STATUS, str(run.folder), "--watch"])
    run.work()
    watching.ends(0)
    assert "the run is over" in watching.said


@pytest.mark.parametrize("command", ["status", "report", "ancestry"])
def test_nobody_listens(toys, command):
    """A pipe whose reader has gone, or a full disk: output is for people, and no traceback helps them."""
    run: Toys = toys()
    run.start(1).ends(0)
    words = [sys.executable, "-m", f"fleet.{command}", str(run.folder)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1) and "No space left on device" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken:
        done = subprocess.run(words, stdout=broken, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_goes_on_where_nobody_listens(toys):
    run: Toys = toys()
    started = run.start(1, before=("sh", "-c", 'exec "$@" > /dev/full', "sh"))
    started.ends(0)
    assert "Traceback" not in started.said and "No space left on device" in started.said
    assert run.is_over()


def test_the_digest_of_a_run(toys):
    run: Toys = toys()
    run.start(2).ends(0)
    asked = run.run([sys.executable, "-m", "fleet.digest", str(run.folder), str(run.folder)])
    asked.ends(0)
    assert asked.said == f"{run.digest()}  {run.folder}  (5 rounds, over)\n" * 2
    missing = run.run([sys.executable, "-m", "fleet.digest", str(run.place)])
    missing.ends(2)
    assert "not the folder of a run" in missing.said and "Traceback" not in missing.said


@pytest.mark.parametrize(("columns", "lines"), [(40, 24), (80, 24), (200, 30)])
def test_it_fits_a_terminal(toys, columns, lines):
    """However many workers and errors there are, each row is one line."""
    run: Toys = toys(max_generations=30).prepare()
    run.work(recipes=3)
    for n in range(40):
        lines_of = [{"at": 1e9 + n, "what": "failed", "id": "1/m1", "why": "pip install" + " word" * 50}]
        notes = "".join(json.dumps(each) + "\n" for each in lines_of)
        (run.folder / "workers" / f"worker-{n}.events").write_text(notes)
    text = io.StringIO()
    console(text, columns).print(Group(*View(run.folder).picture(lines - 1, columns)))
    shown = text.getvalue().splitlines()
    assert len(shown) < lines and max(map(len, shown)) <= columns
    assert any(line.startswith("Workers") for line in shown) and any(" earlier ones" in line for line in shown)
    text = io.StringIO()
    printed(console(text, columns), View(run.folder).picture())
    assert text.getvalue().count(" word" * 50 + "\n") == 5, "what is to be copied is not broken"

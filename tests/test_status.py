"""`python -m fleet.status RUN_DIR`: what it shows of a running, a stopped and a finished run; it only reads."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from rich.console import Group

from fleet import launches
from fleet.claims import Claims, Watch
from fleet.console import console
from fleet.disk import Disk
from fleet.host import Host
from fleet.run import open_run
from fleet.silent_workers import silent
from fleet.status import View, metrics_text, printed
from tests.commands import answer
from tests.helpers import MISHAPS, Started, Toys, kill, listing, until

STATUS = [sys.executable, "-m", "fleet.status"]


def status(run: Toys, *more: str) -> str:
    """What it says, when it has changed nothing."""
    before = listing(run.place / "runs")
    code, said, errors = answer("-m", "fleet.status", str(run.folder), *more, env={"COLUMNS": "80"})
    assert (code, errors) == (0, "")
    assert listing(run.place / "runs") == before
    return re.sub(r"[ ─━┃│┏┓┗┛└┘┡┩╇┳┴┬]+", " ", said)


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
    assert "0 rounds finished; 2 workers" in said and " was lost; before that " in said
    makers = {worker: id[2:] for worker, id in run.makers("00001/m.").items()}
    for worker in ("anna", "berta", "caesar"):
        assert f"{makers[worker]} by {worker}" in said
    assert f"{makers['caesar']} by caesar, who looks dead" in said and said.count("looks dead") >= 1
    (free,) = {"m0", "m1", "m2", "m3"} - set(makers.values())
    row = next(line for line in said.splitlines() if line.strip().startswith("1 0 of 5"))
    assert f" {free} " in row
    assert f"1/{free}" in said, "the second round waits for it, too"


def pulse(run: Toys, worker: str, at: float, machine: str, **more: Any) -> None:
    """What a worker said at a moment."""
    file = run.folder / "workers" / f"{worker}.pulse"
    file.write_text(json.dumps({"beat": 1, "launch": 1, "machine": machine, **more}))
    os.utime(file, (at, at))


def test_a_silent_machine_is_named_before_it_counts_as_dead(toys):
    run: Toys = toys().prepare()
    store, now = open_run(run.folder, Host(), "test")[0], time.time()
    pulse(run, "anna", now, "gpu1")
    for worker, ago in (("berta-0", 45), ("berta-1", 50)):
        pulse(run, worker, now - ago, "gpu2")
    assert silent(store, 1, 60.0) == ["machine gpu2 has not been heard of for 45 seconds"]
    assert "machine gpu2 has not been heard of for 45 seconds" in status(run)
    pulse(run, "berta-1", now, "gpu2")
    assert silent(store, 1, 60.0) == ["worker berta-0 has not been heard of for 45 seconds"]
    pulse(run, "berta-0", now - 20, "gpu2")
    assert silent(store, 1, 60.0) == [], "a network disk may show what is half a minute old"
    for worker in ("anna", "berta-0", "berta-1"):
        pulse(run, worker, now - 240, "gpu1")
    assert silent(store, 1, 60.0) == ["nobody has been heard of for 4 minutes, if this machine's clock is right"]
    assert silent(store, 2, 60.0) == [], "of another launch"


def test_what_a_worker_does_is_what_it_has_claimed_last(toys):
    """Its pulse still tells of what it has finished since, and its notes are older."""
    run: Toys = toys().prepare()
    run.work(recipes=3)
    notes = [{"at": time.time() - 600, "what": what, "id": "0/init-0"} for what in ("started", "claimed")]
    (run.folder / "workers" / "berta.events").write_text("".join(json.dumps(each) + "\n" for each in notes))
    store, history = open_run(run.folder, Host(), "berta")[0], run.history()
    (id, _), *_ = history.unfinished()
    pulse(run, "berta", time.time(), "gpu1", doing="0/init-0", unit="step", done=5, of=9)
    assert Claims(store, history, Watch(store, Host(), 60.0), 1).take(id)
    assert re.search(rf"berta .* making {id} \d+ seconds?", status(run)), "not the age of older notes"
    pulse(run, "berta", time.time(), "gpu1", doing=id, unit="step", done=30, of=300)
    assert f" making {id} step 30 of 300 " in status(run)


@pytest.mark.parametrize("size, more", [(8, 0), (10, 3)])
def test_members_that_are_not_shown_are_counted(toys, size, more):
    run: Toys = toys(population_size=size, max_generations=1).prepare()
    assert run.work() == "over"
    said, last = status(run), [member.id for member in run.history().round(1)]
    assert [word for word in said.split() if word.startswith("1/")] == last[more:] and len(last) == size + 1
    assert ("and 3 more before these" in said) == bool(more)


def test_a_finished_one(toys):
    run: Toys = toys()
    run.start(2).ends(0)
    said = status(run)
    assert "4 rounds finished; the run is over" in said
    made = len(run.registers(r".*\.done"))
    assert f"{made} made" in said and "4/average loss=" in said
    (summary,) = [line for line in said.splitlines() if line.startswith("4/average ")]
    assert summary.endswith(" (validation)"), "toys have no other questions"
    assert "Last errors" not in said
    shares = re.search(r"of their time (\d+)% at work, (\d+)% for the disk, (\d+)% for others", said)
    assert shares and 99 <= sum(map(int, shares.groups())) <= 101 and int(shares[1]) > 0
    made = run.events("made")
    assert made and all(0 <= event["disk"] <= event["seconds"] + 2e-3 for event in made)


def test_time_for_the_disk_is_what_its_first_user_waits(tmp_path):
    disk = Disk(tmp_path)
    disk.call("slow", time.sleep, 0.05)
    assert 0.05 <= (waited := disk.seconds) < 5
    aside = threading.Thread(target=disk.call, args=("aside", time.sleep, 0.05))
    aside.start()
    aside.join()
    assert disk.seconds == waited


def test_a_stopped_one(toys):
    run: Toys = toys(script=MISHAPS, mishap="verdict")
    stopped = run.start(1)
    stopped.ends(1)
    assert f"Their log: {run.folder / 'workers' / 'local-1.log'}" in stopped.said
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
    above = run.run([*STATUS, str(run.folder.parent)])
    above.ends(2)
    assert f"not the folder of a run; runs that lie in it: {run.folder.name}" in above.said


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


def test_watching_ends_where_nobody_reads_any_more(toys):
    """`status --watch | head -3` does not go on until the run is over."""
    run: Toys = toys().prepare()
    run.work(recipes=3)
    shell = ["sh", "-c", '"$@" | head -3; echo ended', "sh", *STATUS, str(run.folder), "--watch"]
    watching = run.run(shell)
    until(lambda: "ended" in watching.said, "it ends", 20)
    watching.ends(0)
    assert "rounds finished" in watching.said and "Traceback" not in watching.said and not run.is_over()


@pytest.mark.parametrize("command", ["status", "report", "ancestry"])
def test_nobody_listens(toys, command):
    """A pipe whose reader has gone, a full disk, no output at all: it is for people, and no traceback helps them."""
    run: Toys = toys().prepare()
    assert run.work() == "over"
    words = [sys.executable, "-m", f"fleet.{command}", str(run.folder)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1) and "No space left on device" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as broken:
        done = subprocess.run(words, stdout=broken, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], stderr=subprocess.PIPE, text=True, check=False)
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.mark.parametrize("where, said", [("/dev/full", "No space left on device"), ("&-", "")])
def test_a_run_goes_on_where_nobody_listens(toys, where, said):
    run: Toys = toys()
    started = run.start(1, before=("sh", "-c", f'exec "$@" >{where}', "sh"))
    started.ends(0)
    assert "Traceback" not in started.said and said in started.said
    assert run.is_over()


def test_the_digest_of_a_run(toys):
    run: Toys = toys().prepare()
    assert run.work() == "over"
    asked = run.run([sys.executable, "-m", "fleet.digest", str(run.folder), str(run.folder)])
    asked.ends(0)
    assert asked.said == f"{run.digest()}  {run.folder}  (4 rounds, over)\n" * 2
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


def test_only_what_people_read_is_shown_of_metrics():
    found = {"loss": 1.5, "each": "[1, 2]", "objectives": '{"a": 1}', "stepped_from": "0a" * 16, "source": "my.txt"}
    found["digest"] = "0a" * 32
    assert metrics_text(found) == "loss=1.5 source=my.txt"

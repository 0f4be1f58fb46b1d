"""Clocks a year apart, and clocks that jump: nothing is decided by them, and what is shown makes sense."""

import html
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from fleet.report.run_reader import RunReader
from fleet.worker_notes import NotesReader, WorkerNotes
from tests.helpers import Toys, until

pytestmark = pytest.mark.skipif(not shutil.which("faketime"), reason="NOT TESTED: no faketime here")
BACK, AHEAD = (("env", "FAKETIME_DONT_FAKE_MONOTONIC=1", "faketime", "-f", shift) for shift in ("-1y", "+1y"))
DAY = 86400


def rows(said: str) -> dict[str, str]:
    """The age of each worker's last word, as the status shows it."""
    lines = [line.split("│") for line in said.splitlines() if line.count("│") == 8]
    return {line[1].strip(): line[7].strip() for line in lines}


def small(age: str) -> bool:
    return bool(re.fullmatch(r"\d+ seconds?|[2-9] minutes", age))


def jumping(place: Path) -> tuple[tuple[str, ...], Path]:
    """A clock that says what a file says: it is set back."""
    file = place / "clock"
    file.write_text("+1y")
    (library,) = Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")
    keys = {"LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": file, "FAKETIME_NO_CACHE": 1,
            "FAKETIME_DONT_FAKE_MONOTONIC": 1}  # fmt: skip
    return ("env", *(f"{key}={value}" for key, value in keys.items())), file


@pytest.mark.slow
def test_workers_whose_clocks_are_a_year_apart(toys):
    run: Toys = toys(sleep=0.15, max_generations=30).prepare()
    jumps, clock = jumping(run.place)
    workers = {"past": BACK, "future": AHEAD, "now": (), "jumper": jumps}
    for name, before in workers.items():
        run.worker(name, before)
    until(lambda: {event["worker"] for event in run.events("made")} >= {*workers}, "all have made something")
    clock.write_text("-1y")
    shown = run.run([sys.executable, "-m", "fleet.status", str(run.folder)])
    shown.ends(0)
    assert all(small(rows(shown.said)[name]) for name in ("past", "future", "now")), shown.said
    for each in run.started:
        each.ends(0)
    run.same()
    last = {name: raw(run, name) for name in workers}
    assert last["past"] + 300 * DAY < last["now"] < last["future"] - 300 * DAY, "their clocks really were apart"
    looked(run)


def raw(run: Toys, name: str) -> float:
    """What a worker's own clock said last."""
    line = (run.folder / f"workers/{name}.events").read_text().splitlines()[-1]
    return float(re.search(r'"at":([0-9.]+)', line)[1])


def looked(run: Toys) -> None:
    """From now, from a machine whose clock is behind, and from one whose clock is ahead."""
    for before in ((), BACK):
        shown = run.run([*before, sys.executable, "-m", "fleet.status", str(run.folder)])
        shown.ends(0)
        ages = rows(shown.said)
        assert len(ages) >= 4 and all(small(age) for age in ages.values()), shown.said
        file = run.place / "page.html"
        run.run([*before, sys.executable, "-m", "fleet.report", str(run.folder), "--out", str(file)]).ends(0)
        page = html.unescape(re.sub("<[^>]+>", " ", file.read_text()))
        assert "days since the start" not in page and not re.search(r"Time\s+3\d\d d", page)
    facts = RunReader(run.folder).look()
    ends = [session.end for row in facts.rows for session in row.sessions]
    assert max(ends) - facts.began < DAY


def test_a_copy_that_has_other_times_is_read_as_it_was(toys):
    """Notes of a day ago, whose file is of now: the clock was right, the file is a copy."""
    run: Toys = toys().prepare()
    run.work()
    file = run.folder / "workers/here.events"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([re.sub(r'"at":[0-9.]+', '"at":1700000000', first), *rest]) + "\n")
    store = run.history().store
    (noted,) = NotesReader(store, WorkerNotes).look()
    assert noted.first == 1_700_000_000 and noted.last - noted.first > 300 * DAY
    for each in (file, run.folder / "run.json"):
        os.utime(each, (2e9, 2e9))
    assert NotesReader(store, WorkerNotes).look() == [noted]

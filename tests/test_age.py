"""What a run costs does not grow with its age: counted, not timed."""

import gc
import os
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import pytest

from fleet.archive import KEPT, WorkerArchive
from fleet.digest import digest
from fleet.events import Events
from fleet.history import History, opened
from fleet.host import Host
from fleet.launches import latest
from fleet.processes import options
from fleet.report.run_reader import RunReader
from fleet.run import open_run
from fleet.worker import Worker
from fleet.worker_notes import TAIL, NotesReader, WorkerNotes
from tests.helpers import Toys, until
from tests.toy.maker import maker
from tests.toy.strategies import strategy

KEYS = {"algorithm": "rank", "population_size": 3, "elitism": 1, "size": 4, "inner_steps": 1, "max_generations": 90}
SPAN = 20  # rounds over which operations are counted


def held(*things: Any) -> int:
    """How many objects they hold, but for what belongs to the interpreter."""
    seen, todo = set[int](), [*things]
    while todo:
        one = todo.pop()
        if id(one) not in seen and not isinstance(one, (type, ModuleType, FunctionType)):
            seen.add(id(one))
            todo += gc.get_referents(one)
    return len(seen)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toys, dict[int, tuple[int, int]]]:
    """A run that is over, and what its only worker held and had asked of the disk after so many rounds."""
    run = Toys(tmp_path_factory.mktemp("age"), dict(KEYS)).prepare()
    host, seen = Host(), dict[int, tuple[int, int]]()
    store, _ = open_run(run.folder, host, "here")

    def report(history: History) -> None:
        for round in range(max(0, history.first_open - 3), history.first_open):
            history.sum_up(round)  # as a logger does
        worker.events.flush()
        parts = (worker.context, worker.scheduler, worker.execution, worker.elastic)
        seen.setdefault(history.first_open, (held(*parts), store.ops))

    how = replace(options(run.config, latest(store)), tick_seconds=0.0)
    worker = Worker(store, strategy(run.config), maker(run.config), how, report)
    assert worker.run() == "over"
    return run, seen


def test_a_worker_remembers_and_does_no_more_in_late_rounds_than_in_early_ones(old):
    _, seen = old
    (early, ops), (late, more) = seen[40], seen[80]
    assert late < 1.1 * early
    assert more - seen[80 - SPAN][1] < 1.1 * (ops - seen[40 - SPAN][1])


def test_whoever_looks_back_opens_a_file_for_each_round(old):
    run, _ = old
    history, plain = opened(run.folder), opened(run.folder)
    began = history.store.ops
    wanted = digest(history)
    with_summaries = history.store.ops - began
    for each in run.folder.glob("rounds/*/summary"):
        each.rename(each.with_name("not-a-register"))
    try:
        began = plain.store.ops
        assert digest(plain) == wanted
        assert with_summaries < 0.9 * (plain.store.ops - began)
    finally:
        for each in run.folder.glob("rounds/*/not-a-register"):
            each.rename(each.with_name("summary"))
    assert held(history) < 1.2 * held(plain)


def test_a_look_at_notes_reads_what_is_new(old):
    run, _ = old
    store, _ = open_run(run.folder, Host(), "test")
    notes = NotesReader(store, WorkerNotes)
    (first,) = notes.look()
    made = len(run.registers(r".*\.done"))
    assert first.made == made and notes.bytes_read > 1000
    begun, events = notes.bytes_read, Events(store)
    assert len(notes.look()) == 1 and notes.bytes_read == begun
    for n in range(2000):  # more than whoever comes late reads of it
        events.note("made", f"1/m{n}", seconds=1.0, written=1, read=2, why="x" * 100)
    events.flush()
    late, size = NotesReader(store, WorkerNotes), (run.folder / "workers" / "test.events").stat().st_size
    for seen in (notes, late):
        (test,) = [each for each in seen.look() if each.name == "test"]
        assert (test.made, test.written, test.read) == (2000, 2000.0, 4000.0)
    assert late.bytes_read - begun <= TAIL < size
    (run.folder / "workers" / "test.events").unlink()


def test_notes_of_those_who_are_gone_are_put_away_and_still_count(toys):
    run: Toys = toys().prepare()
    report = RunReader(run.folder)
    for n in range(KEPT + 20):
        store, _ = open_run(run.folder, Host(), f"local-{n}-{n:08x}")
        events = Events(store)
        events.note("started", launch=1, machine="here")
        events.note("made", "0/init-0", seconds=1.0, written=10, read=20)
        events.flush()
        store.post(f"workers/{store.name}.pulse", "{}")
        os.utime(run.folder / f"workers/{store.name}.events", (n, n))
    before = report.look()
    store, _ = open_run(run.folder, Host(), "sweeper")
    archive = WorkerArchive(store, Events(store), patience=0.0)
    until(lambda: archive.tidy() and not [*run.folder.glob("workers/*.pulse")], "the pulses are removed")
    archive.tidy()
    assert len([*run.folder.glob("workers/*.events")]) == KEPT + 1 and len([*run.folder.glob("workers/ended/*")]) == 20
    found = NotesReader(store, WorkerNotes).look()
    assert sum(each.made for each in found) == KEPT + 20 and sum(each.read for each in found) == 20 * (KEPT + 20)
    for seen in (report.look(), RunReader(run.folder).look()):
        assert seen.written == before.written == 10 * (KEPT + 20)
        assert sum(row.made for row in seen.rows if row.name != "sweeper") == KEPT + 20


def test_who_was_only_paused_begins_new_notes(toys):
    run: Toys = toys().prepare()
    store, _ = open_run(run.folder, Host(), "paused")
    events = Events(store)
    events.note("started", launch=3, machine="here")
    events.note("made", "0/init-0", seconds=1.0, written=10, read=20)
    events.flush()
    (run.folder / "workers/ended").mkdir()
    (run.folder / "workers/paused.events").rename(run.folder / "workers/ended/paused.0.events")
    WorkerArchive(store, events, patience=0.0).tidy()
    events.note("made", "1/m0", seconds=1.0, written=1, read=2)
    events.flush()
    (found,) = NotesReader(store, WorkerNotes).look()
    assert (found.made, found.written, found.launch, found.machine) == (1, 1.0, 3, "here")

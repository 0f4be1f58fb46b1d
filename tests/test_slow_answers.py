"""Where the disk is slow to answer, calls are made side by side, and who need not look does not; one slow answer is
forgotten."""

import itertools
import threading
import time
from functools import partial

from fleet.bell import Bell
from fleet.digest import digest
from fleet.disk_store import DiskStore
from fleet.host import Host
from fleet.lane import Lane
from fleet.run import open_run
from tests.helpers import LONG, until
from tests.toy.config import ToyConfig
from tests.toy.maker import maker
from tests.toy.workers import TOY, seen, toy


def test_short_calls_come_one_after_the_other_until_one_takes_its_time():
    host, threads = Host(), list[int]()
    host.in_short([lambda: threads.append(threading.get_ident())] * 5)
    assert threads == [threading.get_ident()] * 5

    there = threading.Barrier(3)
    host.in_short([partial(time.sleep, 0.05), *[partial(there.wait, 60)] * 3])  # each of the three waits for the others


class Slow(DiskStore):
    """Each file takes its time to come, and how many are on their way at once is counted."""

    reading, most, lock = 0, 0, threading.Lock()

    def blocks(self, name):
        with Slow.lock:
            Slow.reading += 1
            Slow.most = max(Slow.most, Slow.reading)
        time.sleep(0.02)
        yield from super().blocks(name)
        with Slow.lock:
            Slow.reading -= 1


def test_small_files_are_read_side_by_side_where_the_disk_is_slow(tmp_path, monkeypatch):
    assert toy(tmp_path / "fast").run() == "over"
    monkeypatch.setattr(Slow, "most", 0)
    worker = toy(tmp_path / "slow")
    worker.store.__class__ = Slow
    assert worker.run() == "over" and Slow.most > 1
    assert not worker.store.at_hand._files, "what was not asked for is forgotten"
    assert digest(seen(tmp_path / "slow")) == digest(seen(tmp_path / "fast"))


def test_a_first_lane_that_waits_for_another_worker_leaves_looking_to_the_second(tmp_path, monkeypatch):
    keys, held, go = {"algorithm": "matching", "population_size": 2}, threading.Event(), threading.Event()
    assert toy(tmp_path / "plain", **keys).run() == "over"
    made = maker(ToyConfig(**{"project_name": "run", **TOY, **keys}))

    def holds(work):
        if work.id.startswith("2/m"):
            held.set()
            assert go.wait(LONG)
        return made(work)

    other = threading.Thread(target=toy(tmp_path / "two", "other", holds, **keys).run)
    other.start()
    assert held.wait(LONG)
    worker = toy(tmp_path / "two", "lanes", disk_lane=True, **keys)
    worker._until_tick = worker._second._until_tick = 1e9
    looks = {worker: 0, worker._second: 0}
    for each in looks:

        def look(probe=0, each=each, known=each.history.look):
            looks[each] += 1
            return known(probe)

        monkeypatch.setattr(each.history, "look", look)

    def rings():
        until(lambda: worker._waits_since > 0 and worker._attended(), "the first lane waits")
        first = looks[worker]
        for _ in range(5):
            seen_before = looks[worker._second]
            Bell(other_store).ring()
            until(lambda before=seen_before: looks[worker._second] > before, "the second lane looks")
        found.append(looks[worker] - first)
        go.set()

    found, other_store = list[int](), open_run(tmp_path / "two" / "run", Host(), "bell")[0]
    ringing = threading.Thread(target=rings)
    ringing.start()
    assert worker.run() == "over"
    ringing.join()
    other.join()
    assert found == [0]
    assert digest(seen(tmp_path / "two")) == digest(seen(tmp_path / "plain"))


def test_a_first_lane_goes_on_with_what_it_knows_to_be_free(tmp_path, monkeypatch):
    """However long the second one rests, which has nothing to make."""

    def rest(lane, seconds):
        lane._called = False
        while not (lane.hurry() or lane._called):
            time.sleep(0.001)

    monkeypatch.setattr(Lane, "rest", rest)
    worker = toy(tmp_path, algorithm="search", population_size=8, disk_lane=True)
    worker._until_tick = worker._second._until_tick = 1e9
    late = threading.Timer(LONG, worker.host.stop)
    late.start()
    assert worker.run() == "over"
    late.cancel()


def test_one_slow_tick_does_not_slow_all_later_ones(tmp_path, monkeypatch):
    """A disk hangs for ten seconds, once; from then on it answers at once."""
    worker, passed = toy(tmp_path, max_generations=2), [0.0]
    now, look = worker.host.now, worker.history.look
    monkeypatch.setattr(worker.host, "now", lambda: now() + passed[0])

    def hangs(probe=0):
        passed[0] = passed[0] or 10.0
        return look(probe)

    monkeypatch.setattr(worker.history, "look", hangs)
    worker.turn()
    assert worker._until_tick > 2 * worker._tick
    worker._ticked = -1e9
    worker.turn()
    assert worker._until_tick == worker._tick


def test_one_slow_look_does_not_make_a_long_recipe_deaf(tmp_path, monkeypatch):
    worker, asked, passed = toy(tmp_path, max_generations=2), list[float](), [0.0]
    now, made = worker.host.now, worker.execution.make
    monkeypatch.setattr(worker.host, "now", lambda: now() + passed[0])

    def make(work):
        wanted = work._wanted

        def hangs():
            passed[0] += 60.0 * (not asked)
            asked.append(passed[0])
            return wanted()

        monkeypatch.setattr(work, "_wanted", hangs)
        for step in range(600):  # seconds of training, in which the disk answers at once
            passed[0] += 1.0
            work.between_steps(step, lambda saver: None)
        return made(work)

    monkeypatch.setattr(worker.execution, "make", make)
    while not asked:
        worker.turn()
    assert max(after - before for before, after in itertools.pairwise(asked)) < 90

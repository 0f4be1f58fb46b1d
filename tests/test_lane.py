"""A worker's second lane: it publishes what was made and makes what needs no device, while the first one goes on; the
bytes are those of one lane, whoever is killed."""

import random
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleet import faults, planning
from fleet.at_hand import AtHand
from fleet.digest import digest
from fleet.disk_store import DiskStore
from fleet.history import History
from fleet.host import Host
from fleet.lane import Lane
from fleet.payload import PayloadWriter
from fleet.read_ahead import ReadAhead
from fleet.recipe import NotYet, round_and_slot
from fleet.round_state import register
from fleet.run import open_run
from fleet.run_config import UserError
from tests import small
from tests.helpers import LONG, kill, until
from tests.small import run_digest
from tests.toy.config import ToyConfig
from tests.toy.maker import maker
from tests.toy.workers import TOY, seen, toy
from train.training_commands import check_settings


class Held(DiskStore):
    """No outcome of a member stands, nor is there a file of it, before somebody says so."""

    go = threading.Event()

    def create(self, name, again=False):
        if ".m" in name and not name.startswith("files/00000"):
            assert self.go.wait(LONG)
        return super().create(name, again)

    def settle(self, name, value, durable=True):
        if name.endswith(".done") and "/m" in name and not name.startswith("rounds/00000"):
            assert self.go.wait(LONG)
        return super().settle(name, value, durable)


@pytest.mark.parametrize("algorithm", ["diloco", "matching", "search", "tournament"])
def test_the_bytes_are_those_of_one_lane(tmp_path, algorithm):
    keys = {"algorithm": algorithm, "population_size": 4}
    for lanes in (False, True):
        assert toy(tmp_path / str(lanes), disk_lane=lanes, **keys).run() == "over"
    one, two = (seen(tmp_path / str(lanes)) for lanes in (False, True))
    assert digest(one) == digest(two)


def test_a_child_is_made_before_its_parent_stands_or_is_on_the_disk(tmp_path):
    """And whatever the second lane has taken stands at the end."""
    Held.go = threading.Event()
    begun = list[str]()
    config = ToyConfig(**{"project_name": "run", **TOY, "algorithm": "matching", "population_size": 1})
    made = maker(config)

    def make(work):
        begun.append(work.id)
        found = made(work)
        if work.id == "2/m0":
            assert not (tmp_path / "run" / "rounds" / "00001" / "m0.0.done").exists()
            assert not [*(tmp_path / "run" / "files").glob("00001.m0.*/*")]
            Held.go.set()
        return found

    one = toy(tmp_path, make=make, kind=Held, algorithm="matching", population_size=1, disk_lane=True)
    assert one.run() == "over" and "2/m0" in begun
    assert seen(tmp_path).over and len(begun) == len(set(begun)), "nothing was made twice"


def test_large_files_wait_for_who_goes_on_at_once():
    published, naps = [], []

    class Napping(Host):
        def now(self) -> float:
            return 0.0  # however late a busy machine is, it has waited for no time

        def sleep(self, seconds: float) -> None:
            naps.append(seconds)
            super().sleep(seconds)

    def turn() -> bool:
        return lane.rest(0.01) is not None

    lane = Lane(Napping(), published.append, turn, lambda: None)
    lane.start()
    lane.enqueue("a")
    until(lambda: published == ["a"], "nobody knows yet what the first lane does")
    lane.looked(True)
    lane.enqueue("b")
    before = len(naps)
    until(lambda: len(naps) > before + 5, "it waits")
    assert published == ["a"]
    lane.looked(False)
    until(lambda: published == ["a", "b"], "the first lane has looked")
    lane.enqueue("c")
    until(lambda: published == ["a", "b", "c"], "the first lane found nothing, the last time")
    lane.end()


def test_the_first_lane_goes_on_by_what_the_second_has_seen(tmp_path, monkeypatch):
    """It looks at the disk itself now and then, and leaves plans and what is to be removed to the second one."""
    monkeypatch.setattr("fleet.worker._GLANCE", 0.0)
    monkeypatch.setattr("fleet.worker._SPAN", 0)
    keys = {"algorithm": "matching", "population_size": 1, "max_generations": 20}
    assert toy(tmp_path / "plain", **keys).run() == "over"
    made, happened = maker(ToyConfig(**{"project_name": "run", **TOY, **keys})), list[str]()

    def make(work):
        round, slot = round_and_slot(work.id)
        if slot == "m0":
            happened.append(work.id)
            second = worker.history.other
            until(lambda: second.ended or second.last > round, "the second lane has planned")
        return made(work)

    def noted(what, call, where=lambda: True):
        def noting(*args, **keys):
            if threading.current_thread() is threading.main_thread() and where():
                happened.append(what)
            return call(*args, **keys)

        return noting

    worker = toy(tmp_path / "lanes", make=make, disk_lane=True, **keys)
    monkeypatch.setattr(worker.history, "look", noted("look", worker.history.look))
    monkeypatch.setattr(planning, "prune", noted("prune", planning.prune, lambda: not worker.history.over))
    assert worker.run() == "over" and "prune" not in happened
    assert digest(seen(tmp_path / "lanes")) == digest(seen(tmp_path / "plain"))
    later = happened[happened.index("2/m0") : happened.index("20/m0")]
    assert 2 <= later.count("look") <= 6, "of 18 members and as many evaluations"


def two_views(place: Path) -> tuple[History, History]:
    """Of a run that is over, as two lanes have them."""
    one, other = (History(open_run(place / "run", Host(), "w")[0]) for _ in range(2))
    one.other, other.other = other, one
    return one, other


def test_what_the_second_lane_saw_and_a_crash_took_back_is_made_again(tmp_path):
    """The first one has found out, and does not believe the other for ever."""
    keys = {"algorithm": "matching", "population_size": 2}
    assert toy(tmp_path, **keys).run() == "over"
    one, other = two_views(tmp_path)
    one.look()  # as far as a lane is that looks once
    other.look_far()
    (tmp_path / "run" / register("2/m1", 0)).unlink()
    one.take_over()
    assert one.finished("2/m1")
    with pytest.raises(NotYet):
        one.outcome("2/m1")
    for _ in range(3):
        one.take_over()
        assert not one.finished("2/m1") and "2/m1" in dict(one.unfinished())


def test_a_round_is_complete_by_the_other_lanes_word_about_the_same_versions_alone(tmp_path, monkeypatch):
    assert toy(tmp_path, algorithm="matching", population_size=2).run() == "over"
    one, other = two_views(tmp_path)
    one.look_far(), other.look_far()
    old, store, synced = one.outcome("3/m0"), one.store, list[str]()
    store.settle(register("3/m0", 0, "void"), {"by": "another", "why": "a test"})
    one.reopen("3/m0")
    store.settle(register("3/m0", 1), {**old.record, "attempt": old.attempt.replace(".0.", ".1.")})
    sync = store.sync
    monkeypatch.setattr(store, "sync", lambda folder: (synced.append(folder), sync(folder)))
    one.look()
    assert "rounds/00003" in synced, "the other one knows nothing of version 1"
    one.reopen("3/m0")
    other.reopen("3/m0")
    other.look()
    one.forget(3)
    assert one.finished("3/m0") and other.finished("3/m0")


def test_a_first_lane_goes_back_to_what_it_holds(tmp_path, monkeypatch):
    """A disk did not answer while it was made: others wait for it, and nobody else takes it."""
    monkeypatch.setattr("fleet.worker._GLANCE", 0.0)
    monkeypatch.setattr("fleet.worker._SPAN", 0)
    keys, begun = {"algorithm": "matching", "population_size": 5, "max_generations": 6}, list[str]()
    made = maker(ToyConfig(**{"project_name": "run", **TOY, **keys}))

    def make(work):
        begun.append(work.id)
        if begun.count("3/m1") == 1 == begun[-1:].count("3/m1"):
            raise faults.Passing("3/m1: Stale file handle")
        return made(work)

    assert toy(tmp_path, make=make, disk_lane=True, **keys).run() == "over"
    assert begun[begun.index("3/m1") + 1] == "3/m1"


def test_what_ends_the_second_lane_ends_the_worker(tmp_path):
    config = ToyConfig(**{"project_name": "run", **TOY})
    made = maker(config)

    def make(work):
        if work.recipe.task == "outer":
            raise KeyboardInterrupt
        return made(work)

    with pytest.raises(KeyboardInterrupt):
        toy(tmp_path, make=make, disk_lane=True, dead_seconds=0.5).run()
    assert toy(tmp_path, name="other", disk_lane=True, dead_seconds=0.5).run() == "over"


def test_who_is_asked_to_end_gives_back_what_either_lane_holds_and_no_more(tmp_path):
    """A shard that was begun in vain; a member that the second lane has just published is nobody's any more."""
    made, held = maker(ToyConfig(**{"project_name": "run", **TOY})), threading.Event()

    def make(work):
        if "/shard-" in work.id and work.id.startswith("1/"):
            held.set()
            raise NotYet(work.id)
        if work.id.startswith("1/"):
            assert work.id != "1/m2" or held.wait(LONG)
        return made(work)

    worker = toy(tmp_path, make=make, disk_lane=True)
    stop = threading.Thread(target=lambda: held.wait(LONG) and worker.host.stop())
    stop.start()
    assert worker.run() == "interrupted"
    stop.join()
    store = worker.store
    for round in range(2):
        names = store.names(f"rounds/{round:05d}")
        left = {name.split(".")[0] for name in names if ".left." in name}
        claimed = {name.split(".")[0] for name in names if ".claim." in name}
        done = {name.split(".")[0] for name in names if name.endswith(".done")}
        assert left == claimed - done
        assert round == 0 or any(each.startswith("shard-") for each in left)


def test_a_members_files_are_written_side_by_side(tmp_path, monkeypatch):
    """A disk takes its time for each; and who has no room for one says so when the others are through."""
    store, full, ended = toy(tmp_path).store, list[str](), list[str]()
    create, both = store.create, threading.Barrier(2, timeout=LONG)

    def created(name, again=False):
        both.wait()
        if name in full:
            raise faults.Full(name)
        ended.append(name)
        return create(name, again)

    monkeypatch.setattr(store, "create", created)
    for attempt in ("00001.m0.0.one", "00001.m0.0.two"):
        writer = PayloadWriter(store, attempt, deferred=True)
        for name in ("a", "b"):
            writer.write(name, name.encode())
        if full:
            with pytest.raises(faults.Full):
                writer.seal()
            assert ended[2:] == ["files/00001.m0.0.two/b"]
        else:
            assert [*writer.seal()] == ["a", "b"] and not writer.held
            full.append("files/00001.m0.0.two/a")


def test_files_go_to_the_disk_beside_the_next_ones_but_few_at_a_time(tmp_path, monkeypatch):
    """All are there when it is sealed, and where it is dropped none stays open."""
    store, open_now, synced, most = toy(tmp_path).store, set[str](), list[str](), list[int]()
    create = store.create

    def created(name, again=False):
        file = create(name, again)
        sync, close = file.sync, file.close
        file.sync = lambda: (sync(), synced.append(name))
        file.close = lambda: (close(), open_now.discard(name))
        open_now.add(name)
        most.append(len(open_now))
        return file

    monkeypatch.setattr(store, "create", created)
    for attempt, end in (("00001.m0.0.one", PayloadWriter.seal), ("00001.m0.0.two", PayloadWriter.drop)):
        writer = PayloadWriter(store, attempt)
        for n in range(9):
            writer.write(f"f{n}", bytes(2 << 20 if n == 4 else n))
        assert open_now
        end(writer)
        assert not open_now and max(most) == 5  # four on their way, and the one that is written
    assert {f"files/00001.m0.0.one/f{n}" for n in range(9)} <= {*synced}


# -- reading ahead -----------------------------------------------------------------------------------------------------


class Noted(AtHand):
    """Which files were read ahead, and which of them somebody took."""

    def __init__(self):
        super().__init__()
        self.brought, self.taken = set[str](), set[str]()

    def take(self, place, host):
        if (found := super().take(place, host)) is not None:
            self.taken.add(place)
        return found

    @contextmanager
    def coming(self, place):
        with super().coming(place) as bring:
            yield lambda data: (bring(data), self.brought.add(place))


@pytest.mark.parametrize("algorithm", ["diloco", "matching"])
def test_while_one_trains_the_next_ones_files_are_read(tmp_path, monkeypatch, algorithm):
    keys = {"algorithm": algorithm, "population_size": 2}
    assert toy(tmp_path / "plain", **keys).run() == "over"
    monkeypatch.setattr("fleet.store.AtHand", Noted)
    made = maker(ToyConfig(**{"project_name": "run", **TOY, **keys}))

    def make(work):
        if work.id.startswith("3/") and work.recipe.args.get("steps") and not here.taken:
            until(lambda: here.brought, "something is read ahead")
        return made(work)

    worker = toy(tmp_path / "ahead", make=make, disk_lane=True, **keys)
    here = worker.store.at_hand
    assert worker.run() == "over" and here.taken
    assert digest(seen(tmp_path / "ahead")) == digest(seen(tmp_path / "plain"))


def test_what_is_being_made_counts_as_there_for_what_comes_next(monkeypatch):
    said = list[bool]()
    monkeypatch.setattr(ReadAhead, "_foreseen", lambda self, current: said.append(self._has(current)) or [])
    nothing = SimpleNamespace(at_hand=SimpleNamespace(keep=len), together=len)
    context = SimpleNamespace(store=nothing, host=nothing, has=lambda id: False)
    assert not ReadAhead(context, context, lambda: "5/replica-1").go_on(0.0, bool) and said == [True]


def test_what_a_shard_steps_from_is_written_while_everybody_trains(tmp_path):
    """By whoever has made the one before; and it is the attempt that stands."""
    assert toy(tmp_path / "plain").run() == "over"
    made = maker(ToyConfig(**{"project_name": "run", **TOY}))
    early = lambda: [*(tmp_path / "early/run/files").glob("00003.shard-0.*/before")]  # noqa: E731
    there = list[str]()

    def make(work):
        if work.id == "3/replica-2":
            steps = work.between_steps

            def slowly(step, save):
                steps(step, save)
                until(early, "the weights before the step are there")
                there.append(early()[0].parent.name)

            work.between_steps = slowly
        return made(work)

    assert toy(tmp_path / "early", make=make, disk_lane=True).run() == "over"
    history = seen(tmp_path / "early")
    assert digest(history) == digest(seen(tmp_path / "plain")) and there
    assert {history.outcome("3/shard-0").attempt} == {*there}


def test_what_another_makes_is_not_begun_in_vain_for_long(tmp_path):
    """What was begun early of a recipe that somebody else has claimed is removed."""
    worker = toy(tmp_path, disk_lane=False, max_generations=2)
    begun = worker.execution
    while not [*begun._likely()]:
        worker.turn()
    id, hurry = next(begun._likely()), lambda: False
    assert begun.begin_early(hurry)
    place = tmp_path / "run/files"
    name = id.split("/")[1]
    assert [*place.glob(f"*.{name}.*/before")]
    other = toy(tmp_path, name="other", disk_lane=False, max_generations=2)
    assert other.run() == "over"
    worker.history.look()
    begun.begin_early(hurry)
    stands = seen(tmp_path).outcome(id).attempt
    assert {file.parent.name for file in place.glob(f"0000{id[0]}.{name}.*/before")} == {stands}


def test_what_was_begun_of_an_input_that_was_made_again_does_not_count(tmp_path):
    worker = toy(tmp_path, disk_lane=False, max_generations=2)
    while not (likely := next(worker.execution._likely(), "")):
        worker.turn()
    assert worker.execution.begin_early(lambda: False)
    place, (round, slot) = tmp_path / "run", likely.split("/")
    (early,) = {file.parent.name for file in place.glob(f"files/0000{round}.{slot}.*/before")}
    old = f"{int(round) - 1}/{slot}"
    outcome, again = worker.history.outcome(old), f"0000{old[0]}.{slot}.1.again"
    shutil.copytree(place / "files" / outcome.attempt, place / "files" / again)
    store = open_run(place, Host(), "other")[0]
    store.settle(register(old, 0, "void"), {"by": "other", "why": "a test"})
    store.settle(register(old, 1), {**outcome.record, "attempt": again})
    assert worker.run() == "over"
    history = seen(tmp_path)
    assert history.outcome(old).attempt == again and history.outcome(likely).attempt != early
    assert not (place / "files" / early).exists()


# -- two halves take turns ---------------------------------------------------------------------------------------------

TURNS = {"algorithm": "diloco", "population_size": 4, "max_generations": 3, "overlap": 1}


def test_each_half_trains_from_a_model_without_what_the_other_learns_meanwhile(tmp_path):
    history = small.finished(tmp_path, **TURNS)
    recipes = {recipe.slot: recipe for recipe in history.plan(2)}
    shards = range(sum(recipe.task == "half" for recipe in history.plan(2)))
    assert recipes["replica-0"].parents == tuple(f"1/half-{s}" for s in shards)
    assert recipes["replica-1"].parents == tuple(f"1/shard-{s}" for s in shards)
    assert recipes["half-0"].parents == ("2/replica-0", "2/replica-2", "1/shard-0")
    assert recipes["shard-0"].parents == ("2/replica-1", "2/replica-3", "2/half-0")


@pytest.mark.parametrize("overlap", [0, 1])
def test_whoever_is_never_idle_evaluates_before_plans_wait_for_it(tmp_path, monkeypatch, overlap):
    """And while the model is in memory, of which the last round's members were made. Recipes are long: each is chosen
    anew."""
    monkeypatch.setattr("fleet.worker._GLANCE", 0.0)
    monkeypatch.setattr("fleet.worker._SPAN", 0)
    config, begun = small.config(**{**TURNS, "overlap": overlap, "max_generations": 7}), list[str]()
    made = small.maker(config)

    def make(work):
        begun.append(work.id)
        return made(work)

    assert small.worker(tmp_path, config, make=make).run() == "over"
    for round in range(1, 6):
        trained = [n for n, id in enumerate(begun) if id.startswith(f"{round + 2}/replica")]
        assert begun.index(f"{round}/global") < min(trained)


def test_an_exact_round_brings_the_mean_of_all_changes(tmp_path):
    """Of the first round, in which both halves begin at the first weights, and with numbers that lose nothing."""
    keys = {**TURNS, "max_generations": 1, "first_inner_steps": 4, "wire_dtype": "fp32"}
    both = [small.finished(tmp_path / str(n), **{**keys, "overlap": n}) for n in (0, 1)]
    losses = [history["1/global"].metrics["loss"] for history in both]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("keys, why", [
    ({"population_size": 1}, "two halves of the replicas take turns, and POPULATION_SIZE is 1"),
    ({"outer_momentum": 0.5}, "set OUTER_MOMENTUM to 0"),
    ({"quorum": 0.5}, "set QUORUM to 1"),
])  # fmt: skip
def test_what_goes_with_turns(keys, why):
    check_settings(small.config(**TURNS))
    with pytest.raises(UserError, match=why):
        check_settings(small.config(**{**TURNS, **keys}))


@pytest.mark.slow
@pytest.mark.parametrize("script, keys", [("diloco_sim.py", TURNS), ("edt_sim.py", {"population_size": 4})], ids=str)
def test_kills_in_both_lanes(pretraining, script, keys):
    """Real processes; SIGKILL whenever some more recipes were claimed."""
    keys = {"max_generations": 3, **keys}
    plain = pretraining(script, **keys)
    plain.start(1).ends(0, LONG)
    run, rng = pretraining(script, **keys, disk_lane=True), random.Random(3)
    starter = run.start(2)
    ended = lambda: starter.process.poll() is not None  # noqa: E731
    for kills in range(4):
        until(lambda n=kills: ended() or len(run.registers(r".*\.claim\..*")) > 6 * n, "it gets on", LONG)
        until(lambda: ended() or run.alive(), "a worker lives", LONG)
        for pid in rng.sample([*run.alive().values()], min(1, len(run.alive()))):
            kill(pid)
    starter.ends(0, LONG)
    assert run_digest(run) == run_digest(plain)

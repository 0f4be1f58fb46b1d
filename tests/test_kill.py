"""Real processes that are killed, stopped, resumed too late, interrupted, started twice: the same bytes in the end."""

import math
import os
import random
import re
import signal
from typing import Any

import pytest

from fleet import launches
from fleet.claims import Watch
from fleet.host import Host
from fleet.run import open_run
from fleet.status import View
from tests.helpers import LONG, MISHAPS, Started, Toys, freeze, kill, listing, one_of, state, until

# -- killed ------------------------------------------------------------------------------------------------------------


def test_a_storm_of_sigkill(toys):
    run: Toys = toys(population_size=6, max_generations=6, sleep=0.1, restarts=1000)
    starter, rng, kills = run.start(3), random.Random(1), 0
    while starter.process.poll() is None and kills < 6:
        until(lambda n=kills: len(run.registers(r".*\.done")) > 5 * n or starter.process.poll() is not None, "progress")
        if alive := run.alive():
            kill(rng.choice(sorted(alive.values())))
            kills += 1
    starter.ends(0)
    assert kills == 6 and starter.said.count("was killed by SIGKILL; another takes its place") >= 4
    run.same()


@pytest.mark.slow
def test_a_long_storm_of_sigkill_and_the_starter_killed_too(toys):
    """8 workers, 200 recipes, a random one killed for every four made: the rhythm is the run's own."""
    run: Toys = toys(population_size=19, max_generations=10, sleep=1.0, inner_steps=20, restarts=1000)
    starter, rng, made = run.start(8), random.Random(2), lambda: len(run.registers(r".*\.done"))
    for kills in range(1, 51):
        until(lambda n=kills: made() >= 4 * n, f"progress before kill {kills}", LONG)
        kill(rng.choice(sorted(until(run.alive, "somebody lives").values())))
        if kills == 15:
            kill(starter.process.pid)
            starter.end()
            starter = run.start(8)
    starter.ends(0)
    assert made() > 200
    run.same()


def test_the_starter_is_killed_and_its_workers_end_by_themselves(toys):
    run = long_recipes(toys)
    starter = run.start(2)
    until(lambda: len(busy(run)) == 2, "both are busy")
    kill(starter.process.pid)
    until(lambda: not run.alive(), "its workers end by themselves")
    assert {e["worker"] for e in run.events("released")} == set(busy(run)), "with a snapshot each"
    run.start(2, sleep=0.0).ends(0)
    assert run.events("resumed")
    run.same()


def long_recipes(toys, **keys) -> Toys:
    """A run whose members take half a minute each, in steps of a tenth of a second; round 0 is made."""
    run: Toys = toys(sleep=30.0, inner_steps=300, **keys).prepare()
    assert run.work(recipes=1) == "interrupted"
    return run


def busy(run: Toys) -> list[str]:
    """The workers that have been making something that takes long."""
    return sorted(run.makers("00001/m."))


# -- stopped, and resumed too late -------------------------------------------------------------------------------------


def stopped_before_publishing(run: Toys, worker: Started) -> str:
    """Freeze a worker when its member's files are whole and its register is not there; the member's name."""
    names, whole = ("weights", "momentum"), 8 * run.config.size

    def unpublished() -> str:
        for attempt in run.attempts():
            digits, slot, *_ = attempt.name.split(".")
            with_files = all((attempt / n).exists() and (attempt / n).stat().st_size == whole for n in names)
            if with_files and not run.registers(rf"{digits}/{slot}\..*done") and slot.startswith("m"):
                return f"{int(digits)}/{slot}"
        return ""

    for _ in range(60):
        until(unpublished, "a payload without a register", pause=0.0)
        freeze(worker.process.pid)
        if id := unpublished():
            return id
        worker.thaw()
    raise AssertionError("the moment between payload and publication was always missed")


SLOW_TO_PUBLISH = {"size": 1 << 18, "eval_batch_size": 1 << 18, "inner_steps": 1, "dead_seconds": 1.0}


def test_a_worker_stands_still_between_payload_and_publication(toys):
    """For longer than DEAD_SECONDS: others make it meanwhile, and what it publishes then counts for nothing."""
    run: Toys = toys(**SLOW_TO_PUBLISH, max_generations=3).prepare()
    late = run.worker("late")
    id = stopped_before_publishing(run, late)
    others = [run.worker(name) for name in ("a", "b")]
    register = f"{int(id.split('/')[0]):05d}/{id.split('/')[1]}.0.done"
    until(lambda: run.registers(register), "another makes it")
    assert run.register(register)["by"] in ("a", "b")
    late.thaw()
    for each in (late, *others):
        each.ends(0)
    assert lost_the_race(run, "late") == {id}
    assert all(folder.name == run.register(register)["attempt"] for folder in run.attempts(id)), "its files are dropped"
    run.same()


def lost_the_race(run: Toys, worker: str) -> set[str]:
    """It offered its member too late, or found its files pruned before it could offer them."""
    return {e["id"] for what in ("late", "behind") for e in run.events(what, of=worker)}


@pytest.mark.slow
def test_a_worker_comes_back_when_all_is_over(toys):
    """An hour late, as far as anybody can tell."""
    run: Toys = toys(**SLOW_TO_PUBLISH, max_generations=2).prepare()
    late = run.worker("late")
    id = stopped_before_publishing(run, late)
    run.worker("other").ends(0)

    def written() -> dict[str, dict[str, object]]:
        """What stands for good: what spares others a second look at a round may come at any time."""
        found = {k: listing(run.folder / k) for k in ("rounds", "launches")}
        return {k: {n: seen for n, seen in files.items() if (run.folder / k / n).is_file() and "summary" not in n}
                for k, files in found.items()}  # fmt: skip

    before = written()
    published = {run.register(path)["attempt"] for path in run.registers(".*done")}
    late.thaw()
    late.ends(0)
    assert written() == before
    assert {path.name for path in run.attempts()} <= published, "its files are dropped"
    assert not list(run.folder.glob("tmp/*"))
    assert lost_the_race(run, "late") == {id}
    run.same()


@pytest.mark.slow
def test_a_worker_that_was_killed_is_replaced_at_once(toys):
    """On the same machine nobody has to wait for its pulse to stand still."""
    run = long_recipes(toys, max_generations=1)
    dead = run.worker("dead")
    until(lambda: busy(run), "it is busy")
    kill(dead.process.pid)
    dead.end()
    watch = Watch(run.history().store, Host(), limit=math.inf)
    (claim,) = (run.register(path) for path in run.registers(r"00001/.*claim.*"))
    assert watch.dead(claim)
    assert run.work(name="other") == "over"
    run.same()


# -- interrupted -------------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_the_work_and_the_same_command_goes_on(toys):
    run = long_recipes(toys)
    starter = run.start(2)
    until(lambda: len(busy(run)) == 2, "both are busy")
    starter.send(signal.SIGINT)
    starter.ends(130, seconds=10)
    assert "Stopping at the next step" in starter.said and "The same command goes on" in starter.said
    assert not run.alive()
    saved = [path for attempt in run.attempts() for path in attempt.glob("snapshot.*.json")]
    assert len(saved) == 2 == len(run.events("released"))
    again = run.start(2, sleep=0.0)
    again.ends(0)
    assert "Going on with the run" in again.said
    assert len(resumed := run.events("resumed")) == 2 and all(e["step"] >= 1 for e in resumed)
    run.same()


def test_a_second_ctrl_c_ends_at_once(toys):
    run: Toys = toys(script=MISHAPS, mishap="sleep")
    starter = run.start(1)
    until(lambda: run.makers("00000/bad"), "it is deep in a step")
    starter.send(signal.SIGINT)
    until(lambda: "Ctrl-C again" in starter.said, "it says what a second one does")
    assert run.alive() and starter.process.poll() is None
    starter.send(signal.SIGINT)
    starter.ends(130, seconds=5)
    assert not run.alive()
    state = str(View(run.folder).picture()[0])
    assert "stopped: Ctrl-C twice; the same command goes on from here" in state


@pytest.mark.slow
def test_sigterm_is_like_ctrl_c(toys):
    """A queue's time limit says it so."""
    run = long_recipes(toys)
    starter = run.start(1)
    until(lambda: busy(run), "it is busy")
    starter.send(signal.SIGTERM)
    starter.ends(130, seconds=10)
    assert run.events("released") and not run.alive()


@pytest.mark.slow
def test_an_order_to_stop_holds_until_the_next_launch(toys):
    run: Toys = toys(sleep=1.0)
    starter = run.start(2)
    until(lambda: busy(run), "it has begun")
    store, _ = open_run(run.folder, Host(), "somebody")
    launches.stop(store, launches.latest(store), "the room is too hot")
    starter.ends(1, seconds=30)
    assert "the room is too hot" in starter.said and not run.alive() and not run.is_over()
    run.start(2, sleep=0.0).ends(0)
    run.same()


@pytest.mark.slow
def test_the_end_of_a_run_is_for_good(toys):
    run: Toys = toys().prepare()
    run.work(recipes=3)
    launches.end(run.history().store, "the budget")

    def decided() -> dict[str, Any]:
        """All registers; what sums up a round decides nothing."""
        there = listing(run.folder / "rounds").items()
        return {name: each for name, each in there if "/" in name and not name.endswith("/summary")}

    before = decided()
    worker, again = run.worker("w"), run.start(1)
    worker.ends(3)
    again.ends(0)
    assert "the budget" in worker.said and "ended by the budget" in again.said
    assert decided() == before and not run.is_over()


def test_two_starters_by_mistake_are_harmless(toys):
    run: Toys = toys(population_size=6)
    both = [run.start(2), run.start(2)]
    for starter in both:
        starter.ends(0)
    assert sum("New run" in starter.said for starter in both) >= 1
    run.same()


# -- recipes that go wrong ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_recipe_that_kills_its_workers_stops_the_run(toys):
    run: Toys = toys(script=MISHAPS, mishap="segfault")
    starter = run.start(4)
    starter.ends(1, seconds=LONG)
    assert f"0/bad: 8 workers in a row were lost while they made it, on {os.uname().nodename}" in starter.said
    assert len(run.registers(r"00000/bad\.0\.claim\..*")) == 8
    assert "was killed by SIGSEGV" in starter.said
    again = run.start(2, mishap="none")
    again.ends(0)  # a new launch, and the card has been replaced


@pytest.mark.slow
def test_a_worker_alone_that_crashes_again_and_again_is_given_up(toys):
    run: Toys = toys(script=MISHAPS, mishap="segfault", restarts=2)
    starter = run.start(1)
    starter.ends(1)
    assert "worker 0 was killed by SIGSEGV, 3 times in a row" in starter.said


@pytest.mark.slow
def test_a_library_that_panics_fails_like_any_other(toys):
    """What Rust raises in Python is no Exception."""
    run: Toys = toys(script=MISHAPS, mishap="panic")
    starter = run.start(1)
    starter.ends(1)
    assert "0/bad failed 3 times, on" in starter.said and "PanicException: Onig: Regex search error" in starter.said


ODD = [
    ("exit", "SystemExit: 0"), ("circle", "RuntimeError: it came of itself"), ("wordless", "Wordless: <exception str"),
    ("number", "TypeError: metric 1: its name is no text"),
]  # fmt: skip


@pytest.mark.parametrize("mishap, why", one_of(ODD, quick=ODD[:1]))
def test_errors_that_are_odd_are_failures_like_any_other(toys, mishap, why):
    """One that leaves the interpreter, one that is its own cause, one that cannot say what it is; and metrics that no
    register could hold."""
    run: Toys = toys(script=MISHAPS, mishap=mishap)
    starter = run.start(1)
    starter.ends(1, seconds=LONG)
    assert "0/bad failed 3 times, on" in starter.said and why in starter.said


def test_a_process_that_can_make_nothing_of_a_run_ends_and_blames_no_recipe(toys):
    run: Toys = toys(script=MISHAPS, mishap="unfit")
    starter = run.start(2)
    starter.ends(1)
    assert "the questions have changed" in starter.said
    assert {run.register(path)["why"] for path in run.registers(r"00000/bad\.0\.left\..*")} == {"released"}
    run.start(2, mishap="none").ends(0)


def test_what_is_written_otherwise_than_it_is_read_stays_its_makers(toys):
    """A pair of surrogates is one character once it was written down."""
    run: Toys = toys(script=MISHAPS, mishap="pair")
    run.start(2).ends(0)
    history = run.history()
    assert history["0/bad"].metrics == {"word": "\N{GRINNING FACE}"} and history.files("0/bad").read("weights") == b"x"


def test_three_failures_stop_the_run(toys):
    run: Toys = toys(script=MISHAPS, mishap="raise")
    starter = run.start(2)
    starter.ends(1)
    # a fourth, where the other worker was at it when the third was told
    said = f"0/bad failed [34] times, on {os.uname().nodename}; the last time: RuntimeError: the card is on fire"
    assert re.search(said, starter.said), starter.said
    left = [run.register(path) for path in run.registers(r"00000/bad\.0\.left\..*")]
    assert [x["why"] for x in left][:3] == ["failed"] * 3 and all("card is on fire" in x["error"] for x in left)
    assert any("Traceback" in line for line in left[0]["tail"]), "the log's end stands in the record"
    run.start(2, mishap="none").ends(0)


VERDICTS = [("nan", "loss is nan"), ("verdict", "it does not converge")]
SPARED = [("raise", "RuntimeError: the card is on fire"), ("nan", "loss is nan")]


@pytest.mark.parametrize("mishap, why", one_of(VERDICTS, quick=VERDICTS[:1]))
def test_a_verdict_stops_the_run_at_once(toys, mishap, why):
    run: Toys = toys(script=MISHAPS, mishap=mishap)
    starter = run.start(1)
    starter.ends(1)
    assert f"0/bad cannot be made: {why}" in starter.said
    assert len(run.registers(r"00000/bad\.0\.left\..*")) == 1 and not run.registers(r"00000/bad.*done")


@pytest.mark.parametrize("mishap, why", one_of(SPARED, quick=SPARED[:1]))
def test_what_is_optional_may_fail(toys, mishap, why):
    run: Toys = toys(script=MISHAPS, mishap=mishap, spared=True)
    run.start(2).ends(0)
    bad = run.register("00000/bad.0.done")
    assert (bad["absent"], bad["why"], bad["files"], bad["metrics"]) == ("failed", why, {}, {})
    assert run.history().files("1/child").read("weights") == b"xx", "made from the good parent alone"


@pytest.mark.slow
def test_the_processes_of_these_tests_are_seen(toys):
    """`alive` and `state` are what the tests above trust."""
    run = long_recipes(toys)
    worker = run.worker("w")
    until(lambda: run.alive() == {"w": worker.process.pid}, "it is seen")
    worker.freeze()
    assert state(worker.process.pid) == "T"
    worker.thaw()
    kill(worker.process.pid)
    assert worker.end() == -signal.SIGKILL and not run.alive()


@pytest.mark.slow
def test_who_is_killed_for_its_memory_is_told_from_others(toys, small_memory, monkeypatch):
    """Again and again, in the midst of one recipe; what else is to be made is made."""
    run: Toys = toys(script=MISHAPS, mishap="hungry", restarts=1000)
    monkeypatch.setenv("SMALL_MEMORY", str(small_memory(64)))
    starter = run.start(2)
    starter.ends(1)
    assert starter.said.count("was killed by SIGKILL when the machine was out of memory; another takes its place") >= 4
    assert "0/bad: 8 workers in a row were lost" in starter.said and "for want of memory" in starter.said
    assert run.registers(r"00000/good.*done")
    run.start(2, mishap="none").ends(0)

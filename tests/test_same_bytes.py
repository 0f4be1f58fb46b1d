"""A run's result depends on its configuration only: not on how many work on it, nor on when they began or ended."""

import json
import signal
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fleet.work import Work
from tests.helpers import Toys, one_of, undisturbed, until
from tests.toy import maker
from tests.toy.strategies import STRATEGIES

SIZES: dict[str, dict[str, Any]] = {
    "diloco": {"population_size": 4, "max_generations": 4},
    "matching": {"population_size": 6, "max_generations": 5},
    "rank": {"population_size": 5, "max_generations": 5},
    "search": {"population_size": 6, "max_generations": 4, "cliff": 5.0},
    "tournament": {"population_size": 5, "max_generations": 4},
}


@pytest.mark.parametrize("workers", one_of([1, 2, 4, 8], quick=[4]))
@pytest.mark.parametrize("algorithm", one_of(STRATEGIES, quick=["diloco", "rank"]))
def test_any_number_of_workers(toys, algorithm, workers):
    """What they are compared with was made by one worker, in the test's own process."""
    run = toys(algorithm=algorithm, **SIZES[algorithm])
    run.start(workers).ends(0)
    run.same()


@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_interrupted_after_any_recipe_and_gone_on_with(toys, algorithm):
    run = toys(algorithm=algorithm, **SIZES[algorithm]).prepare()
    parts = 0
    while run.work(recipes=1 + parts % 3, name=f"worker-{parts}") == "interrupted":
        parts += 1
    assert parts > 4
    run.same()


def test_another_seed_gives_other_bytes(toys):
    """Or all the comparisons here would prove nothing."""
    keys = {**SIZES["rank"], "algorithm": "rank"}
    assert undisturbed(json.dumps(keys)) != undisturbed(json.dumps({**keys, "seed": 2}))


# -- elastic rounds ----------------------------------------------------------------------------------------------------


def test_a_late_worker_is_closed_out_and_stays_out(toys):
    run: Toys = toys(max_generations=2, quorum=0.5, grace_seconds=0.3, sleep=0.3, inner_steps=20, dead_seconds=10.0)
    run.prepare()
    late = run.worker("late")
    until(lambda: run.makers("00001/m."), "the late one has begun")
    late.freeze()
    id = run.makers("00001/m.")["late"]
    assert not run.registers(f"00001/{id[2:]}.0.done")

    for name in ("a", "b"):
        run.worker(name).ends(0)
    before = run.digest()
    closed = run.register(f"00001/{id[2:]}.0.done")
    assert (closed["absent"], closed["why"], closed["files"]) == ("closed", "late", {})
    assert [run.register(p)["absent"] for p in run.registers(r"00001/.*\.done")].count("closed") == 1
    children = check_children(run, id)
    assert children == 2, "each member has two children"

    late.thaw()
    late.ends(0)
    assert run.digest() == before
    assert run.register(f"00001/{id[2:]}.0.done") == closed
    assert not run.attempts(id), "its files are dropped"


def check_children(run: Toys, closed: str) -> int:
    """The children of a closed member have the bytes that follow from their other parent alone; how many there are."""
    history, count = run.history(), 0
    for recipe in history.plan(2):
        if closed in recipe.parents and "steps" in recipe.args:
            (other,) = (history.files(p) for p in recipe.parents if p != closed)
            start, momentum = (np.frombuffer(other.read(name), "<f8") for name in ("weights", "momentum"))
            still = SimpleNamespace(recipe=recipe, resume=lambda: None, between_steps=lambda *_: None)
            end = maker.train(cast(Work, still), start, 0.0)
            weights, _ = maker.outer(start, momentum, start - end, recipe.args)
            assert history.files(f"2/{recipe.slot}").read("weights") == weights.tobytes()
            count += 1
    return count


@pytest.mark.slow
def test_without_a_quorum_nobody_is_closed_out(toys):
    """The same, but the quorum needs everybody: the others wait for the one that stands still."""
    run: Toys = toys(max_generations=2, sleep=0.2, dead_seconds=600.0).prepare()
    late = run.worker("late")
    until(lambda: run.makers("00001/m."), "the late one has begun")
    late.freeze()
    id = run.makers("00001/m.")["late"]
    other = run.worker("other")
    until(lambda: len(run.registers(r"00001/m.*\.done")) == 3, "all others are made")
    assert not run.registers(f"00001/{id[2:]}.*done") and not run.registers("00002/average.*done")
    late.send(signal.SIGCONT)
    late.ends(0)
    other.ends(0)
    run.same()

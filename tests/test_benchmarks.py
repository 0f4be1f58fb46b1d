"""What the tables of pre-training are made of: equal tokens for all, and the arithmetic of what a machine is worth."""

import math
import multiprocessing
import time

import pytest

from benchmarks.cpu_slices import sliced
from benchmarks.machines import LARGE, PARAMETERS, REAL, apart, scaled
from benchmarks.machines import METHODS as ON_MACHINES
from benchmarks.speedup import ALONE, SLOTS, best_alone, needed, seconds, serial, share, worth
from benchmarks.trials import METHODS, Result, Trial, trial
from benchmarks.tune import not_again, wanted
from benchmarks.utilisation import Counted, counted, share_of
from benchmarks.workers import cpu_of


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("slots", [4, 16])
def test_every_method_has_as_many_tokens(name, slots):
    each = trial(name, 1, 5760, slots, batch_size=4)
    c = each.config
    seen = c.total_steps * c.batch_size * c.population_size
    assert 5760 * slots <= seen < 5760 * slots * 1.01
    assert each.serial == pytest.approx(5760 * (slots if METHODS[name].how == "alone" else 1), rel=0.01)
    assert METHODS[name].how != "apart" or c.steps_in(c.max_generations) == c.inner_steps == 12


def test_a_climb_goes_on_from_where_a_second_seed_says():
    tried = {(0.02, 4): [2.336], (0.02, 2): [2.339], (0.028, 4): [2.354], (0.014, 4): [2.362], (0.02, 8): [2.425]}
    assert wanted("muon", tried) == [] and not_again(tried) == [(0.02, 4), (0.02, 2)]
    tried |= {(0.02, 4): [2.336, 2.349], (0.02, 2): [2.339, 2.319]}
    assert wanted("muon", tried) == [(0.028, 2), (0.014, 2), (0.02, 1)] and not_again(tried) == []


def result(name: str, slots: int, averaged: float, seconds: float = 0.0) -> Result:
    return Result(Trial(name, 1, 1000, slots, keys={"batch_size": 8}), averaged, None, None, 2.0, 6.0, seconds, 10**6)


def test_a_loss_is_worth_what_one_process_needs_for_it():
    curve = {1000: 2.0, 2000: 1.8, 4000: 1.7}
    assert needed(curve, 1.8) == pytest.approx(2000) and needed(curve, 1.75) == pytest.approx(2000 * math.sqrt(2))
    assert needed(curve, 2.2) == pytest.approx(500) and needed(curve, 1.6) == pytest.approx(8000), (
        "along the last lines"
    )


def test_the_best_of_single_processes_counts():
    alone = {1: (2.0, 2.1), 2: (1.9, 1.8), 4: (1.7, 1.75), 8: (1.6, 1.6), 16: (1.55, 1.5)}
    names = ("one process", "one process, AdamW")
    found = {name: {k: [result(name, k, each[n])] for k, each in alone.items()} for n, name in enumerate(names)}
    found["DiLoCo"] = {4: [result("DiLoCo", 4, 1.7)]}
    assert best_alone(found, serial) == {1000: 2.0, 2000: 1.8, 4000: 1.7, 8000: 1.6, 16000: 1.5}
    assert worth(found, "DiLoCo", 4) == pytest.approx(4, rel=0.1)


def test_seconds_count_as_sequences_do():
    found = {name: {k: [result(name, k, 2 - k / 20, 3.0 * k)] for k in SLOTS} for name in ALONE}
    found["DiLoCo"] = {4: [result("DiLoCo", 4, 1.8, 5.0)]}
    assert worth(found, "DiLoCo", 4, seconds) == pytest.approx(12 / 5)


def test_a_disk_that_is_slow_takes_its_share():
    each = result("DiLoCo", 4, 1.7)
    steps = each.trial.config.total_steps / each.trial.config.max_generations
    moved = 2.0 * 215e6 * 4 * 4  # 8 MB of a model of 4 MB, for each of four slots
    assert share(each, 8.0, 3.0) == pytest.approx(3 * steps / (3 * steps + moved / 1e9))
    assert share(each, 0.1, 3.0) < share(each, 10.0, 3.0) < 1


def test_a_scaled_link_takes_as_large_a_part_of_a_round():
    """2 bytes of each parameter, over 1 Gbit/s beside a round of the real model, and so for the small one."""
    real = 2 * LARGE / (1e9 / 8) / REAL
    for round in (3.0, 12.0):
        assert 2 * PARAMETERS / scaled(1.0, round) / round == pytest.approx(real)
    for name, method in ON_MACHINES.items():
        config = apart(name, 1, 576, 4).config
        assert config.population_size == 4 * method.slots
        assert config.steps_in(1) * config.batch_size * method.slots == method.round
        assert config.total_steps * config.batch_size * method.slots == 576


def test_utilisation_is_of_whole_rounds():
    """Which end when the next one's first training begins; who trains two slots has two trainings in each. What comes
    before a run's last round is not counted."""
    host = [(1, 0.0, 8.0), (2, 10.0, 14.0), (2, 14.0, 18.0), (3, 20.0, 28.0), (4, 30.0, 38.0), (5, 60.0, 68.0)]
    assert counted(host, 2) == Counted(2, 20.0, 16.0)
    assert share_of([host, host], 2) == 0.8 and counted(host[:1], 1).rounds == 0


def busy() -> None:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        pass


def test_a_slice_of_the_processors_is_no_larger_than_it_was_cut():
    process = multiprocessing.get_context("spawn").Process(target=busy)
    process.start()
    with sliced([process.pid], 0.2) as why:
        if why:
            process.kill()
            pytest.skip(f"no control groups here: {why}")
        before, used, began = cpu_of(process.pid), 0.0, time.monotonic()
        while process.is_alive() and time.monotonic() < began + 1.5:
            time.sleep(0.05)
            used = cpu_of(process.pid) - before if process.is_alive() else used
        seconds = time.monotonic() - began
        process.kill()
        process.join()
    assert used < 0.4 * seconds

"""What is said of a run before it is begun, beside what it then does."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.small import config, finished
from train.advise import Circumstances, Forecast, advice, facts, sizes_of

ROOT = Path(__file__).parent.parent
HERE = Circumstances(workers=2, step=0.1, disk=1e8)


def forecast(here: Circumstances = HERE, **keys) -> Forecast:
    c = config(**keys)
    return Forecast(c, sizes_of(c), here)


@pytest.mark.parametrize("keys", [
    {"algorithm": "diloco"},
    {"algorithm": "diloco", "wire_dtype": "int8", "outer_momentum": 0.5},
    {"group_size": 2, "average_every": 100},
    {"group_size": 2, "average_every": 100, "wire_dtype": "bf16", "outer_momentum": 0.5},
])  # fmt: skip
def test_the_bytes_are_those_that_a_run_then_moves(tmp_path, keys):
    finished(tmp_path, **keys)
    events = [json.loads(line) for line in (tmp_path / "run" / "workers" / "w.events").read_text().splitlines()]
    evaluations = ("global", "average")
    made = [e for e in events if e["what"] == "made" and e["id"].startswith("2/") and not e["id"].endswith(evaluations)]
    f = forecast(**keys)
    for key, wanted in zip(("written", "read"), f.moved, strict=True):
        found = sum(event[key] for event in made) / f.config.population_size
        assert found == pytest.approx(wanted, rel=0.1), key


def test_slots_that_do_not_share_out_leave_workers_waiting():
    three = forecast(replace(HERE, workers=3))
    assert three.busy == pytest.approx(2 / 3) and "POPULATION_SIZE 6" in " ".join(advice(three))
    assert "4 workers have nothing to do: POPULATION_SIZE 8" in " ".join(advice(forecast(replace(HERE, workers=8))))
    assert forecast().training == pytest.approx(2 * 0.1 * forecast().config.total_steps)


def test_evolution_of_one_family_is_called_diloco():
    assert "which is DiLoCo" in " ".join(advice(forecast(group_size=4)))
    assert "DiLoCo" not in " ".join(advice(forecast(group_size=2)))


def test_a_slow_disk_is_told_what_it_would_take():
    f = forecast(replace(HERE, disk=1e4))
    (told,) = [line for line in advice(f) if "INNER_STEPS" in line]
    assert 'WIRE_DTYPE "int8", and INNER_STEPS ' in told
    steps = int(told.split("INNER_STEPS ")[1].split()[0])
    better = forecast(replace(HERE, disk=1e4), wire_dtype="int8", inner_steps=steps)
    assert better.last_round[1] <= 0.3 * better.last_round[0]
    assert not any("disk" in line for line in advice(forecast(replace(HERE, disk=1e12))))


def test_tokens_of_a_parameter():
    few = " ".join(advice(forecast()))
    rounds = int(few.split("MAX_GENERATIONS ")[1].split()[0])
    assert forecast(max_generations=rounds).per_parameter == pytest.approx(5, rel=0.05)
    assert forecast(max_generations=rounds - 3).per_parameter < 5


@pytest.mark.parametrize(
    "size, speed", [("tiny", 1e11), ("14m", 1e12), ("60m", 1e13), ("150m", 5e13), ("1b", 1e14)]
)  # of a device that somebody would train it on, in operations a second
def test_settings_that_are_checked_in_need_no_advice(size, speed):
    from fleet.config import load
    from train.config import TrainConfig

    c = load(ROOT / "configs" / f"{size}.json", TrainConfig).model_copy(update={"algorithm": "diloco", "tokenizer": ""})
    sizes, tokens = sizes_of(c), c.batch_size * c.gradient_accumulation * c.seq_length
    step = 6 * sizes.parameters * tokens / speed
    f = Forecast(c, sizes, Circumstances(workers=c.population_size, step=step, disk=1.2e9))  # 10 Gbit/s
    assert c.initial_population == (size,) and not [*advice(f)]
    assert 15 < f.per_parameter < 30 and math.isfinite(f.memory) and len([*facts(f)]) == 8

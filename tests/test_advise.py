"""What is said of a run before it is begun, beside what it then does."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.errors import UserError
from fleet.idle_workers import crowded, idle
from fleet.machines import Machine
from fleet.plain import readable_bytes
from fleet.remote.launcher import Launcher, place
from launch_to_machines import METHOD_SCRIPTS
from tests.commands import answer
from tests.small import KEYS, config, finished, shared
from train.exchange_checks import fewest_to_begin_with
from train.forecast import Circumstances, Forecast, advice, disk_speed, facts, sizes_of
from train.learner import best_device
from train.memory import memory_of

ROOT = Path(__file__).parent.parent
HERE = Circumstances(workers=2, step=0.1, disk=1e8)


def forecast(here: Circumstances = HERE, **keys) -> Forecast:
    c = config(**keys)
    return Forecast(c, sizes_of(c), here)


@pytest.mark.parametrize("keys", [
    {"algorithm": "diloco"},
    {"algorithm": "diloco", "wire_dtype": "int8", "outer_momentum": 0.5},
    {"algorithm": "diloco", "wire_dtype": "fp32", "inner_optimizer_state": "exact"},
    {"algorithm": "diloco", "fragments": 2},
    {"group_size": 2, "average_every": 100},
    {"group_size": 3, "population_size": 6, "selection": "matching", "average_every": 100},
    {"group_size": 2, "average_every": 100, "wire_dtype": "fp32", "outer_momentum": 0.5},
])  # fmt: skip
def test_the_bytes_are_those_that_a_run_then_moves(tmp_path, keys):
    finished(tmp_path, **keys)
    events = [json.loads(line) for line in (tmp_path / "run" / "workers" / "w.events").read_text().splitlines()]
    made = [e for e in events if e["what"] == "made" and e["id"].startswith("2/") and not e["id"].endswith("average")]
    f = forecast(replace(HERE, workers=1), **keys)
    for key, wanted in zip(("written", "read"), f.moved, strict=True):
        found = sum(event[key] for event in made) / f.config.population_size
        assert found == pytest.approx(wanted, rel=0.1), key


def test_slots_that_do_not_share_out_leave_workers_waiting():
    three = forecast(replace(HERE, workers=3))
    assert three.busy == pytest.approx(2 / 3) and "POPULATION_SIZE 6" in " ".join(advice(three))
    assert "4 workers have nothing to do: POPULATION_SIZE 8" in " ".join(advice(forecast(replace(HERE, workers=8))))
    assert forecast().last_round[0] == pytest.approx(2 * 0.1 * forecast().config.inner_steps)


def test_a_run_says_at_its_start_who_will_wait_and_that_the_rate_rises_for_long(tmp_path):
    waiting = "33% of the workers wait for the last ones of each round: POPULATION_SIZE 6"
    assert [idle(n, 4) for n in (1, 2, 3, 4)] == ["", "", waiting, ""] and not idle(3, 0)
    assert not crowded(2, 1, 2) and not crowded(1, 4, 2) and "share 4 processors: 2 of them" in crowded(3, 2, 4)
    file = tmp_path / "evolution.json"
    data = {"tokenizer": str(shared() / "tokenizer"), "datasets": [{"source": str(shared() / "text.jsonl")}]}
    file.write_text(json.dumps({**KEYS, **data}))
    machines = [Machine(host="a", workers=1), Machine(host="b", workers=2)]
    made = Launcher(place(file, "", METHOD_SCRIPTS), machines, METHOD_SCRIPTS, ROOT).create(None)
    notes = ["Note: the rate rises for 2 of 12 steps: WARMUP_STEPS 0.", f"Note: {waiting}."]
    assert made["new"] and made["notes"] == notes
    file.write_text(json.dumps({**KEYS, **data, "lr": 0.5}))
    code, out, errors = answer("edt_sim.py", "--config", str(file), "--workers", "3")
    assert code == 2 and "LR" in errors, "the run is bound to another one"
    assert notes[1] in out.splitlines() and "the rate rises" not in out, "as it was said when the run was made"


def test_evolution_of_one_family_is_called_diloco():
    assert "which is DiLoCo" in " ".join(advice(forecast(group_size=4)))
    assert "DiLoCo" not in " ".join(advice(forecast(group_size=2)))


DILOCO = {"algorithm": "diloco"}
SLOW = replace(HERE, disk=1e4)
LANE = "DISK_LANE true writes and reads ahead"


def followed(f: Forecast, about: str = "") -> Forecast:
    """The same run, by what it was told; of a key that is named twice, the last value."""
    lines = [line for line in advice(f) if about in line and not re.search("POPULATION_SIZE|refused", line)]
    found = dict(re.findall(r'\b([A-Z_]{4,}) ("\w+"|true|[\d.]+)', " ".join(lines)))
    return replace(f, config=f.config.model_copy(update={k.lower(): json.loads(v) for k, v in found.items()}))


@pytest.mark.parametrize("rounds", [12, 100, 1000])
@pytest.mark.parametrize("keys", [{}, DILOCO, DILOCO | {"fragments": 4}])
def test_a_slow_disk_is_told_what_it_would_take(rounds, keys):
    keys = {**keys, "max_generations": rounds, "inner_steps": 16}
    first = fewest_to_begin_with(config(first_inner_steps=1, **keys))
    f = forecast(wire_dtype="fp32", first_inner_steps=first, **keys)
    narrow = {"wire_dtype": "", "inner_optimizer_state": "narrow"}
    share = replace(f, config=f.config.model_copy(update=narrow)).share
    f = replace(f, here=replace(HERE, disk=HERE.disk * share / 0.9))  # 0.9 with these
    (told,) = [line for line in advice(f) if "INNER_STEPS" in line]
    wire = f.config.model_copy(update={"wire_dtype": ""}).wire
    assert f'WIRE_DTYPE "{wire}", and INNER_OPTIMIZER_STATE "narrow", and INNER_STEPS ' in told
    as_long, better = followed(f, "INNER_STEPS").config, followed(f)
    whole = f.config.total_steps
    assert as_long.total_steps == pytest.approx(whole, abs=1 + as_long.inner_steps / 2)
    assert not better.too_slow and better.config.inner_steps >= 57  # 16 * 0.9 / 0.25
    assert as_long.steps_in(as_long.max_generations) == as_long.inner_steps and as_long.first_inner_steps >= 15
    assert followed(better).config == better.config, "and asked again, it has no other numbers"
    assert not any("disk" in line for line in [*advice(better), *advice(forecast(replace(HERE, disk=1e12)))])


def test_of_a_disk_that_is_too_slow_for_any_round_it_says_so():
    told = [*advice(forecast(SLOW))]
    assert any("this one's rounds cannot be long enough" in line for line in told)
    assert not any("INNER_STEPS" in line for line in told)


def test_the_lane_is_told_of_first_and_where_it_and_overlap_hide_the_disk_a_quarter_is_not_the_limit():
    def told(share: float, workers: int = 2, **keys: object) -> list[str]:
        f = forecast(replace(HERE, workers=workers), algorithm="diloco", inner_optimizer_state="narrow", **keys)
        f = replace(f, here=replace(f.here, disk=f.here.disk * f.share / share))
        assert f.share == pytest.approx(share)
        return [line for line in advice(f) if "the disk takes" in line]

    assert not told(0.09) and not told(0.2, disk_lane=True)
    (lane,) = told(0.2)
    assert lane.startswith("the disk takes 20% of a round's training: DISK_LANE true")
    first, _ = told(0.6)
    assert LANE in first and len(told(0.6, disk_lane=True)) == 1
    for keys in ({"overlap": 1}, {"overlap": 1, "fragments": 2, "workers": 4}):
        assert not told(0.6, disk_lane=True, **keys) and len(told(1.1, disk_lane=True, **keys)) == 1
        assert len(told(0.6, **keys)) == 1, "the lane is enough"
    assert told(0.6, overlap=1, workers=4, disk_lane=True), "a worker has one slot, and waits for the other half"


def test_tokens_of_a_parameter():
    few = " ".join(advice(forecast()))
    rounds = int(few.split("MAX_GENERATIONS ")[1].split()[0])
    assert forecast(max_generations=rounds).per_parameter == pytest.approx(5, rel=0.05)
    assert forecast(max_generations=rounds - 3).per_parameter < 5
    assert "and takes more text or MAX_EPOCHS" in few, "the text has not as many"
    assert not few.startswith("it would be refused") and forecast(max_epochs=1e6).per_parameter < 5
    assert "takes more text" not in " ".join(advice(forecast(max_epochs=1e6)))


def test_it_says_what_the_estimate_rests_on_and_how_to_have_a_better_one(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({**KEYS, "tokenizer": str(shared() / "tokenizer")}))
    command = ("-m", "train.advise", str(tmp_path / "c.json"))
    said = " ".join(answer(*command)[1].split())
    assert said.startswith("loading what tries a step ") and "trying a step and the disk " in said
    assert f"tried here on {best_device().type} with THREADS 1, by one worker alone" in said
    assert said.endswith("For other machines: the same command there, or --step SECONDS and --disk MB/s.")
    told = " ".join(answer(*command, "--step", "2", "--disk", "20")[1].split())
    assert "a step of 2 s, as --step says; 20 MB/s of the disk, as --disk says" in told
    assert "For other machines" not in told


def test_a_bucket_and_a_disk_that_cannot_be_tried_are_refused_in_a_line(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**KEYS, "tokenizer": str(shared() / "tokenizer"), "base_dir": "s3://mine/runs"}))
    code, _, errors = answer("-m", "train.advise", str(file))
    assert code == 2 and errors.startswith("s3://mine/runs: how fast a bucket is")
    with pytest.raises(UserError, match="cannot be tried: .*--disk 110"):
        disk_speed(Path("/proc"))


def test_memory_is_of_the_words_that_the_tokenizer_has_and_of_models_in_other_words():
    c = config(tokenizer=str(shared() / "tokenizer"), vocab_size=999)
    f = Forecast(c, sizes_of(c), HERE)
    assert f.memory == memory_of(c.model_copy(update={"vocab_size": 257})) != memory_of(c)
    gpt2 = {"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 257}}
    other = forecast(initial_population=(gpt2,)).memory
    assert other.kept == 16 * sizes_of(config(initial_population=(gpt2,))).parameters - 4 * 24 * 32**2 and other.layers
    assert dict(facts(f))["memory"].startswith(f"{readable_bytes(f.memory.total)} of a worker's device")


def test_of_post_training_it_says_what_helps_instead():
    code, _, errors = answer("-m", "train.advise", str(ROOT / "configs" / "posttrain.json"))
    assert code == 2 and "not for edt-evomerge: try it with MAX_GENERATIONS 1 and another PROJECT_NAME" in errors


def test_a_run_that_would_be_refused_is_not_praised():
    (told,) = [line for line in advice(forecast(max_generations=10**4)) if "refused" in line]
    assert "training tokens where the run needs" in told


@pytest.mark.parametrize(
    "size, speed", [("tiny", 1e11), ("14m", 1e12), ("60m", 1e13), ("150m", 5e13), ("1b", 1e14)]
)  # of a device that somebody would train it on, in operations a second
def test_settings_that_are_checked_in_need_no_advice(size, speed):
    from fleet.run_config import load
    from train.training_config import TrainConfig

    c = load(ROOT / "configs" / f"{size}.json", TrainConfig).model_copy(update={"algorithm": "diloco", "tokenizer": ""})
    sizes, tokens = sizes_of(c), c.batch_size * c.gradient_accumulation * c.seq_length
    step = 6 * sizes.parameters * tokens / speed
    f = Forecast(c, sizes, Circumstances(workers=c.population_size, step=step, disk=1.2e9))  # 10 Gbit/s
    beside_lane = [line for line in advice(f) if LANE not in line]  # which is for several machines
    assert c.initial_population == (size,) and not beside_lane
    assert 15 < f.per_parameter < 30 and f.memory == memory_of(c) and len({*dict(facts(f))}) == 9

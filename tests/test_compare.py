"""Methods side by side: as many tokens for each, one model that is never parted, and the page at the end."""

import json
import subprocess
import sys
from random import Random

import pytest

from tests.helpers import ROOT
from tests.small import config
from train.batches import owned
from train.compare import PAGE, variants
from train.exchange_checks import exchange_problems


@pytest.mark.parametrize("seed", range(40))
def test_all_see_the_same_sequences(seed):
    rng = Random(seed)
    slots, rounds, first, inner, accumulation = (rng.randint(1, most) for most in (9, 70, 40, 40, 3))
    c = config(population_size=slots, max_generations=rounds, first_inner_steps=first, inner_steps=inner)
    c = c.model_copy(update={"gradient_accumulation": accumulation})
    found = variants(c, ROOT)
    assert {each.sequences for each in found.values()} == {c.sequences}
    small, synchronous = found["small-batch"], found["synchronous"]
    assert small.batch_size * small.gradient_accumulation == c.batch_size * accumulation
    assert (small.total_steps, synchronous.total_steps) == (slots * c.total_steps, c.total_steps)
    assert small.steps_in(small.max_generations) == small.inner_steps
    assert {each.population_size for each in (small, synchronous)} == {1}
    assert {each.average_every for each in found.values()} == {1}
    assert [each.adamw_betas for each in found.values()] == [(0.95, 0.98), (0.95, 0.98), (0.9, 0.95), (0.95, 0.98)]


def test_a_synchronous_step_is_all_slots_batches():
    c = config(population_size=4, max_generations=2)
    one = variants(c, ROOT)["synchronous"]
    apart = {int(n) for slot in range(4) for n in owned(c, slot, 2, 1, 0)}
    assert apart == {int(n) for part in range(4) for n in owned(one, 0, 2, 1, part)}


@pytest.mark.parametrize("keys", [
    {"overlap": 1}, {"fragments": 4}, {"inner_optimizer_state": "reset"}, {"wire_dtype": "int4"},
    {"outer_momentum": 0.5, "error_feedback": True},
])  # fmt: skip
def test_whatever_travels_all_can_be_trained_and_the_lone_ones_lose_nothing(keys):
    found = variants(config(population_size=4, group_size=2, **keys), ROOT)
    assert not [said for c in found.values() for there, said in exchange_problems(c) if there]
    for name in ("small-batch", "synchronous"):
        assert (found[name].wire, found[name].inner_optimizer_state) == ("fp32", "exact")


@pytest.mark.slow
def test_it_ends_with_a_page_and_the_same_command_finds_all_done(tmp_path):
    c = config(max_generations=1, population_size=2)
    file = tmp_path / "evolution.json"
    file.write_text(json.dumps(c.model_dump(mode="json", exclude_defaults=True)))
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "train.compare", str(file), "--workers", "1"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    page = tmp_path / "runs" / "compared" / PAGE
    before = said.partition("1 of 4: ")[0].splitlines()
    assert any("the rate rises for" in line for line in before) and len({*before}) == len(before)
    assert all(name in page.read_text() for name in ("edt", "diloco", "small-batch", "synchronous"))
    rows = [line.split() for line in said.splitlines()[-4:]]
    assert {row[1] for row in rows} == {f"{c.sequences * c.seq_length:,}"} and len(rows) == 4
    assert all(0 < float(row[-1]) < 10 for row in rows)
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert again.count("which is over") == 4 and again.splitlines()[-4:] == said.splitlines()[-4:]
    file.write_text(json.dumps({**c.model_dump(mode="json", exclude_defaults=True), "lr": 0.5}))
    other = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert other.returncode == 2 and "was started with another configuration" in other.stderr

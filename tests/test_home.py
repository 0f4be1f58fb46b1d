"""What stays with a slot from round to round, and fragments of the model that take turns: the bytes are the same
whoever makes what, where all of it is published; where it is not, what was lost is said."""

import random

import pytest

from fleet.digest import digest
from fleet.progress import Progress
from fleet.report.run_reader import RunReader
from fleet.run_config import UserError
from tests.helpers import LONG, kill, until
from tests.small import config, finished, run_digest, whole, worker
from train.member.home import LEARNED
from train.member.pretraining_tasks import maker
from train.member.vectors import file_of
from train.training_commands import check_settings

HOME = {"algorithm": "diloco", "inner_optimizer_state": "home"}
PARTS = {**HOME, "fragments": 2, "max_generations": 5}


def forgetful(place, **keys):
    """A run by a worker that remembers nothing from one recipe to the next."""
    c = config(**keys)
    place.mkdir(parents=True)
    one = worker(place, c, make=lambda work: maker(c)(work))
    assert one.run() == "over"
    return one.history


def test_moments_stay_with_their_slot_and_are_published_now_and_then(tmp_path):
    history = finished(tmp_path, **HOME, home_every=2)
    files = {round: history[f"{round}/replica-1"].digests for round in (1, 2, 3)}
    assert [file_of("average") in files[round] for round in (1, 2, 3)] == [True, False, True]
    assert history.recipe("2/home-replica-1").parents == ("1/replica-1",)
    assert not any(name.startswith("average") for name in history["2/shard-0"].digests)
    assert not any("lost_rounds" in member.metrics for round in (1, 2, 3) for member in history.round(round))


def test_what_is_lost_is_said(tmp_path):
    history = forgetful(tmp_path / "run", **HOME, home_every=2)
    lost = {slot: history[f"3/{slot}"].metrics.get("lost_rounds") for slot in ("replica-0", "replica-1")}
    assert lost == {"replica-0": None, "replica-1": 1}, "replica-0 was published in round 2, replica-1 in round 1"
    assert history["2/replica-0"].metrics["lost_rounds"] == 1, "nothing of it was published yet"
    assert "lost what they kept: replica-1 (1 round), replica-3 (1 round)" in Progress(history, 3).line(3)
    (said,) = [each.why for each in RunReader(history.store.disk.root).look().failures if each.id == "3/replica-1"]
    assert said == "what its slot had kept by itself was lost: replica-1 (1 round)"


def test_a_round_brings_one_fragment_together(tmp_path):
    history = finished(tmp_path, **PARTS, home_every=4)
    for round in (2, 3):
        shards = {recipe.slot: recipe for recipe in history.plan(round) if recipe.slot.startswith("shard-")}
        made = sorted(int(slot.rpartition("-")[2]) for slot, recipe in shards.items() if not recipe.carried)
        assert len(shards) == 8 and made == [s for s in range(8) if s % 2 == round % 2]
        changes = {name for name in history[f"{round}/replica-0"].digests if name.startswith("change-")}
        assert changes == {file_of("change", s) for s in made}
    assert file_of(LEARNED) in history["4/replica-0"].digests and file_of(LEARNED) not in history["3/replica-0"].digests


def test_what_had_no_turn_is_not_lost_to_the_slot(tmp_path):
    """With one replica, exact wires and a plain outer step fragments are plain training, as home is without them."""
    keys = {"population_size": 1, "wire_dtype": "fp32", "max_generations": 4, "shards": 2}
    whole = finished(tmp_path / "whole", **HOME, **keys)
    parts = finished(tmp_path / "parts", **HOME, **keys, fragments=2)
    shared = finished(tmp_path / "shared", **{**HOME, **keys, "inner_optimizer_state": "exact"})
    for round in (1, 4):
        one, *others = (history[f"{round}/replica-0"].metrics["train_loss"] for history in (shared, whole, parts))
        assert others == pytest.approx([one, one], rel=1e-5)


@pytest.mark.parametrize("keys, why", [
    ({"inner_optimizer_state": "average"}, "set INNER_OPTIMIZER_STATE home"),
    ({"error_feedback": True}, "FRAGMENTS is there without ERROR_FEEDBACK"),
])  # fmt: skip
def test_what_goes_with_fragments(keys, why):
    check_settings(config(**PARTS))
    with pytest.raises(UserError, match=why):
        check_settings(config(**{**PARTS, **keys}))


def test_edt_has_no_home():
    with pytest.raises(UserError, match="INNER_OPTIMIZER_STATE home: in EDT"):
        check_settings(config(**{**HOME, "algorithm": "edt"}))


# -- whoever makes it --------------------------------------------------------------------------------------------------

PUBLISHED = [
    {**HOME, "home_every": 1},
    {**PARTS, "home_every": 1, "max_generations": 4},
    {**PARTS, "home_every": 1, "max_generations": 4, "overlap": 1, "inner_optimizer_state": "reset"},
]


@pytest.mark.parametrize("keys, workers", [*zip(PUBLISHED, (2, 4, 2), strict=True)], ids=str)
def test_workers_that_take_turns(tmp_path, keys, workers):
    """Slots go from one to the next: whoever takes one over makes of it what the last one would have made."""
    c, place = config(**keys), tmp_path / "several"
    place.mkdir()
    several, dice, over = [worker(place, c, f"w{n}") for n in range(workers)], random.Random(5), False
    while not over:
        history = (one := dice.choice(several)).history
        over = one.turn()
    slots = [f"replica-{k}" for k in range(c.population_size)]
    makers = [{history.outcome(f"{n}/{slot}").by for n in range(1, c.max_generations + 1)} for slot in slots]
    assert any(len(names) > 1 for names in makers)
    assert digest(history) == digest(finished(tmp_path / "one", **keys))


@pytest.mark.slow
@pytest.mark.parametrize("keys", PUBLISHED, ids=str)
def test_one_two_and_four_workers_and_kills_in_both_lanes(pretraining, keys):
    keys = {key: value for key, value in keys.items() if key != "algorithm"}
    wanted = whole(pretraining("diloco_sim.py", **keys))
    for workers in (2, 4):
        assert whole(pretraining("diloco_sim.py", **keys, disk_lane=True), workers) == wanted
    run, dice = pretraining("diloco_sim.py", **keys, disk_lane=True), random.Random(3)
    starter = run.start(2)
    ended = lambda: starter.process.poll() is not None  # noqa: E731
    for kills in range(4):
        until(lambda n=kills: ended() or len(run.registers(r".*\.claim\..*")) > 6 * n, "it gets on", LONG)
        until(lambda: ended() or run.alive(), "a worker lives", LONG)
        for pid in dice.sample([*run.alive().values()], min(1, len(run.alive()))):
            kill(pid)
    starter.ends(0, LONG)
    assert run_digest(run) == wanted


@pytest.mark.parametrize("keys", PUBLISHED[1:], ids=str)
def test_nobody_needs_to_remember(tmp_path, keys):
    assert digest(forgetful(tmp_path / "cold", **keys)) == digest(finished(tmp_path / "warm", **keys))

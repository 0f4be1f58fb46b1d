"""FRAGMENTS: a part of the model at a time; what a slot has not exchanged is its own, and lost with its machine."""

import pytest

from fleet.digest import digest
from fleet.metrics.points import point
from fleet.progress import Progress
from fleet.report.run_reader import RunReader
from fleet.run_config import UserError
from fleet.status import View
from fleet.work import Interrupted
from tests.helpers import LONG, kill, until
from tests.small import config, finished, run_digest, worker
from tests.test_divergence import console_text
from tests.test_fork import forking
from train.member.own_fragments import LOST
from train.member.pretraining_tasks import maker
from train.pretraining_export import Exporter
from train.training_commands import check_settings

FOUR = {"algorithm": "diloco", "fragments": 4, "shards": 2, "inner_steps": 2, "max_generations": 6}
either = pytest.mark.parametrize("overlap", [0, 1])  # whether a part is there in the next round, or in the one after it


def losses(history):
    """Who had to begin with what all have."""
    members = [each for round in range(1, history.first_open) for each in history.round(round)]
    return [each.id for each in members if LOST in each.metrics]


def made_by(place, makers, **keys):
    """Each recipe by the one of these makers that `makers` says, and what that one remembers."""
    c = config(**{**FOUR, **keys})
    there = [maker(c) for _ in range(2)]
    place.mkdir()
    one = worker(place, c, make=lambda work: there[makers(work.id)](work))
    assert one.run() == "over"
    return one.history


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("calm"), **FOUR)


def test_who_stays_loses_nothing_and_makes_the_same_again(tmp_path, calm):
    assert not losses(calm)
    assert digest(finished(tmp_path, **FOUR)) == digest(calm)


def test_one_fragment_is_exchanged_at_a_time_and_a_quarter_of_the_bytes(tmp_path, calm):
    whole = finished(tmp_path, **{**FOUR, "fragments": 1, "max_generations": 3})
    for round in (3, 4, 5):
        made = [each for each in calm.round(round) if each.recipe.task == "shard" and each.id == each.origin]
        assert [each.id for each in made] == [f"{round}/shard-{2 * (round % 4) + n}" for n in (0, 1)]
        names = {name for name in calm[f"{round}/replica-0"].digests if name.startswith("change")}
        assert names == {f"change-{2 * (round % 4) + n}.safetensors" for n in (0, 1)}
    published = [point(history, 3).values["bytes/published"] for history in (whole, calm)]
    assert published[1] == pytest.approx(published[0] / 4, rel=0.1)


@either
def test_its_own_weights_are_what_a_slot_goes_on_from(tmp_path, overlap):
    """One replica alone, whose changes arrive as they are: that is training without a pause, in whatever parts."""
    exact = {"population_size": 1, "wire_dtype": "fp32", "shards": 1}
    exact |= {"inner_optimizer_state": "reset" if overlap else "exact"}  # moments arrive late, too
    apart = finished(tmp_path / "apart", **{**FOUR, **exact, "fragments": 3, "overlap": overlap})
    whole = finished(tmp_path / "whole", **{**FOUR, **exact, "fragments": 1})
    trained = [[history[f"{n}/replica-0"].metrics["train_loss"] for n in range(1, 7)] for history in (apart, whole)]
    assert trained[0] == pytest.approx(trained[1], rel=1e-5)
    keys = {**exact, "fragments": 3, "overlap": overlap}
    lost = made_by(tmp_path / "lost", lambda id: int(id == "3/replica-0"), **keys)
    assert lost["3/replica-0"].metrics["train_loss"] != pytest.approx(trained[1][2], rel=1e-5)


def test_a_part_that_comes_late_is_what_came_of_the_round_before_the_last(tmp_path, calm):
    """Nobody waits for the last round's; who stays loses nothing, and makes the same again."""
    late, again = (finished(tmp_path / str(n), **FOUR, overlap=1) for n in range(2))
    assert [late[id].origin for id in late["4/replica-0"].recipe.parents] == [
        *("0/shard-0", "0/shard-1", "1/shard-2", "1/shard-3", "2/shard-4", "2/shard-5", "0/shard-6", "0/shard-7")
    ]
    assert not losses(late) and digest(late) == digest(again) != digest(calm)


@either
def test_what_is_lost_with_a_machine_is_told_everywhere(tmp_path, calm, overlap):
    history = made_by(tmp_path / "moved", lambda id: int(id in ("5/replica-1", "6/replica-1")), overlap=overlap)
    assert losses(history) == ["5/replica-1"] and digest(history) != digest(calm)
    assert Progress(history, 6).line(5).endswith("per byte, replica-1 lost what it had not exchanged")
    assert [point(history, round).values.get("members/lost_own") for round in (4, 5, 6)] == [None, 1.0, None]
    failures = RunReader(history.store.root).look().failures
    assert [(each.id, each.why) for each in failures] == [("5/replica-1", "replica-1 lost what it had not exchanged")]


def test_who_looks_at_the_status_is_told(tmp_path):
    c, there = config(**FOUR), [maker(config(**FOUR)) for _ in range(2)]

    def make(work):
        if work.id == "6/replica-0":
            one.host.stop()
        return there[work.id == "5/replica-1"](work)

    one = worker(tmp_path, c, make=make)
    assert one.run() == "interrupted"
    assert "round 5: replica-1 lost what it had not exchanged" in console_text(View(tmp_path / "run").picture())


@either
def test_who_comes_back_has_what_does_not_count_any_more(tmp_path, overlap):
    history = made_by(tmp_path / "back", lambda id: int(id == "4/replica-3"), overlap=overlap)
    assert losses(history) == ["4/replica-3", "5/replica-3"]


@either
@pytest.mark.parametrize("lost", [False, True])
def test_who_goes_on_from_a_snapshot_has_lost_what_had_been_lost_before_it(tmp_path, lost, overlap):
    """Where parts come late, the one who goes on does not know what was learned since the turn began: see the last."""
    c = config(**{**FOUR, "inner_steps": 4, "overlap": overlap})
    there, hit = [maker(config(**FOUR, overlap=overlap)) for _ in range(3)], list[str]()

    def make(work):
        if work.id != "5/replica-1":
            return there[2 if hit and overlap and work.recipe.slot == "replica-1" else 0](work)
        between = work.between_steps

        def once(step, save):
            if step == 2 and not hit:
                hit.append(work.id)
                work._saved = -1e9  # a snapshot is due
                between(step, save)
                raise Interrupted
            between(step, save)

        work.between_steps = once
        return there[2 if hit else int(lost)](work)

    one = worker(tmp_path, c, make=make)
    assert one.run() == "over" and hit
    assert losses(one.history)[:1] == (["5/replica-1"] if lost else ["6/replica-1"])


@either
def test_the_whole_model_is_exported_and_a_fork_goes_on_from_it(tmp_path, overlap):
    history = finished(tmp_path, **FOUR, overlap=overlap)
    members, weights = Exporter(tmp_path / "run").chosen("average")
    assert len(members) == 8 and len(weights) == history["0/init-0"].metrics["parameters"]
    longer = forking(tmp_path, **{**FOUR, "max_generations": 8, "overlap": 1})
    assert longer.over and losses(longer) == [f"7/replica-{k}" for k in range(4)]


@pytest.mark.parametrize(
    "keys, why",
    [
        ({"algorithm": "edt"}, "FRAGMENTS are there for DiLoCo, which has one model to cut: set FRAGMENTS to 1"),
        ({"error_feedback": True}, "ERROR_FEEDBACK is there for models exchanged as a whole: set FRAGMENTS to 1"),
    ],
)
def test_what_does_not_go_with_it_is_refused(keys, why):
    with pytest.raises(UserError, match=why):
        check_settings(config(**{**FOUR, **keys}))


@pytest.mark.slow
def test_two_lanes_make_the_bytes_of_one(pretraining):
    """Where parts come late, a lane writes while the next turn has begun."""
    keys = {**FOUR, "max_generations": 12, "overlap": 1}
    runs = [pretraining("diloco_sim.py", **keys, disk_lane=lane) for lane in (False, True)]
    for run in runs:
        run.start(1).ends(0, LONG)
        assert not losses(run.history())
    assert run_digest(runs[0]) == run_digest(runs[1])


@pytest.mark.slow
def test_a_worker_that_is_killed(pretraining):
    """A real one; whoever takes its place says what was lost, in the run's own lines."""
    run = pretraining("diloco_sim.py", **{**FOUR, "max_generations": 12})
    starter = run.start(1)
    until(lambda: run.registers(r"00003/global.*\.done"), "round 3 is made", LONG)
    kill(next(iter(run.alive().values())))
    starter.ends(0, LONG)
    lost = losses(run.history())
    assert lost and all(id.partition("/")[2] in starter.said for id in lost)

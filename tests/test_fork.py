"""A run that goes on from another: the same bytes as one configured so, text that is new, and every refusal."""

import dataclasses
import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from diloco import DiLoCo
from edt import EDT
from fleet import fork
from fleet.context import Stopped
from fleet.digest import digest
from fleet.fork import ForkOrder
from fleet.history import History, opened
from fleet.host import Host
from fleet.method import Method
from fleet.run import open_run
from fleet.run_config import UserError
from tests.small import config, finished, shared, worker
from train.batches import TokenFile
from train.exchange_config import Forked
from train.forking import forked
from train.member.pretraining_tasks import maker
from train.pretraining_export import Exporter
from train.token_budget import origin_of
from train.training_commands import prepare
from train.training_config import TrainConfig

STRATEGIES = {"edt": EDT, "diloco": DiLoCo}
OTHERS = {**STRATEGIES, "ring": EDT}  # whatever is called otherwise is a population


def steady(place: Path, **keys):
    """A run of which all text is on the disk after a few rounds, and whose rate stays what it is."""
    text = place / "text.jsonl"
    text.write_text("".join((shared() / "text.jsonl").read_text().splitlines(True)[:50]))
    more = {"lr_schedule": "constant", "max_epochs": 1e4, "held_out": 0.2, "batch_size": 8, "inner_steps": 6}
    return {**more, "datasets": ({"source": str(text)},), "population_size": 2, **keys}


def forking(base: Path, name: str = "new", round: int | None = None, run: str = "run", **settings) -> History:
    """Fork the run of this folder, and finish it with one worker of this process."""
    order = ForkOrder(run=base / run, round=round, settings=settings, name=name, config=base / f"{name}.json")
    algorithm = settings.get("algorithm") or open_run(base / run, Host(), "test")[1]["config"]["algorithm"]
    method = Method(algorithm, "", TrainConfig, OTHERS[algorithm], maker, forked=forked)
    assert fork.fork(method, order) == 0
    c = TrainConfig(**json.loads((base / f"{name}.json").read_text().lower().replace(f'"{name}"', '"run"')))
    moved = base / f"of-{name}"
    moved.mkdir()
    os.rename(base / name, moved / "run")  # where `worker` looks for a run
    bound = open_run(moved / "run", Host(), "test")[1]["config"]
    assert bound == {**c.bound(), "project_name": name}
    one = worker_of(moved, bound)
    assert one.run() == "over"
    return one.history


def worker_of(place: Path, bound):
    return worker(place, TrainConfig(**bound))


@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_with_more_rounds_it_is_the_run_that_was_configured_so(tmp_path, algorithm):
    keys = steady(tmp_path, algorithm=algorithm, max_generations=2, average_every=2)
    before = digest(finished(tmp_path, **keys))
    wanted = finished(tmp_path / "long", **{**keys, "max_generations": 4})
    history = forking(tmp_path, max_generations=4)
    assert digest(history) == digest(wanted)
    assert digest(opened(tmp_path / "run")) == before
    assert Exporter(tmp_path / "of-new" / "run").chosen("average")[0]


def test_a_strategy_of_ones_own_goes_on_as_a_population(tmp_path):
    finished(tmp_path, **steady(tmp_path, max_generations=1))
    history = forking(tmp_path, algorithm="ring", max_generations=2, population_size=3)
    assert history.over and history["1/m2"].origin == "1/m0" and history["2/m2"].metrics["loss"] > 0


@pytest.mark.slow
def test_a_fork_of_a_fork_is_too(tmp_path):
    keys = steady(tmp_path, algorithm="diloco", max_generations=2)
    finished(tmp_path, **keys)
    wanted = finished(tmp_path / "long", **{**keys, "max_generations": 5})
    forking(tmp_path, max_generations=3)
    assert digest(forking(tmp_path / "of-new", "newer", max_generations=5)) == digest(wanted)


@pytest.mark.parametrize("before, after", [(1, 1), (0, 1), (1, 0)])
def test_halves_that_take_turns_go_on_so_or_otherwise(tmp_path, before, after):
    keys = steady(tmp_path, algorithm="diloco", max_generations=2, overlap=before)
    finished(tmp_path, **keys)
    history = forking(tmp_path, max_generations=4, overlap=after)
    if before == after:
        assert digest(history) == digest(finished(tmp_path / "long", **{**keys, "max_generations": 4}))
    losses = [history[f"{round}/global"].metrics["loss"] for round in (2, 4)]
    assert losses[1] < losses[0]


def test_registers_and_files_are_shared_where_they_never_change(tmp_path):
    finished(tmp_path, **steady(tmp_path, max_generations=1))
    history = forking(tmp_path, max_generations=2)
    plan, last = "rounds/00001/plan", f"files/{history.outcome('1/m0').attempt}/weights-0.safetensors"
    for path in (plan, last):
        assert (tmp_path / "run" / path).stat().st_ino == (tmp_path / "of-new/run" / path).stat().st_ino


def test_what_is_made_anew_is_not_told_of_by_an_old_summary(tmp_path):
    """Loggers sum up finished rounds. A longer run needs more tokens than those that round 0 was summed up with."""
    finished(tmp_path, max_generations=1).sum_up(0)
    forking(tmp_path, max_generations=4)
    again = opened(tmp_path / "of-new" / "run")
    assert len(again.round(0)) == 3
    for id in ("0/tokenizer", "0/tokens-0", "0/init-0"):
        assert (tmp_path / "of-new/run/files" / again.outcome(id).attempt).is_dir()


def test_diloco_goes_on_as_evolution_that_chooses(tmp_path):
    """The round that it goes on from has replicas, whom no loss tells apart."""
    finished(tmp_path, algorithm="diloco", max_generations=2)
    history = forking(tmp_path, algorithm="edt", selection="rank", group_size=2, max_generations=4)
    assert all("loss" in history[f"4/m{k}"].metrics for k in range(4))


@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_moments_may_travel_in_other_numbers(tmp_path, algorithm):
    finished(tmp_path, **steady(tmp_path, algorithm=algorithm, max_generations=2))
    history = forking(tmp_path, max_generations=4, inner_optimizer_state="exact")
    one = {"edt": "4/m0", "diloco": "4/replica-0"}[algorithm]
    (before, _), (after, _) = (history.files(id).files["average-0.safetensors"] for id in (one.replace("4", "2"), one))
    assert after > 3 * before and history.over


def test_members_in_parts_and_in_one_file_have_children_together(tmp_path):
    """Those of families come in parts; where parents are drawn, those that are new do not, and the elite is old."""
    finished(tmp_path, **steady(tmp_path, max_generations=1, population_size=4, selection="hypercube", group_size=4))
    history = forking(tmp_path, selection="rank", group_size=3, elitism=1, max_generations=3, average_every=1)
    parts = {sum(name.startswith("weights") for name in history.files(f"2/m{k}").files) for k in range(4)}
    assert parts == {1, 4}
    assert "loss" in history["3/average"].metrics


@pytest.mark.parametrize("old, new", [("edt", "diloco"), ("diloco", "edt")])
@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_another_method_goes_on_where_the_first_would_have(tmp_path, old, new, momentum):
    """Where all are parents of all, EDT's mean is DiLoCo's model; so is what follows, whoever goes on."""
    exact = {"wire_dtype": "fp32", "inner_optimizer_state": "exact"}
    outer = {"outer_momentum": momentum, "outer_lr": 0.8}
    keys = steady(tmp_path, max_generations=2, group_size=2, average_every=1, **exact, **outer)
    finished(tmp_path, algorithm=old, **keys)
    stays = finished(tmp_path / "long", algorithm=new, **{**keys, "max_generations": 3})
    history = forking(tmp_path, algorithm=new, max_generations=3)
    summary = {"edt": "3/average", "diloco": "3/global"}[new]
    assert history[summary].metrics["loss"] == pytest.approx(stays[summary].metrics["loss"], abs=2e-3)
    assert history[summary].metrics["loss"] < opened(tmp_path / "run")[f"1/{summary_of(old)}"].metrics["loss"]
    exporter = Exporter(tmp_path / "of-new" / "run")
    assert len(exporter.chosen("average")[0]) == 2


@pytest.mark.parametrize("old, new", [("edt", "diloco"), ("diloco", "edt")])
def test_there_and_back_at_the_same_round_is_refused_in_a_line(tmp_path, old, new):
    finished(tmp_path, algorithm=old, **steady(tmp_path, max_generations=1, group_size=2))
    forking(tmp_path, algorithm=new, max_generations=2)
    with pytest.raises(UserError, match=f"--round 1: this run has gone from {old} to {new} at this very round"):
        forking(tmp_path / "of-new", "newer", round=1, algorithm=old, max_generations=2)


def summary_of(algorithm):
    return {"edt": "average", "diloco": "global"}[algorithm]


@pytest.mark.parametrize("algorithm", STRATEGIES)
@pytest.mark.parametrize("slots", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_more_or_fewer_slots_go_on_from_those_that_there_were(tmp_path, algorithm, slots):
    finished(tmp_path, **steady(tmp_path, algorithm=algorithm, max_generations=1))
    history = forking(tmp_path, population_size=slots, max_generations=2, group_size=1)
    name = {"edt": "m", "diloco": "replica-"}[algorithm]
    assert sum(recipe.slot.startswith(name) for recipe in history.plan(2)) == slots
    if slots > 2:
        assert history[f"1/{name}2"].origin == f"1/{name}0"


def test_more_text_and_a_falling_rate(tmp_path, capsys):
    """More rounds than there were tokens for, and another source: they are made anew, the same text first."""
    finished(tmp_path, max_generations=2)
    old = opened(tmp_path / "run")
    text = str(shared() / "text.jsonl")
    sources = [{"source": text}, {"source": text, "text_field": "text", "weight": 2.0, "evaluated": False}]
    history = forking(tmp_path, max_generations=8, datasets=sources, lr=0.005)
    before, after = (each.files("0/tokens-0").read("train") for each in (old, history))
    assert len(after) > len(before) and after.startswith(before)
    assert history["0/tokens-1"].metrics["train"] and history["8/m0"].metrics["loss"] < old["2/m0"].metrics["loss"]
    said = capsys.readouterr().out
    assert "the learning rate was" in said and said.count("the same text first") == 1
    assert f"{text} is another source: it begins anew" in said


def test_a_text_that_has_grown(tmp_path, capsys):
    """Too little text for longer, and what the message advises is done: what was learned comes first, and then more."""
    keys = steady(tmp_path, max_epochs=1.0, max_generations=1, inner_steps=2, first_inner_steps=2)
    file = Path(keys["datasets"][0]["source"])
    finished(tmp_path, **keys)
    old = opened(tmp_path / "run")
    order = ForkOrder(run=tmp_path / "run", round=1, settings={"max_generations": 9}, name="new", config=tmp_path / "c")
    method = Method("edt", "", TrainConfig, EDT, maker, prepare=prepare, forked=forked)
    with pytest.raises(UserError, match="give it more text"):
        fork.fork(method, order)
    assert not (tmp_path / "new").exists()
    lines = (shared() / "text.jsonl").read_text().splitlines(True)
    file.write_text("".join(lines[:200]))
    capsys.readouterr()
    history = forking(tmp_path, max_generations=9)
    before, after = (each.files("0/tokens-0").read("train") for each in (old, history))
    assert len(after) > 1.5 * len(before) and after.startswith(before) and history.over
    assert f"more of {file} becomes tokens, the same text first" in capsys.readouterr().out


def test_no_sequence_comes_again_before_all_have_come():
    """A first run reads some of 40 windows, one that goes on from it has 100; the last one 130."""
    values = np.arange(131)
    for used in (25, 40, 60):
        first = TokenFile(values[:41], 2)
        second = TokenFile(values[:101], 2, earlier=[(used, 40)])
        third = TokenFile(values, 2, earlier=[(used, 40), (used + 20, 100)])
        seen = [int(first.drawn(n, (1, 0))[0]) for n in range(used)]
        assert [int(second.drawn(n, (1, 0))[0]) for n in range(min(used, 40))] == seen[:40]
        seen += [int(second.drawn(n, (1, 0))[0]) for n in range(used, used + 20)]
        seen += [int(third.drawn(n, (1, 0))[0]) for n in range(used + 20, max(used, 40) + 90)]
        assert len({*seen}) == 130 and len(seen) == 130 + max(0, used - 40)
    same = TokenFile(values, 2, earlier=[(17, 130)])
    assert all(same.drawn(n, (1, 0))[0] == TokenFile(values, 2).drawn(n, (1, 0))[0] for n in range(400))


def test_a_source_that_is_new_begins_with_its_first_pass():
    points = [
        Forked(round=1, steps=4, sequences=32, windows=(9,)),
        Forked(round=2, steps=9, sequences=70, windows=(8, 0)),
    ]
    c = config(forked=tuple(points))
    assert origin_of(c, 0) == (0, ((32, 9), (70, 8))) and origin_of(c, 1) == (70, ())


def test_steps_and_numbers_go_on_where_they_were():
    c = config(first_inner_steps=2, inner_steps=30, max_generations=60)
    same = c.model_copy(update={"forked": tuple(point(c, round) for round in (3, 17))})
    assert [same.steps_before(n) for n in range(18, 62)] == [c.steps_before(n) for n in range(18, 62)]
    assert same.sequences == c.sequences
    other = c.model_copy(update={"forked": (point(c, 20),), "population_size": 8, "inner_steps": 7})
    firsts = [other.first_number(other.steps_before(n), slot) for n in range(21, 30) for slot in range(8)]
    assert firsts[0] == c.first_number(c.steps_before(21)) and all(a < b for a, b in pairwise(sorted(firsts)))


def point(c: TrainConfig, round: int) -> Forked:
    steps = c.steps_before(round + 1)
    return Forked(round=round, steps=steps, sequences=c.first_number(steps), windows=(100,))


@pytest.mark.parametrize("round, settings, said", [
    (None, {}, "MAX_GENERATIONS is 4, and round 4 is done"),
    (7, {"max_generations": 9}, "rounds 1 to 4 are finished"),
    (0, {"max_generations": 9}, "round 0 only prepares"),
    (1, {"max_generations": 9}, "rounds whose files are there: 3, 4 "),
    (None, {"max_generations": 9, "vocab_size": 500}, "VOCAB_SIZE cannot change"),
    (None, {"max_generations": 9, "inner_optimizer": "adamw"}, "INNER_OPTIMIZER cannot change"),
    (None, {"max_generations": 9, "outer_momentum": 0.5}, "OUTER_MOMENTUM is 0.5 and was 0.0"),
    (None, {"max_generations": 9, "inner_optimizer_state": "reset"}, "INNER_OPTIMIZER_STATE is reset and was average"),
    (None, {"max_generation": 9}, "unknown key"),
    (None, {"max_generations": 900, "max_epochs": 1.0}, "training tokens where the run needs"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_made(run_of_four, round, settings, said):
    before = sorted(os.listdir(run_of_four))
    with pytest.raises(UserError, match=said):
        forking(run_of_four, round=round, **settings)
    assert sorted(os.listdir(run_of_four)) == before


@pytest.fixture(scope="module")
def run_of_four(tmp_path_factory):
    place = tmp_path_factory.mktemp("four")
    finished(place, **steady(place, max_generations=4))
    return place


@pytest.mark.parametrize("elitism", [0, 1])
def test_rounds_that_are_kept_can_be_forked(tmp_path, elitism):
    keys = steady(tmp_path, max_generations=6, keep_every=2, selection="rank", elitism=elitism, group_size=1)
    keys["inner_optimizer"] = "muon"
    finished(tmp_path, **keys)
    history = opened(tmp_path / "run")
    there = {int(each[:5]) for each in history.store.names("files")}
    assert there == {0, 2, 4, 5, 6} if not elitism else there >= {0, 2, 4, 5, 6}
    forking(tmp_path, round=2, max_generations=3, lr=0.02, inner_optimizer="muon+")  # its moments are Muon's


@pytest.mark.parametrize("id, file, help", [
    ("1/m1", "weights-0.safetensors", "choose another --round"),
    ("0/init-0", "config.json", "every round needs it: let"),
])  # fmt: skip
def test_damage_is_found_and_leaves_nothing_behind(tmp_path, id, file, help):
    history = finished(tmp_path, **steady(tmp_path, max_generations=1))
    path = tmp_path / "run" / "files" / history.outcome(id).attempt / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{id} is damaged where it comes from: .*; {help}"):
        forking(tmp_path, max_generations=2)
    assert not [each for each in os.listdir(tmp_path) if each.startswith("new")]


def test_the_name_must_be_free(tmp_path):
    finished(tmp_path, **steady(tmp_path, max_generations=1))
    with pytest.raises(UserError, match="choose another --name"):
        forking(tmp_path, "run", max_generations=2)
    method = Method("toy", "", TrainConfig, EDT, maker)
    order = ForkOrder(run=tmp_path / "run", round=None, settings={}, name="new", config=tmp_path / "new.json")
    with pytest.raises(UserError, match="cannot be forked"):
        fork.fork(dataclasses.replace(method, forked=None), order)


def test_settings_are_json_or_text():
    assert fork._setting("LR=0.5") == ("lr", 0.5) and fork._setting("algorithm=diloco") == ("algorithm", "diloco")
    with pytest.raises(UserError, match="KEY=VALUE is expected"):
        fork._setting("LR")


def forked_and_damaged(place: Path, file: str, id: str, **settings) -> Path:
    """A fork of two rounds, of which one file that was carried over is damaged afterwards."""
    finished(place, **steady(place, max_generations=2, average_every=1))
    settings = {"max_generations": 3, **settings}
    order = ForkOrder(run=place / "run", round=None, settings=settings, name="new", config=place / "new.json")
    assert fork.fork(Method("edt", "", TrainConfig, EDT, maker, forked=forked), order) == 0
    (place / "of-new").mkdir()
    os.rename(place / "new", place / "of-new" / "run")
    folder = place / "of-new" / "run"
    path = folder / "files" / opened(folder).outcome(id).attempt / file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()  # the run that it comes from has the same file
    path.write_bytes(data)
    return folder


@pytest.mark.parametrize("id, file, settings", [
    ("0/tokens-0", "train", {"eval_sequences": 2}), ("0/init-0", "config.json", {"seed": 7}),
    ("2/m0", "weights-0.safetensors", {}),
])  # fmt: skip
def test_what_was_carried_over_is_not_made_again_otherwise(tmp_path, id, file, settings):
    folder = forked_and_damaged(tmp_path, file, id, **settings)
    bound = open_run(folder, Host(), "test")[1]["config"]
    with pytest.raises(Stopped, match=f"{id} was carried over from another run, .*: fork that one again"):
        worker_of(tmp_path / "of-new", bound).run()


def test_what_was_carried_over_is_made_again_where_it_is_the_same(tmp_path):
    folder = forked_and_damaged(tmp_path, "train", "0/tokens-0")
    bound = open_run(folder, Host(), "test")[1]["config"]
    one = worker_of(tmp_path / "of-new", bound)
    assert one.run() == "over" and one.history.outcome("0/tokens-0").version == 1
    wanted = finished(tmp_path / "long", **steady(tmp_path, max_generations=3, average_every=1))
    assert digest(one.history) == digest(wanted)

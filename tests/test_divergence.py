"""Training that comes to NaN or infinite numbers: an outcome like any other, until a slot has it again and again."""

import math

import pytest
import torch

from fleet.context import Stopped
from fleet.digest import digest
from fleet.metrics.points import point
from fleet.progress import Progress
from fleet.report.run_reader import RunReader
from fleet.status import View
from fleet.work import Interrupted
from merge.outer_step import OuterOptimizer
from tests.small import config, finished, worker
from train.learner import Learner
from train.member import vectors
from train.member.pretraining_tasks import maker
from train.verdicts import NotFinite

# Decay makes the weights -7 times as large with each step where the rate is 4 times LR, and leaves them where it is 1.
WILD = {
    "lr": 1.0, "weight_decay": 2.0, "clip": 0.0, "warmup_steps": 0, "lr_schedule": "constant",
    "inner_steps": 48, "max_generations": 2, "mutation_probability": 0.5, "mutation_strength": 2.0,
    "max_epochs": 1e6, "seed": 3, "first_inner_steps": 48, "inner_optimizer": "adamw",
}  # fmt: skip
HOPELESS = {**WILD, "lr": 10.0, "mutation_probability": 0.0, "max_generations": 4}


def console_text(picture) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as captured:
        console.print(*picture)
    return captured.get()


def loaded(history, id: str, stem: str) -> torch.Tensor:
    """With AdamW, every vector has as many numbers as the model."""
    return torch.cat([*vectors.read_stem(history.files(id), stem, history["0/init-0"].metrics["parameters"])])


def all_finite(history, rounds: range) -> bool:
    """Of every tensor that was published."""
    from safetensors.torch import load

    found = []
    for round in rounds:
        for member in filter(None, history.round(round)):
            files = history.files(member.id)
            found += [
                bool(tensor.isfinite().all())
                for name in member.digests
                if name.endswith(".safetensors")
                for tensor in load(files.read(name)).values()
            ]
    return len(found) > 8 and all(found)


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("wild"), **WILD)


def test_a_child_that_diverges_is_its_parents_mean_and_the_run_goes_on(wild):
    assert wild.over and all_finite(wild, range(1, 3))
    diverged = [member for round in (1, 2) for member in wild.round(round) if member.metrics.get("diverged")]
    (child,) = diverged
    parents = child.recipe.parents
    mean = torch.stack([loaded(wild, id, vectors.WEIGHTS) for id in parents]).mean(0)
    assert torch.allclose(loaded(wild, child.id, vectors.WEIGHTS), mean, rtol=0, atol=float(mean.abs().max()) / 2000)
    best = min((wild[id].metrics for id in parents), key=lambda metrics: metrics["loss"])
    assert child.metrics["genome_rate"] == best["genome_rate"] and math.isfinite(child.metrics["loss"])
    assert "train_loss" not in child.metrics and child.metrics["diverged_in_a_row"] == 1
    mean = torch.stack([loaded(wild, id, "average") for id in parents]).mean(0)
    assert torch.allclose(loaded(wild, child.id, "average"), mean, atol=float(mean.abs().max()) / 10)
    assert bool(mean.any()) and bool(loaded(wild, child.id, "square").all())


def test_whoever_makes_them_and_however_often_they_are_interrupted(tmp_path, wild):
    """By workers that forget everything, from snapshots of every tenth step: members that diverge are the same."""
    c, kept = config(**WILD), [0]
    (tmp_path / "again").mkdir()

    def interrupting(work):
        between = work.between_steps

        def often(step, save):
            if step % 10 == 0 and not (work.resumed and work.resumed.step == step):
                work._saved = -1e9  # a snapshot is due
                between(step, save)
                kept[0] += 1
                raise Interrupted
            between(step, save)

        work.between_steps = often
        return maker(c)(work)

    one = worker(tmp_path / "again", c, make=interrupting)
    assert one.run() == "over" and kept[0] > 20
    assert digest(one.history) == digest(wild)


def test_people_are_told(wild, capsys):
    (child,) = [member.id for round in (1, 2) for member in wild.round(round) if member.metrics.get("diverged")]
    round, slot = int(child.partition("/")[0]), child.partition("/")[2]
    assert f"diverged: {slot}" in Progress(wild, 2).line(round)
    assert point(wild, round).values["members/diverged"] == 1.0
    assert [row["diverged"] for row in point(wild, round).rows if row["slot"] == slot] == [True]
    failures = RunReader(wild.store.root).look().failures
    assert [each.id for each in failures if "diverged" in each.why] == [child]


@pytest.mark.parametrize("algorithm, slot", [("edt", "m"), ("diloco", "replica-")])
def test_three_rounds_of_it_in_a_row_stop_a_run(tmp_path, algorithm, slot):
    words = "; training has diverged in 3 rounds in a row of this slot; its learning rate reached 10: try a lower LR"
    with pytest.raises(Stopped, match=rf"^3/{slot}\d cannot be made: the loss became (nan|inf){words}"):
        finished(tmp_path, algorithm=algorithm, **HOPELESS)
    from fleet.history import opened

    history = opened(tmp_path / "run")
    assert all(history[f"2/{slot}{k}"].metrics["diverged_in_a_row"] == 2 for k in range(4))
    picture = console_text(View(tmp_path / "run").picture())
    assert "diverged: round " in picture and f"round 2: {slot}0 (2 rounds in a row)" in picture


def test_with_a_quorum_a_slot_that_diverges_for_good_is_absent_now_and_then(tmp_path):
    """Three rounds of it are a failure of an optional recipe: the round goes on without it."""
    history = finished(tmp_path, quorum=0.5, **{**HOPELESS, "population_size": 2})
    told = [[m.absent or m.metrics["diverged_in_a_row"] for m in history.round(n) if "/m" in m.id] for n in (1, 2, 3)]
    assert told == [[1, 1], [2, 2], ["failed", "failed"]]


def test_a_generation_of_which_nobody_is_left_ends_the_run_and_the_last_that_was_there_can_be_exported(tmp_path):
    from train.pretraining_export import Exporter

    with pytest.raises(Stopped, match="nobody is left in generation 3: failed; an earlier one can be exported"):
        finished(tmp_path, quorum=0.5, **{**HOPELESS, "population_size": 2, "max_generations": 12})
    exporter = Exporter(tmp_path / "run")
    assert exporter.last == 2 and bool(exporter.chosen("average")[1].isfinite().all())


@pytest.fixture
def broken(monkeypatch):
    """One slot's weights are NaN after its last step of round 2, or its moments."""

    def breaking(which: str, slot: int) -> None:
        from train.member.pretraining_runtime import PretrainingRuntime

        real, real_train, now = Learner.finite, PretrainingRuntime.train, [False]

        def train(self, work, turn, *more):
            now[0] = turn.round == 2 and turn.slot == slot
            return real_train(self, work, turn, *more)

        def finite(self):
            if now[0]:
                (self.vector if which == "weights" else self.vectors["square"])[3] = math.nan
            return real(self)

        monkeypatch.setattr(PretrainingRuntime, "train", train)
        monkeypatch.setattr(Learner, "finite", finite)

    return breaking


@pytest.mark.parametrize(
    "keys",
    [
        {"wire_dtype": "fp32", "inner_optimizer_state": "exact"},
        {"wire_dtype": "fp32", "outer_lr": 0.7, "outer_momentum": 0.6},
        {"wire_dtype": "int8", "error_feedback": True},
        {"wire_dtype": "fp32", "inner_optimizer_state": "reset"},
    ],
)
def test_a_replica_that_diverges_changes_nothing_and_counts(tmp_path, broken, keys):
    """The mean is that of all replicas, of which one says zero."""
    broken("weights", 1)
    history = finished(tmp_path, algorithm="diloco", shards=1, max_generations=2, **keys)
    assert [m.id for n in (1, 2) for m in history.round(n) if m.metrics.get("diverged")] == ["2/replica-1"]
    changes = [loaded(history, f"2/replica-{k}", "change") for k in range(4)]
    assert all(bool(change.any()) for n, change in enumerate(changes) if n != 1) and all_finite(history, range(1, 3))
    if keys["wire_dtype"] == "int8":  # what the wire has lost of earlier messages still arrives
        assert 0 < changes[1].abs().max() < changes[0].abs().max() / 10
    else:
        assert not bool(changes[1].any())
    outer = OuterOptimizer(keys.get("outer_lr", 1.0), keys.get("outer_momentum", 0.0), True)
    old = [loaded(history, "1/shard-0", name) for name in vectors.outer_stems(outer)]
    wanted = outer.step(old, torch.stack(changes).sum(0) / 4)
    lost = float((wanted[0] - old[0]).abs().max()) / 20 if keys["wire_dtype"] == "int8" else 1e-6
    for name, tensor in zip(vectors.outer_stems(outer), wanted, strict=True):
        assert torch.allclose(loaded(history, "2/shard-0", name), tensor, atol=lost)
    if keys.get("inner_optimizer_state") == "exact":
        before = loaded(history, "1/shard-0", "average")
        assert torch.equal(loaded(history, "2/replica-1", "average"), before) and bool(before.any())


@pytest.mark.parametrize("which", ["weights", "moments"])
def test_nothing_that_is_no_number_is_published(tmp_path, broken, which):
    broken(which, 2)
    history = finished(tmp_path, max_generations=2)
    assert [m.id for n in (1, 2) for m in history.round(n) if m.metrics.get("diverged")] == ["2/m2"]
    assert all_finite(history, range(1, 3))


def test_a_child_that_answers_with_no_number_is_its_parents_mean(tmp_path, monkeypatch):
    """Its weights may be finite and say nothing."""
    from train.member.pretraining_runtime import PretrainingRuntime

    real, asked = PretrainingRuntime.evaluate, []

    def evaluate(self, work, weights, on):
        asked.append(work.id)
        if asked.count("2/m2") == 1 and work.id == "2/m2":
            raise NotFinite("the loss on held-out text is inf")
        return real(self, work, weights, on)

    monkeypatch.setattr(PretrainingRuntime, "evaluate", evaluate)
    history = finished(tmp_path, max_generations=2)
    assert history["2/m2"].metrics["diverged"] and asked.count("2/m2") == 2
    mean = torch.stack([loaded(history, id, vectors.WEIGHTS) for id in history["2/m2"].recipe.parents]).mean(0)
    assert torch.allclose(loaded(history, "2/m2", vectors.WEIGHTS), mean, rtol=0, atol=float(mean.abs().max()) / 2000)

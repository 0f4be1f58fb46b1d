"""Whole runs of pre-training: the same bytes however they are made, and what the two algorithms promise."""

import json
import math
import random
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fleet.digest import digest
from fleet.metrics.points import points
from fleet.run_config import UserError
from fleet.scratch import passing
from fleet.work import Interrupted
from merge.outer_step import OuterOptimizer
from tests.commands import answer
from tests.helpers import LONG, kill, mounted, until
from tests.small import config, finished, run_digest, whole, worker
from train.batches import batch, owned
from train.learner import Learner, rate
from train.member import pretraining_tasks
from train.member.pretraining_tasks import TASKS, maker
from train.pretraining_export import Exporter

# -- the same bytes ----------------------------------------------------------------------------------------------------

SETTINGS = [
    {"algorithm": "edt", "first_inner_steps": 1, "inner_steps": 2, "max_generations": 5}, {"algorithm": "diloco"},
    {"algorithm": "diloco", "inner_optimizer_state": "reset", "shards": 3},
    {"algorithm": "edt", "group_size": 3, "population_size": 6, "selection": "matching", "mutation_probability": 0.5,
     "outer_lr": 0.7, "outer_momentum": 0.4},
    {"algorithm": "diloco", "wire_dtype": "fp32", "inner_optimizer_state": "exact"},
    {"algorithm": "diloco", "overlap": 1, "population_size": 3},
    {"algorithm": "edt", "selection": "rank", "elitism": 1, "previous_generation": True, "mutation_probability": 0.5},
    {"algorithm": "diloco", "wire_dtype": "normal2", "error_feedback": True, "inner_optimizer": "adamw",
     "inner_optimizer_state": "narrow",
     "outer_momentum": 0.6},
]  # fmt: skip


@pytest.mark.parametrize("keys", SETTINGS, ids=str)
def test_cold_workers_make_what_a_warm_one_makes(tmp_path, keys):
    """A worker that forgets everything after each recipe, and loads it from the disk again."""
    c = config(**keys)
    warm = finished(tmp_path / "warm", **keys)
    (tmp_path / "cold").mkdir()
    cold = worker(tmp_path / "cold", c, make=lambda work: maker(c)(work))
    assert cold.run() == "over"
    assert digest(cold.history) == digest(warm)


def test_a_shard_of_a_worker_that_knows_nothing_reads_the_weights_before_it_once(tmp_path):
    c = config(algorithm="diloco")
    cold = worker(tmp_path, c, make=lambda work: maker(c)(work))
    assert cold.run() == "over"
    lines = (tmp_path / "run" / "workers" / "w.events").read_text().splitlines()
    made = {each["id"]: each["read"] for each in map(json.loads, lines) if each["what"] == "made"}
    recipe = next(each for each in cold.history.plan(3) if each.slot == "shard-0")
    files = {(id, name): size for id in recipe.inputs for name, (size, _) in cold.history.outcome(id).files.items()}
    own = sum(size for (_, name), size in files.items() if name.endswith("-0.safetensors"))
    old = sum(files[recipe.args["old"], f"{stem}.safetensors"] for stem in ("before", "update"))
    assert made["3/shard-0"] == own + old


@pytest.mark.parametrize("size", [6, 5])
def test_who_makes_a_part_of_a_groups_mean_does_not_read_it_again(tmp_path, size):
    """It is named after a member of the group, whose worker makes it; a group with too few has parts beside these."""
    keys = {"group_size": 3, "population_size": size, "selection": "matching", "average_every": 100}
    history = finished(tmp_path, **keys)
    means = [each for each in history.plan(2) if each.task == "mean-part"]
    assert len({each.slot for each in means}) == len(means) == 6
    for each in means:
        number = int(each.slot.removeprefix("mean-"))
        assert number >= size or f"2/m{number}" in each.parents
    lines = (tmp_path / "run" / "workers" / "w.events").read_text().splitlines()
    made = {each["id"]: each["read"] for each in map(json.loads, lines) if each["what"] == "made"}
    assert all(made[f"3/m{k}"] == 0 for k in range(size)) and all(made[f"2/{each.slot}"] for each in means)


@pytest.mark.parametrize("keys", SETTINGS[:3], ids=str)
@pytest.mark.parametrize("stop", [1, 3])
def test_a_recipe_that_is_interrupted_goes_on_where_it_was(tmp_path, keys, stop):
    """Every recipe that takes long is interrupted once, with a snapshot, and taken up by another worker: those that
    train, and the one that makes tokens of the text."""
    keys = {**keys, "first_inner_steps": 10**6, "inner_steps": 4, "max_generations": 3}
    wanted = digest(finished(tmp_path / "calm", **keys))
    c, hit = config(**keys), set()

    def interrupting(work):
        between = work.between_steps

        def once(step, save):
            if step == stop and work.id not in hit:
                hit.add(work.id)
                work._saved = -1e9  # a snapshot is due
                between(step, save)
                raise Interrupted
            between(step, save)

        work.between_steps = once
        return maker(c)(work)

    (tmp_path / "run").mkdir()
    one = worker(tmp_path / "run", c, make=interrupting)
    assert one.run() == "over"
    assert len(hit) == c.max_generations * c.population_size + 1 and "0/tokens-0" in hit
    assert digest(one.history) == wanted


def test_random_tokens_go_on_where_they_were(monkeypatch):
    from train.member import pretraining_round_zero

    monkeypatch.setattr(pretraining_round_zero, "_BLOCK", 10)
    wanted = {"train": 35, "validation": 15, "test": 15}
    made = [
        (at, part, found.tolist()) for at, part, found in pretraining_round_zero._random(config(), 0, 300, wanted, 0)
    ]
    rest = [
        (at, part, found.tolist()) for at, part, found in pretraining_round_zero._random(config(), 0, 300, wanted, 2)
    ]
    assert rest == [each for each in made if each[0] >= 2 or each[1] != "train"] and len(made) == 8


@pytest.mark.slow
@pytest.mark.parametrize("optimizer, several", [("muon+", (2, 4)), ("muon", (2,)), ("adamw", ())])
def test_one_two_and_four_workers_and_kills(pretraining, optimizer, several):
    """Real processes; SIGKILL at a random moment, again and again; then the same command again."""
    keys = {"max_generations": 2, "inner_optimizer": optimizer}
    wanted = whole(pretraining(**keys))
    for workers in several:
        assert whole(pretraining(**keys), workers) == wanted
    run, rng = pretraining(**keys), random.Random(3)
    starter = run.start(2)
    for _ in range(3):
        until(lambda: len(run.alive()) >= 1 or starter.process.poll() is not None, "a worker lives", LONG)
        rng.random()
        for pid in list(run.alive().values())[:1]:
            kill(pid)
    starter.ends(0, LONG)
    assert run_digest(run) == wanted


# -- what the algorithms promise ---------------------------------------------------------------------------------------


def weights(history, what: str) -> torch.Tensor:
    return Exporter(history.store.root).chosen(what)[1]


def test_diloco_with_one_replica_and_a_plain_outer_step_is_plain_training(tmp_path):
    keys = {"population_size": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "outer_nesterov": False}
    keys |= {"max_generations": 1, "first_inner_steps": 10**6, "wire_dtype": "fp32"}
    history = finished(tmp_path, algorithm="diloco", **keys)
    got, exporter = weights(history, "average"), Exporter(tmp_path / "run")
    c, learner = exporter.config, Learner(exporter.model, exporter.config)
    learner.load_weights(exporter.chosen("0-init-0")[1])
    steps = range(c.steps_in(1))
    batches = ([batch(exporter.token_files("train"), [1.0], owned(c, 0, 1, n, 0), c.seed)] for n in steps)
    [*learner.train(batches, (rate(c, n) for n in steps))]
    ulp = torch.nextafter(learner.vector.abs(), torch.tensor(torch.inf)) - learner.vector.abs()
    largest = torch.maximum(ulp, (torch.nextafter(torch.tensor(1e-2), torch.tensor(1.0)) - 1e-2))
    assert ((got - learner.vector).abs() <= 2 * largest).all()


def test_edt_with_one_group_of_all_is_diloco_for_given_changes():
    """u' and m' of a group are the means of its members' own steps: the step of the mean change, within rounding."""
    rng = torch.Generator().manual_seed(1)
    changes = [torch.randn(1000, generator=rng) for _ in range(4)]
    start, momentum, outer = torch.randn(1000, generator=rng), torch.randn(1000, generator=rng), OuterOptimizer()
    own = [outer.step((start, momentum), change) for change in changes]
    u, v = (torch.stack(each).mean(0) for each in zip(*own, strict=True))
    weights, moved = outer.step((start, momentum), torch.stack(changes).mean(0))
    assert torch.allclose(u, weights, atol=1e-6) and torch.allclose(v, moved, atol=1e-6)


@pytest.mark.parametrize("selection", ["matching", "hypercube"])
def test_the_populations_means_follow_diloco(selection):
    """In float64, over many rounds with changes at random: mean u and mean v go the way of DiLoCo's recursion."""
    from edt import EDT

    edt, rng = EDT(config(population_size=8, selection=selection)), torch.Generator().manual_seed(1)
    start = torch.randn(50, dtype=torch.float64, generator=rng)
    members, outer = [(start.clone(), torch.zeros_like(start)) for _ in range(8)], OuterOptimizer()
    whole, momentum = start.clone(), torch.zeros_like(start)
    for generation in range(2, 30):
        changes = [torch.randn(50, dtype=torch.float64, generator=rng) for _ in range(8)]
        families = edt.group_slots(generation)
        started = [[torch.stack([members[p][n] for p in families[k]]).mean(0) for n in (0, 1)] for k in range(8)]
        members = [outer.step(started[k], changes[k]) for k in range(8)]
        whole, momentum = outer.step((whole, momentum), torch.stack(changes).mean(0))
        for n, wanted in enumerate((whole, momentum)):
            assert torch.allclose(torch.stack([member[n] for member in members]).mean(0), wanted, atol=1e-9)


@pytest.mark.parametrize("algorithm, slot", [("edt", "average"), ("diloco", "global")])
def test_training_helps(tmp_path, algorithm, slot):
    keys = {"max_generations": 12, "inner_steps": 8, "first_inner_steps": 4, "average_every": 1, "lr": 3e-3}
    history = finished(tmp_path, algorithm=algorithm, **keys)
    losses = [history[f"{round}/{slot}"].metrics["loss"] for round in (1, 12)]
    assert losses[1] < losses[0] - 0.5


@pytest.mark.parametrize("algorithm", ["edt", "diloco"])
def test_a_last_step_that_is_not_finite_leaves_no_worker(tmp_path, monkeypatch, algorithm):
    """The loss of a step is known before the step is taken; so the weights are looked at, too."""
    taken = Learner._step

    def broken(self, lr):
        taken(self, lr)
        self.gradient.fill_(torch.nan)
        self.vector[3] = torch.nan if self.state()["steps"] == 4 + 4 else self.vector[3]

    monkeypatch.setattr(Learner, "_step", broken)
    history = finished(tmp_path, algorithm=algorithm, max_generations=2)
    slots = ["replica-0", "replica-1"] if algorithm == "diloco" else ["m0", "m1"]
    assert all(history[f"2/{slot}"].metrics["diverged_in_a_row"] == 1 for slot in slots)


@pytest.mark.parametrize("algorithm", ["edt", "diloco"])
def test_half_an_optimizer_in_memory_is_not_trusted(tmp_path, monkeypatch, algorithm):
    """The disk fails after the weights were read, and before the moments; the next attempt begins with both."""
    from fleet import faults
    from train.member import vectors

    wanted, failed = digest(finished(tmp_path / "calm", algorithm=algorithm)), []
    read = vectors.read_stem

    def failing(parent, stem, count):
        if stem == "average" and len(failed) < 3:
            failed.append(stem)
            raise faults.Passing("EIO")
        return read(parent, stem, count)

    monkeypatch.setattr(vectors, "read_stem", failing)
    assert digest(finished(tmp_path / "stormy", algorithm=algorithm)) == wanted and len(failed) == 3


# -- what is left of a run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["edt", pytest.param("diloco", marks=pytest.mark.slow)])
def test_a_run_ends_with_a_model_that_others_load(pretraining, algorithm):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = pretraining(f"{algorithm}_sim.py", max_generations=2)
    ended = run.start(1)
    ended.ends(0, LONG)
    folder = run.folder / "export"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    exporter = Exporter(run.folder)
    _, vector = exporter.chosen("average")
    for name, view in exporter.layout.views(vector).items():
        assert torch.equal(model.get_parameter(name).data, view)
    assert "the cat" in tokenizer.decode(tokenizer("the cat")["input_ids"])
    assert {*map(str, (folder, run.folder / "metrics.csv", run.folder / "loss.png"))} <= {*ended.said.split()}
    began = ended.said.partition("Held-out text, and after | how the model goes on:\n")[2]
    assert "|" in began and all(
        f"pretrained={folder}" in said for said in (ended.said, (folder / "README.md").read_text())
    )
    ends = [json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config")]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert all(each.get(name) == getattr(tokenizer, name) for each in ends)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    (run.folder.parent / "mine").touch()
    assert modes == {(run.folder.parent / "mine").stat().st_mode & 0o777} and not run.folder.stat().st_mode & 0o077
    table = (run.folder / "metrics.csv").read_text().splitlines()
    assert table[0].startswith("round,slot,loss") and len(table) == 1 + sum(
        "loss" in m.metrics or "train_loss" in m.metrics
        for round in range(exporter.history.first_open)
        for m in exporter.history.round(round)
    )
    assert (run.folder / "loss.png").read_bytes()[1:4] == b"PNG"
    assert "## Lineage" in (folder / "README.md").read_text() and (folder / "generation_config.json").exists()
    words = ("--config", str(run.place / "evolution.json"), "--workers", "1")
    code, said, _ = answer(f"{algorithm}_sim.py", *words)
    assert code == 0 and "over already" in said


def test_the_best_or_any_member_can_be_exported(tmp_path):
    history = finished(tmp_path)
    best = min((m for m in history.round(3) if m.id.startswith("3/m")), key=lambda m: m.metrics["loss"])
    with pytest.raises(UserError, match="--what 9-m0: the run is over after 3 rounds"):
        weights(history, "9-m0")
    slot = best.id.replace("/", "-")
    assert torch.equal(weights(history, "best"), weights(history, slot))
    assert not torch.equal(weights(history, "best"), weights(history, "average"))


def test_of_a_round_whose_files_were_removed_it_is_said_which_rounds_have_theirs(tmp_path):
    finished(tmp_path, max_generations=7, keep_every=3)
    exporter = Exporter(tmp_path / "run")
    for what in ("2-m0", "2-average"):
        with pytest.raises(UserError, match="2/m0: its files were removed.*: 3, 6, 7. KEEP_EVERY keeps more"):
            exporter.chosen(what)
    assert len(exporter.chosen("3-m0")[0]) == 1


def test_a_strategy_with_a_task_of_its_own_can_be_exported(tmp_path, monkeypatch):
    """Whose members have weights, whatever made them."""
    from edt import EDT

    child = EDT.child
    monkeypatch.setattr(pretraining_tasks, "TASKS", {**TASKS, "grown": TASKS["child"]})
    monkeypatch.setattr(EDT, "child", lambda self, *args, **more: replace(child(self, *args, **more), task="grown"))
    history = finished(tmp_path, population_size=2, max_generations=1)
    assert {each.task for each in history.plan(1)} == {"grown", "mean"}
    assert torch.equal(weights(history, "average"), (weights(history, "1-m0") + weights(history, "1-m1")) / 2)


def test_a_run_can_be_exported_while_it_goes_on(tmp_path):
    history = finished(tmp_path, max_generations=2)
    shutil.rmtree(tmp_path / "run" / "rounds" / "00003")
    shutil.rmtree(tmp_path / "run" / "rounds" / "00002")
    assert len(weights(history, "average"))


def test_a_folder_that_has_files_is_not_written_into_unasked(tmp_path):
    finished(tmp_path, max_generations=1)
    (out := tmp_path / "mine").mkdir()
    (out / "config.json").write_text("mine")
    code, *said = answer("-m", "train.export", str(tmp_path / "run"), "--out", str(out))
    assert code == 2 and f"{out}: exists; --overwrite writes into it" in "".join(said)
    assert (out / "config.json").read_text() == "mine"
    assert answer("-m", "train.export", str(tmp_path / "run"), "--out", str(out), "--overwrite")[0] == 0
    (tmp_path / "loop").symlink_to("loop")
    code, *said = answer("-m", "train.export", str(tmp_path / "run"), "--out", str(tmp_path / "loop" / "mine"))
    assert code == 2 and "loop/mine: no such place" in "".join(said) and "Traceback" not in "".join(said)
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    (small := tmp_path / "small").mkdir()
    with mounted(small, options="size=100k"):
        code, *said = answer("-m", "train.export", str(tmp_path / "run"), "--out", str(small / "model"))
        assert code == 2 and "small/model: cannot be written: " in said[1] and said[1].count("\n") == 1
        assert not [*(small / "model").iterdir()]


def test_what_is_evaluated_is_what_is_exported(tmp_path):
    """The model without its last step's look ahead, after the wire has had its part of it."""
    from train.member.pretraining_runtime import evaluated

    history = finished(tmp_path, average_every=1, outer_momentum=0.6)
    exporter = Exporter(tmp_path / "run")
    learner = Learner(exporter.model, exporter.config)
    for what, id, on in (("3-m1", "3/m1", "validation"), ("average", "3/average", "test")):
        learner.load_weights(exporter.chosen(what)[1])
        loss = evaluated(learner.eval_loss, exporter.token_files(on), exporter.config, on)["loss"]
        assert loss == pytest.approx(history[id].metrics["loss"], abs=1e-6)


@pytest.mark.parametrize("algorithm, slot, on", [("edt", "m0", "validation"), ("diloco", "global", "test")])
def test_bits_per_byte_stand_beside_the_loss(tmp_path, algorithm, slot, on):
    """The loss a token, by how many bytes of the held-out text a token stands for."""
    history = finished(tmp_path, algorithm=algorithm, max_generations=1)
    source, found = history["0/tokens-0"], history[f"1/{slot}"].metrics
    tokens = np.frombuffer(history.files("0/tokens-0").read(on), dtype=source.metrics["dtype"])
    with passing("words") as folder:
        for name in history["0/tokenizer"].digests:
            (folder / name).write_bytes(history.files("0/tokenizer").read(name))
        text = AutoTokenizer.from_pretrained(folder).decode(tokens.tolist(), skip_special_tokens=True)
    assert source.metrics[f"{on}_bytes"] == len(text.encode())
    a_token = len(text.encode()) / len(tokens)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) / a_token)
    (point,) = [each for each in points(history, 1) if each.step == 1]
    assert point.rows and point.rows[0].keys() >= {"bits_per_byte"}

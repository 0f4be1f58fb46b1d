"""What pre-training refuses, each in one line and before anything is trained; and that every key matters."""

import json
import re
import subprocess
import sys
from itertools import islice

import pytest

from fleet import launches
from fleet.context import Stopped
from fleet.digest import digest
from fleet.host import Host
from fleet.remote.launcher import Launcher, place
from fleet.run import open_run
from fleet.run_config import UserError, is_bound
from tests.commands import answer, refused
from tests.helpers import ROOT
from tests.small import KEYS, MODEL, config, finished, make_text, shared
from train import text_sources
from train.member.counted_text import check_text
from train.model import can_be_built, described
from train.token_budget import tokenizer_name
from train.training_commands import prepare
from train.training_config import PRESETS, PRESETS_REACH, TrainConfig


@pytest.mark.parametrize("keys, why", [
    ({"initial_population": [{"config": {"model_type": "bert"}}]}, "bert is not a causal language model"),
    ({"initial_population": ["nobody/has-this"]}, "nobody/has-this"),
    ({"initial_population": ["gone.json"]}, "gone.json.*cannot be read"),
    ({"datasets": ["gone.jsonl"]}, "gone.jsonl: cannot be read: No such file"),
    ({"datasets": ["nobody/no-data"]}, "dataset nobody/no-data: cannot be loaded"),
    ({"datasets": ["stdlb"]}, "dataset stdlb: there is none; is stdlib meant\\?"),
    ({"datasets": ["evolution.jsn"]}, "dataset evolution.jsn: there is none; is evolution.json meant\\?"),
    ({"datasets": ["a/b/c"]}, "dataset a/b/c: no such file or folder, and no name that the hub can have"),
    ({"datasets": ["my text"]}, "dataset my text: no such file or folder, and no name that the hub can have"),
    ({"population_size": 2, "group_size": 4}, "POPULATION_SIZE is 2, smaller than a group of GROUP_SIZE 4"),
    ({"population_size": 6, "group_size": 4}, "not a multiple of GROUP_SIZE 4"),
    ({"population_size": 12, "selection": "hypercube"}, "powers of two"),
    ({"elitism": 1}, "ELITISM is 1, but with SELECTION hypercube"),
    ({"elitism": 4, "selection": "rank"}, "ELITISM is 4: it must be below POPULATION_SIZE"),
    ({"previous_generation": True}, "PREVIOUS_GENERATION needs"),
    ({"seq_length": 4096}, "SEQ_LENGTH is 4096, but model .* has 2048 positions"),
    ({"warm_start_steps": 60}, "WARM_START_STEPS is no key any more: nobody waits for a warm start now"),
    ({"max_generations": 30, "first_inner_steps": 1}, "MAX_GENERATIONS 58 or FIRST_INNER_STEPS 3, or"),
    ({"datasets": [{"source": "stdlib", "wight": 2}]}, "number 1, wight: unknown; the nearest known key is weight"),
    ({"initial_population": ["60mm"]}, "there is no such preset, nor a folder; the nearest one is 60m"),
    ({"datasets": [{"source": "stdlib", "evaluated": False}]}, "DATASETS: none is evaluated"),
    ({"datasets": [{"source": "stdlib", "text_field": "body"}]}, "dataset stdlib: text_field changes nothing of such"),
    ({"algorithm": "diloco"}, "ALGORITHM is 'diloco', and this script runs edt: start diloco.py instead"),
])  # fmt: skip
def test_what_cannot_work_is_refused_at_once(tmp_path, keys, why):
    assert re.search(why, refused(tmp_path, **keys))


def test_a_dataset_without_the_field_is_refused(tmp_path):
    make_text(tmp_path / "other.jsonl", field="body")
    assert "no text in the field 'text'; it has: body" in refused(tmp_path, datasets=["other.jsonl"])


def test_keys_of_another_kind_of_source_are_refused_in_a_run_that_begins(tmp_path):
    rows = {"source": str(shared() / "text.jsonl"), "text_field": "text"}
    why = "text.jsonl: separator changes nothing of such a source: leave it out; it may have: text_field"
    assert why in refused(tmp_path, datasets=[{**rows, "separator": "---"}])
    (tmp_path / "a.txt").write_text("a line\n" * 9000)
    assert "a.txt: split changes nothing" in refused(tmp_path, datasets=[{"source": "a.txt", "split": "test"}])
    begun = config(datasets=({**rows, "split": "test"},), base_dir="runs", project_name="begun")
    with pytest.raises(UserError, match="split changes nothing"):
        prepare(begun, tmp_path)
    (tmp_path / "runs" / "begun").mkdir(parents=True)
    (tmp_path / "runs" / "begun" / "run.json").touch()
    assert prepare(begun, tmp_path).datasets[0].split == "test"


@pytest.mark.parametrize("optimizer, betas", [("adamw", (0.9, 0.95)), ("muon+", (0.95, 0.98))])
def test_a_run_keeps_what_betas_were_by_themselves(optimizer, betas, tmp_path):
    assert prepare(config(inner_optimizer=optimizer), tmp_path).betas == betas


def test_members_of_different_shapes_are_named(tmp_path):
    wide = {"config": {**MODEL["config"], "intermediate_size": 64}}
    why = r"0/init-1 cannot be made: tensor model.layers.0.mlp.down_proj.weight: \[32, 48\] in .*, \[32, 64\] in"
    with pytest.raises(Stopped, match=why):
        finished(tmp_path, initial_population=(MODEL, wide))


def test_too_little_text_is_known_before_there_is_a_run(tmp_path):
    said = refused(tmp_path, datasets=[str(shared() / "text.jsonl")], max_generations=212)
    assert re.search("training tokens where the run needs 108,545: [0-9,]+ are missing; give it more text", said)
    assert "same command" not in said and not (tmp_path / "runs").exists()
    (enough,) = re.findall(r"raise MAX_EPOCHS to (\d+)\b", said)
    keys = {"datasets": [str(shared() / "text.jsonl")], "max_generations": 212}
    check_text(config(**keys, max_epochs=float(enough)))
    with pytest.raises(UserError, match=f"MAX_EPOCHS to {enough}"):
        check_text(config(**keys, max_epochs=float(enough) - 1))


def test_too_little_built_in_text_is_known_before_there_is_a_run(monkeypatch):
    """Counted where the run needs much of it; here it is the text of a small Python."""
    few = [*islice(text_sources._stdlib_files(), 40)]
    monkeypatch.setattr(text_sources, "_stdlib_files", lambda: few)
    keys = {"tokenizer": "", "vocab_size": 300, "datasets": ("stdlib",)}
    said = list[str]()
    check_text(config(**keys), said.append)
    assert not said
    why = "dataset stdlib: [0-9,]+ training tokens where the run needs [0-9,]+: [0-9,]+ are missing; add another source"
    with pytest.raises(UserError, match=why):
        check_text(config(**keys, max_generations=20_000), said.append)
    assert said[0] == "counting the tokens of stdlib"


def test_the_launchers_check_tells_how_many_tokens_each_source_has(tmp_path):
    make_text(tmp_path / "mine.jsonl")
    text = [str(shared() / "text.jsonl"), {"source": "mine.jsonl", "evaluated": False}, "stdlib"]
    keys = {**KEYS, "tokenizer": str(shared() / "tokenizer"), "datasets": text, "base_dir": "runs"}
    file, scripts = tmp_path / "evolution.json", {"edt": ("edt.py",)}
    file.write_text(json.dumps(keys))
    mine, rest, stdlib = Launcher(place(file, "", scripts), (), scripts, ROOT).preview(None).splitlines()
    assert re.fullmatch(r".*/text.jsonl: tokens: [0-9,]+ training \(needs 513\), .* test \(needs 33\)", mine), mine
    assert re.fullmatch(r".*/mine.jsonl: tokens: [0-9,]+ training \(needs 513\), .* test \(needs 0\)", rest), rest
    assert stdlib.startswith("stdlib: tokens: not counted (a long text, or no file); the run needs 513 training")
    file.write_text(json.dumps({**keys, "max_generations": 900}))
    code, _, errors = answer("edt.py", "--config", str(file), "--look")
    assert code == 2 and "training tokens where the run needs" in errors and not (tmp_path / "runs").exists()


def test_what_is_found_to_be_impossible_while_it_is_made_is_no_matter_of_trying_again(tmp_path):
    with pytest.raises(Stopped):
        finished(tmp_path, max_generations=212)
    store, _ = open_run(tmp_path / "run", Host(), "reader")
    assert not launches.goes_on(store, launches.latest(store)) and not launches.ended(store)
    launches.stop(store, launches.begin(store, {}), "somebody wants it")
    assert launches.goes_on(store, launches.latest(store))


def test_too_few_tokens_are_counted(tmp_path):
    with pytest.raises(Stopped, match=r"training tokens where the run needs 108,545: [0-9,]+ are missing"):
        finished(tmp_path, max_generations=212)


def test_a_machine_with_another_text_leaves_it_to_others(tmp_path):
    """Its worker gives the claim up and does not try again; another one, of the right text, makes the run."""
    from tests.small import worker

    c = config(tokenizer="", vocab_size=300, datasets=("stdlib",), stdlib_digest="0" * 16)
    one = worker(tmp_path, c, "other")
    while one.store.name and not one.context.blame.shuns("0/tokenizer"):
        one._turn()
    assert one.scheduler.claim(tick=True) is None
    assert not one.context.claims.held("0/tokenizer")


# -- every key matters -------------------------------------------------------------------------------------------------

RANK = {"selection": "rank", "group_size": 2}
TURNS = {
    "algorithm": ("diloco", {}), "project_name": None, "stdlib_digest": None, "threads": None, "grace_seconds": None,
    "quorum": None, "trust_remote_code": None, "compile": None, "tokenizer": None,
    "deterministic": None,  # tests/test_kernels.py
    "forked": None,  # tests/test_fork.py
    "seed": (2, {}), "population_size": (2, {}), "max_generations": (2, {}),
    "initial_population": (({"config": {**MODEL["config"], "num_hidden_layers": 2}},), {}),
    "vocab_size": (270, {"tokenizer": "", "stdlib_digest": ""}), "first_inner_steps": (3, {}),
    "inner_optimizer": ("adamw", {}),
    "datasets": (({"source": "fake"},), {}), "held_out": (0.2, {}), "eval_sequences": (6, {}),
    "test_sequences": (6, {}),
    "eval_batch_size": (1, {}), "max_epochs": (0.5, {}), "inner_steps": (5, {}), "batch_size": (1, {}),
    "seq_length": (12, {}), "gradient_accumulation": (2, {}), "lr": (5e-3, {}), "lr_schedule": ("cosine", {}),
    "warmup_steps": (4, {}), "weight_decay": (0.5, {}), "betas": ((0.5, 0.98), {}), "clip": (0.1, {}),
    "precision": ("bf16-mixed", {}),
    "inner_optimizer_state": ("reset", {}), "outer_lr": (0.5, {}), "outer_momentum": (0.5, {}),
    "outer_nesterov": (False, {"outer_momentum": 0.5}), "shards": (2, {"algorithm": "diloco"}),
    "wire_dtype": ("fp32", {}), "error_feedback": (True, {"algorithm": "diloco"}),
    "overlap": (1, {"algorithm": "diloco"}), "fragments": (2, {"algorithm": "diloco"}), "average_every": (1, {}),
    "selection": ("matching", {"seed": 3, "group_size": 2}), "group_size": (4, {}), "previous_generation": (True, RANK),
    "crossover": ("slerp", {}), "elitism": (1, RANK), "mutation_probability": (1.0, {}),
    "mutation_strength": (0.5, {"mutation_probability": 1.0}), "lr_spread": (4.0, {}), "z_loss": (0.1, {}),
}  # fmt: skip


GROUPS = {"devices_per_worker", "sharding_strategy"}  # which tests/test_group.py turns, in processes of their own


def test_every_bound_key_is_turned():
    assert {*TURNS} | GROUPS == {key for key in TrainConfig.model_fields if is_bound(TrainConfig, key)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs by their settings, each made once."""
    known: dict[str, str] = {}

    def made(**keys) -> str:
        name = json.dumps(keys, sort_keys=True)
        if name not in known:
            known[name] = digest(finished(tmp_path_factory.mktemp("knob"), **{"max_generations": 3, **keys}))
        return known[name]

    return made


@pytest.mark.parametrize("key", [key for key, turn in TURNS.items() if turn])
def test_turning_a_key_changes_the_result(runs, key):
    to, given = TURNS[key]
    assert runs(**given) != runs(**{**given, key: to})


@pytest.mark.parametrize("how", ["linear", "slerp"])
def test_crossovers_differ(runs, how):
    assert runs(crossover=how) not in (runs(), runs(crossover="slerp" if how == "linear" else "linear"))


def test_threads_are_those_of_torch(tmp_path):
    import torch

    from train.member.pretraining_tasks import maker

    maker(config(threads=2))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("algorithm, slot, there", [("edt", "m3", 5), ("diloco", "replica-3", 9)])
def test_an_elastic_run_does_not_wait_for_a_late_member(tmp_path, algorithm, slot, there):
    """A member that nobody makes is closed after the grace time; the others make do without it."""
    from tests.small import worker
    from train.member.pretraining_tasks import maker

    c = config(algorithm=algorithm, quorum=0.75, grace_seconds=0.3, poll_seconds=0.02, dead_seconds=10.0)
    late, stuck = worker(tmp_path, c, "late"), []

    def holding(work):
        if work.id == f"1/{slot}" and not stuck:
            stuck.append(work.id)
            assert worker(tmp_path, c, "quick").run() == "over"
        return maker(c)(work)

    late.execution.make = holding
    assert late.run() == "over" and stuck
    assert late.history[f"1/{slot}"].absent == "closed"
    assert len([member for member in late.history.round(3) if member]) == there


def test_the_tokenizer_and_the_models_own_tokenizer(tmp_path):
    """TOKENIZER names one; else it is the first model's own; else one is made of the built-in text."""
    assert tokenizer_name(config(tokenizer="a")) == "a"
    assert tokenizer_name(config(tokenizer="", initial_population=("/models/b", "tiny"))) == "/models/b"
    assert tokenizer_name(config(tokenizer="", initial_population=("tiny",))) == ""


def test_a_preset_and_the_built_in_text_are_checked_without_what_takes_seconds_to_load():
    look = """
import sys; from pathlib import Path; from fleet.run_config import load
from train.training_commands import prepare; from train.training_config import TrainConfig
prepare(load(Path(sys.argv[1]), TrainConfig), Path())
assert not {"torch", "transformers", "tokenizers", "datasets"} & sys.modules.keys()"""
    subprocess.run([sys.executable, "-c", look, "evolution.json"], cwd=ROOT, check=True)
    for preset in PRESETS:
        assert described(preset).max_position_embeddings == PRESETS_REACH
        can_be_built(preset)


@pytest.mark.parametrize("name, said", [
    ("old.txt", "old.txt: no UTF-8: invalid start byte at byte 3; iconv -f latin1 -t utf-8 recodes Latin-1"),
    ("notes.md", "how a file is read follows from its name, which must end in one of .txt, .jsonl, .parquet"),
])  # fmt: skip
def test_a_file_that_is_read_otherwise_is_told_how(tmp_path, name, said):
    (tmp_path / name).write_bytes("schön war's".encode("latin1") * 1000 if name == "old.txt" else b"# Notes")
    with pytest.raises(UserError, match=re.escape(said)):
        prepare(config(datasets=({"source": str(tmp_path / name)},)), tmp_path)


def test_all_texts_that_are_too_short_are_named_at_once(tmp_path):
    both = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in both:
        file.write_text('{"text": "a few words"}\n')
    with pytest.raises(UserError) as error:
        prepare(config(datasets=tuple({"source": str(file)} for file in both)), tmp_path)
    assert all(str(file) in str(error.value) for file in both)

"""The tournament as people use it: configuration, API, command line; stopped, killed, gone on with; bad input."""

import importlib.util
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
)

from evomerge import cli as command_line
from evomerge import fitness_evaluator, tournament_results, tournament_running
from evomerge.config import (
    Configuration,
    EvaluationSettings,
    MergeSettings,
    ModelReference,
    TaskSettings,
    create_default_config,
    with_models,
)
from evomerge.evolutionary_tournament import EvolutionaryMerger, run_evolutionary_tournament
from evomerge.formula import FILE, in_words, read
from evomerge.merger import AdvancedModelMerger
from evomerge.tournament_method import METHOD
from evomerge.tournament_view import better_ones
from evomerge.utils import (
    MERGE_TECHNIQUES,
    EvoMergeException,
    clean_up_models,
    evaluate_model,
    generate_text,
    load_models,
    save_model,
    setup_gpu_if_available,
    validate_merge_config,
)
from fleet import launches
from fleet.digest import digest
from fleet.history import opened
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.worker import Worker
from tests import merging, searching, sinks
from tests.breeding import config, models, text
from tests.helpers import pids
from train.passages import PassageReader, mean_and_error

ROOT = Path(__file__).parent.parent
CLI = [sys.executable, str(ROOT / "evomerge" / "cli.py")]


def worker(c: Configuration, name: str = "w") -> Worker:
    """One more worker of the tournament, in this process."""
    chosen = tournament_running.prepared(c)
    folder = Path(chosen.base_dir)
    create_run(folder, chosen.project_name, chosen.bound(), Host())
    store, _ = open_run(folder / chosen.project_name, Host(), name)
    launch = launches.latest(store) or launches.begin(store, chosen.operational())
    return Worker(store, METHOD.strategy(chosen), METHOD.maker(chosen), options(chosen, launch), METHOD.report)


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *map(str, words)], capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Said:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(capfd, monkeypatch):
    """The command line in this process, where torch is loaded already."""
    monkeypatch.setattr(os, "umask", lambda mask: mask)

    def run(*words: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.run([str(word) for word in words])
        return Said(int(end.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole tournament of tiny models, from the command line."""
    folder = tmp_path_factory.mktemp("tournament")
    c = config(folder)
    c.save(folder / "mine.json")
    more = ("--metrics", "tensorboard") if importlib.util.find_spec("tensorboard") else ()
    command = ("--config", folder / "mine.json", "--run", "--workers", 2, *more)
    done = again = cli(*command)
    while "has not taken everything" in again.stdout + again.stderr:  # on a busy machine
        again = cli(*command)
    assert done.returncode == again.returncode == 0, done.stderr + again.stderr
    return folder, c, done.stdout


# -- configuration ----------------------------------------------------------------------------------------------------


def test_assignments_are_checked():
    c = create_default_config()
    c.merge_settings.merge_method = "ps"
    c.models = [ModelReference("a", "/a"), ModelReference(name="b", path="/b")]
    for record, field, value in (
        (c.merge_settings, "merge_method", "magic"), (c.merge_settings, "techniques", ("ties", "magic")),
        (c.merge_settings, "techniques", ()), (c, "models", [ModelReference("a", "/a")]),
        (c, "models", [ModelReference("a", "/a"), ModelReference("a", "/b")]),
        (c.evolution_settings, "num_generations", 0), (c.evolution_settings, "mutation_rate", 2),
        (c.evaluation_settings, "text_weight", 0), (c, "unknown", 1), (c.models[0], "path", "https://example.com/x"),
    ):  # fmt: skip
        with pytest.raises((ValidationError, ValueError)):
            setattr(record, field, value)
    assert c.merge_settings.merge_method == "ps" and [each.name for each in c.models] == ["a", "b"]


def test_it_survives_a_file(tmp_path):
    c = create_default_config()
    c.evolution_settings.seed, c.evaluation_settings.tasks = 7, [TaskSettings(name="mine", weight=-2)]
    c.merge_settings.base_model = ModelReference("base", "org/base")
    c.save(tmp_path / "c.json")
    assert Configuration.load(tmp_path / "c.json") == c
    (tmp_path / "short.json").write_text('{"evolution_settings": {"seed": 3}}')
    assert Configuration.load(tmp_path / "short.json").models == create_default_config().models


@pytest.mark.parametrize("given, path", [
    ("https://huggingface.co/org/name", "org/name"), ("https://huggingface.co/org/name/tree/v2", "org/name@v2"),
    ("http://www.hf.co/org/name/blob/main/config.json", "org/name"), ("org/name", "org/name"), ("./here", "./here"),
    ("https://huggingface.co/org/name/", "org/name"),
])  # fmt: skip
def test_links_to_a_models_page_are_understood(given, path):
    assert ModelReference("", given).path == path


def test_names_come_from_paths_and_defaults_fill_the_gaps():
    c = with_models(create_default_config(), ["org/math-7b", "", "/x/math-7b.gguf"])
    assert [each.name for each in c.models] == ["math-7b", "prose", "math-7b-2"]
    paths = [each.path for each in with_models(create_default_config(), ["a/b"]).models]
    assert paths == ["a/b", "builtin:prose", "builtin:names"]


def test_every_technique_of_the_settings_is_explained():
    assert [*MERGE_TECHNIQUES] == list(MergeSettings().techniques)


# -- fitness ----------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_each_passage_by_itself(tmp_path):
    (reference, *_) = models(tmp_path, 1)
    ((_, model, tokenizer),) = load_models([reference])
    passages = ["the cat sat on a mat", "and the dog ran", "nobody looked while the dog ran to it again " * 6]
    found = PassageReader(tokenizer, passages, 16, batch=40).losses(model)
    for n, passage in enumerate(passages):
        ids = tokenizer(passage)["input_ids"]
        nats = 0.0
        for begin in range(0, len(ids) - 1, 15):  # a context of 16 tokens
            piece = torch.tensor([ids[begin : begin + 16]])
            with torch.no_grad():
                scores = model(piece).logits[0, :-1].log_softmax(-1)
            nats -= float(scores.gather(1, piece[0, 1:, None]).sum())
        assert found.nats[n] == pytest.approx(nats, rel=1e-4) and found.tokens[n] == len(ids) - 1
        assert found.bytes[n] == len(passage) - len(tokenizer.decode(ids[:1]))
    assert found.perplexity == pytest.approx(math.exp(sum(found.nats) / sum(found.tokens)))
    other = PassageReader(tokenizer, passages, 16, batch=1).losses(model)
    assert other.nats == pytest.approx(found.nats, rel=1e-5)
    assert mean_and_error(found)[1] > 0
    end = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    begun = PassageReader(tokenizer, passages, 16).losses(model)  # all that is written is predicted now
    assert begun.bytes == tuple(map(len, passages)) and begun.tokens[0] == found.tokens[0] + 1


def test_what_validates_does_not_test(tmp_path):
    e = EvaluationSettings(text=str(text(tmp_path / "t.jsonl")), passages=8)
    found = fitness_evaluator.texts(e)
    validation, test = (found[on].texts for on in ("validation", "test"))
    assert len(validation) == len(test) == 8 and not {*validation} & {*test}
    assert fitness_evaluator.texts(e) == found and fitness_evaluator.digest(e) != fitness_evaluator.digest(
        e.model_copy(update={"passages": 9})
    )


def test_passages_end_with_lines_and_lose_nothing():
    document = "".join(f"line {n} of a longer text\n" for n in range(200))
    found = fitness_evaluator._passages(document)
    assert "".join(found) == document and all(len(each) <= fitness_evaluator.PASSAGE for each in found)
    assert all(each.endswith("\n") for each in found) and len(fitness_evaluator._passages("x" * 5000)) == 7


def test_a_passage_begins_with_whole_words():
    assert tournament_running.beginning("\n  import os\n") == "import os"
    assert tournament_running.beginning("So many words that they are more than forty characters") == (
        "So many words that they are more than"
    )
    assert tournament_running.beginning("x" * 50) == "x" * 40 and tournament_running.beginning(" \n") == ""


def test_nobody_beats_the_front_in_everything():
    class Point:
        def __init__(self, bits, acc, score=0.0):
            self.objectives, self.score = {fitness_evaluator.BITS: bits, "acc": acc}, score

    e = EvaluationSettings(tasks=[TaskSettings(name="acc")])
    c = type("C", (), {"evaluation_settings": e})
    good, better, worse, same = Point(1.0, 0.5, 1), Point(2.0, 0.9, 2), Point(2.0, 0.5), Point(1.0, 0.5)
    assert tournament_results.pareto(c, [good, worse, better, same]) == [better, good]


# -- a whole tournament -----------------------------------------------------------------------------------------------


def test_a_tournament_ends_with_its_winner_a_table_and_a_family_tree(finished):
    folder, c, said = finished
    run, winner = folder / "run", folder / "run" / "winner"
    assert str(winner) in said and "perplexity (95%)" in said
    for passage in fitness_evaluator.texts(c.evaluation_settings)["test"].texts[:2]:
        assert f"winner says: {tournament_running.beginning(passage)}" in said
    assert "score: - 1 x bits per byte" in said and "the end after 3 generations" in said
    card, line = (winner / "README.md").read_text(), f"lm_eval --model hf --model_args pretrained={winner} "
    assert "A merge of " in card and "model0" in card and line in card and line in said
    assert (winner / "model.safetensors").stat().st_mode == (folder / "mine.json").stat().st_mode
    assert (run / "ancestry.html").read_text().startswith("<!DOCTYPE html>")
    found = tournament_results.found_in(run)
    assert len(found.generations) == 3 and all(len(generation) == 8 for generation in found.generations)
    assert len([line for line in said.splitlines() if "±" in line and line[0] == "│"]) == 3
    best = [max(entry.score for entry in generation) for generation in found.generations]
    assert best == sorted(best) and found.best.score == best[-1]
    assert read(winner)[0] == found.best.formula
    ways = [{entry.technique for entry in generation} for generation in found.generations]
    assert "mutation" in ways[1] and ways[1] - ways[0] <= {"mutation", "linear", "slerp"}
    listed = json.loads((run / "history.json").read_text())
    assert listed["best"] == best and listed["pareto_front"] == [found.front[0].id]
    assert AutoModelForCausalLM.from_pretrained(winner).config.model_type == "llama"


def test_its_scores_go_where_people_look(finished):
    sinks.needs("tensorboard")
    folder, _, _ = finished
    found, logged = tournament_results.found_in(folder / "run"), sinks.board(folder / "run")
    assert [step for step, _ in logged] == [*range(len(found.generations) + 2)]
    best = [max(entry.score for entry in generation) for generation in found.generations[1:]]
    assert [values["score/best"] for _, values in logged[2:-1]] == pytest.approx(best)
    assert logged[-1][1]["test_score_of/winner"] == pytest.approx(found.tested[0].metrics["test_score"])


def test_the_winner_is_what_was_scored(finished):
    folder, c, _ = finished
    found = tournament_results.found_in(folder / "run")
    assert evaluate_model(folder / "run" / "winner", c)["score"] == pytest.approx(found.best.score, rel=1e-5)


def test_intervals_are_of_differences_on_the_same_passages(finished):
    found = tournament_results.found_in(finished[0] / "run")
    winner, *others = found.tested
    for other in others:
        mean, half = tournament_results.ahead(winner, other)
        bits = sum(b - a for a, b in zip(winner.listed("each"), other.listed("each"), strict=True)) / math.log(2)
        assert mean == pytest.approx(bits / sum(winner.listed("sizes")), abs=1e-5) and 0 < half < 1
        assert mean == pytest.approx(winner.metrics["test_score"] - other.metrics["test_score"], abs=1e-4)
        low, high = tournament_results.interval(other)
        assert low < other.metrics["perplexity"] < high


def test_a_given_model_that_is_better_than_the_winner_is_named(finished):
    found = tournament_results.found_in(finished[0] / "run")
    best, (one, other), tested = found.best, found.models[:2], found.tested

    def scored(entry, measure, value):
        return replace(entry, metrics={**entry.metrics, measure: value})

    models = [scored(one, "score", best.score), scored(other, "score", best.score + 1)]
    tests = [scored(each, "test_score", -float(n)) for n, each in enumerate(tested)]
    worse = [scored(each, "test_score", float(n)) for n, each in enumerate(tested)]
    assert [*better_ones(replace(found, models=models[:1], tested=tests))] == []
    judged, held = better_ones(replace(found, models=models, tested=worse))
    values = f"{best.score:.4f}, not {best.score + 1:.4f}"
    given = f"The winner is worse than {other.name}, which was given"
    assert judged == f"{given}, on what judged the tournament: {values}."
    assert (
        held
        == f"The winner is worse than {tested[-1].name}, which was given, in the held-out test: 0.0000, not 3.0000."
    )


def test_the_same_command_again_says_the_same(finished, here):
    folder, c, said = finished
    before = merging.weights(folder / "run" / "winner")
    shutil.rmtree(folder / "run" / "winner")
    again = here("--config", folder / "mine.json", "--run")
    assert again.returncode == 0 and "is over already" in again.stdout
    assert said[said.index("Held-out test") :] == again.stdout[again.stdout.index("Held-out test") :]
    assert all(torch.equal(before[name], each) for name, each in merging.weights(folder / "run" / "winner").items())


def test_other_settings_are_refused_in_the_same_folder(finished, here):
    folder, c, _ = finished
    other = here("--config", folder / "mine.json", "--run", "--seed", 99)
    assert other.returncode == 2 and "SEED" in other.stderr.upper()


def test_one_worker_or_several_the_result_is_the_same(finished, tmp_path):
    folder, c, _ = finished
    again = c.model_copy(deep=True, update={"out": str(tmp_path / "run")})
    one, two = worker(again, "one"), worker(again, "two")
    assert one.run() == "over" and two.run() == "over"
    assert digest(opened(folder / "run")) == digest(opened(tmp_path / "run"))


@pytest.mark.slow
def test_a_killed_tournament_goes_on_and_has_the_same_winner(finished, tmp_path):
    folder, c, _ = finished
    again = c.model_copy(deep=True, update={"out": str(tmp_path / "run")})
    again.save(tmp_path / "mine.json")
    command = [*CLI, "--config", tmp_path / "mine.json", "--run", "--workers", "1"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    for line in first.stdout:
        if line.startswith("generation 1"):
            break
    first.send_signal(signal.SIGSTOP)  # or it would start another worker
    (alive,) = [pid for pid in pids("--worker", str(tmp_path / "run"))]
    os.kill(alive, signal.SIGKILL)
    first.kill()
    first.wait()
    done = cli("--config", tmp_path / "mine.json", "--run", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "run" / "winner") == read(folder / "run" / "winner")
    one, other = (merging.weights(place / "run" / "winner") for place in (folder, tmp_path))
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- the steps by themselves ------------------------------------------------------------------------------------------


def test_each_step_takes_and_returns_models(tmp_path):
    c = config(tmp_path, num_generations=2, patience=1)
    merger = EvolutionaryMerger(c, tmp_path / "steps")
    made = merger.create_merged_models()
    assert len({each.name for each in made}) == 8 and all(read(Path(each.path)) for each in made)
    mutant = merger.mutate_model(made[0])
    assert read(Path(mutant.path))[0] != read(Path(made[0].path))[0]
    child = merger.merge_models(made[0], made[1])
    assert in_words(read(Path(child.path))[0]).count("+") >= 2
    scores = [merger.evaluate(each) for each in (*made[:2], mutant)]
    assert merger.tournament_selection([*made[:2], mutant], scores) in [*made[:2], mutant]
    winner = merger.evolve([*made[:3], mutant])
    assert merger.evaluate(winner) >= max(scores) - 1e-9
    assert AutoModelForCausalLM.from_pretrained(winner.path)


def test_a_plain_model_is_mutated_by_noise_alone(tmp_path):
    c = config(tmp_path)
    with pytest.raises(EvoMergeException, match="weight_noise"):
        EvolutionaryMerger(c, tmp_path / "out").mutate_model(c.models[0])
    c.evolution_settings.weight_noise = 0.01
    noisy = EvolutionaryMerger(c, tmp_path / "out").mutate_model(c.models[0])
    one, other = merging.weights(Path(noisy.path)), merging.weights(Path(c.models[0].path))
    assert all(0 < float((one[name] - other[name]).abs().max()) < float(other[name].std()) for name in other)


def test_models_of_one_name_are_told_apart(tmp_path):
    c = config(tmp_path)
    other = [each.model_copy(update={"name": f"model{2 - n}"}) for n, each in enumerate(c.models)]
    merger = EvolutionaryMerger(c, tmp_path / "out")
    one = AdvancedModelMerger(c, tmp_path / "out").merge(c.models)
    two = AdvancedModelMerger(c, tmp_path / "out").merge(other)
    _, paths, _ = read(Path(merger.merge_models(one, two).path))
    assert len(paths) == 5 and len({*paths.values()}) == 3  # model1 is the same in both


@pytest.mark.parametrize("method, techniques, words", [
    ("ps", (), "linear+ties"), ("ps", ("slerp", "dare"), "slerp+dare"), ("ps", ("slerp",), "slerp"),
    ("dfs", (), "frankenmerge"), ("dfs", ("dfs",), "dfs"), ("ps_dfs", ("slerp", "ties", "dfs"), "slerp+ties+dfs"),
])  # fmt: skip
def test_one_merge(tmp_path, method, techniques, words):
    c = Configuration(models=models(tmp_path))
    c.merge_settings.merge_method = method
    made = AdvancedModelMerger(c, tmp_path / "out").merge(techniques=techniques)
    assert in_words(read(Path(made.path))[0]) == words and (Path(made.path) / FILE).is_file()
    assert Path(AdvancedModelMerger(c, tmp_path / "out").merge(techniques=techniques).path).name.endswith("-2")


def test_a_path_of_ones_own(tmp_path):
    c = Configuration(models=models(tmp_path))
    path = [("model0", 0, 1.0), ("model1", 2, 0.5), ("model2", 3, 1.0)]
    made = AdvancedModelMerger(c, tmp_path / "out").merge_path(path)
    assert AutoModelForCausalLM.from_pretrained(made.path).config.num_hidden_layers == 3


def test_the_utilities_of_the_api(tmp_path):
    (reference, *_) = models(tmp_path, 1)
    loaded = load_models([reference])
    ((_, model, tokenizer),) = loaded
    where = save_model(model, tokenizer, tmp_path / "saved")
    (again,) = load_models([ModelReference("x", where)])
    said = generate_text(model, tokenizer, "the cat", 12)
    assert said == generate_text(again.model, again.tokenizer, "the cat", 12) and said.startswith("the cat")
    assert said != generate_text(model, tokenizer, "the cat", 9)
    tokenizer.chat_template = "the {{ messages[0].content }}{% if add_generation_prompt %} sat{% endif %}"
    asked = "the cat sat"
    plain = generate_text(again.model, again.tokenizer, asked, 14)
    assert plain == asked + generate_text(model, tokenizer, "cat", 14) and len(plain) > len(asked)
    assert torch.zeros(1, device=setup_gpu_if_available()).device.type == model.device.type
    clean_up_models(loaded)
    assert loaded == []


def test_a_path_through_nobody_is_refused(tmp_path):
    c = Configuration(models=models(tmp_path))
    with pytest.raises(EvoMergeException, match="no model 'zz' here; there are model0, model1, model2"):
        AdvancedModelMerger(c, tmp_path / "out")._dfs_merge(path=[("zz", 0, 1.0)])


def test_encoders_of_one_architecture_merge(tmp_path):
    made = [encoder(tmp_path / str(n), BertConfig, BertForMaskedLM, n) for n in range(2)]
    c = Configuration(models=made)
    c.merge_settings.merge_method = "ps"
    merged = AdvancedModelMerger(c, tmp_path / "out").merge(techniques=("linear",))
    one, other = (merging.weights(tmp_path / name) for name in "01")
    mean = {name: (each + other[name]) / 2 for name, each in one.items()}
    there = AutoModelForMaskedLM.from_pretrained(merged.path).state_dict()
    assert all(torch.allclose(there[name], each, atol=1e-6) for name, each in mean.items() if name in there)
    with pytest.raises(EvoMergeException, match="not a causal language model.*AdvancedModelMerger"):
        run_evolutionary_tournament(c.model_copy(update={"out": str(tmp_path / "run")}))


# -- settings that reach the run --------------------------------------------------------------------------------------


def test_every_setting_is_bound_or_harmless(tmp_path):
    c = config(tmp_path)
    chosen = tournament_running.prepared(c)
    for record, key, value in (
        (c.merge_settings, "merge_method", "ps"), (c.merge_settings, "techniques", ("ties",)),
        (c.merge_settings, "base_model", models(tmp_path / "more", 1)[0]), (c.merge_settings, "density", 0.2),
        (c.merge_settings, "points", 9), (c.merge_settings, "longest_path", 2.0),
        (c.merge_settings, "dtype", "bfloat16"), (c.merge_settings, "trust_remote_code", True),
        *((c.evolution_settings, key, value) for key, value in (
            ("population_size", 5), ("num_generations", 7), ("patience", 9), ("tournament_size", 5), ("elite", 1),
            ("mutation_rate", 0.9), ("mutation_strength", 0.9), ("weight_noise", 0.1), ("seed", 8),
        )),
        *((c.evaluation_settings, key, value) for key, value in (
            ("text", str(text(tmp_path / "other.jsonl", seed=6))), ("passages", 9), ("text_weight", 2.0),
            ("limit", 3), ("num_fewshot", 1), ("holdout", 0.5), ("allow_benchmark_tasks", True),
            ("batch_tokens", 64), ("task_path", [str(tmp_path)]),
        )),
        (c, "threads", 2),
    ):  # fmt: skip
        before = getattr(record, key)
        setattr(record, key, value)
        assert tournament_running.prepared(c).bound() != chosen.bound(), key
        setattr(record, key, before)
    harmless = {"log_level": "ERROR", "metrics": ("csv",), "wandb_project": "mine", "wandb_entity": "ours"}
    for key, value in {**harmless, "workers": 3}.items():
        setattr(c, key, value)
        assert tournament_running.prepared(c).bound() == chosen.bound()
    assert tournament_running.prepared(c).operational().items() >= {**harmless, "metrics": ["csv"]}.items()


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Models that each know another part of some facts, which are both text and task."""
    folder = tmp_path_factory.mktemp("facts")
    paths = searching.donors(folder)
    c = Configuration(models=[ModelReference("", path) for path in paths[1:]], out=str(folder / "run"))
    v = c.evaluation_settings
    v.text, v.passages = str(facts_as_text(folder / "facts.jsonl")), 16
    v.task_path, v.tasks = [str(searching.task(folder / "tasks"))], [TaskSettings(name="facts", weight=3)]
    return c


def test_the_score_is_the_weighted_sum_of_all_objectives(facts):
    c = facts.model_copy(deep=True)
    found = evaluate_model(c.models[0], c)
    parts = found["objectives"]
    assert parts.keys() == {fitness_evaluator.BITS, "facts"}
    assert found["score"] == pytest.approx(3 * parts["facts"] - parts[fitness_evaluator.BITS])
    c.evaluation_settings.text_weight = 0.5
    assert evaluate_model(c.models[0], c)["score"] == pytest.approx(
        3 * parts["facts"] - 0.5 * parts[fitness_evaluator.BITS]
    )
    c.evaluation_settings.tasks = [TaskSettings(name="facts", metric="acc_norm,none", weight=-1)]
    c.evaluation_settings.text_weight = 0
    again = evaluate_model(c.models[0], c)
    assert again["score"] == -again["objectives"]["facts:acc_norm,none"] and "perplexity" not in again
    c.evaluation_settings.limit = 4
    some = {right / asked for asked in (1, 2, 3) for right in range(asked + 1)}  # of four questions
    assert evaluate_model(c.models[0], c)["objectives"]["facts:acc_norm,none"] in some


def test_several_objectives_have_a_front_and_a_good_merge_wins(facts, tmp_path, here):
    c = facts.model_copy(deep=True, update={"out": str(tmp_path / "run")})
    c.evolution_settings.num_generations = 4
    c.merge_settings.base_model = ModelReference("base", Path(c.models[0].path).parent / "base")
    assert worker(c).run() == "over"
    found = tournament_results.found_in(tmp_path / "run")
    winner, *others = found.tested
    assert all(winner.metrics["test_score"] > other.metrics["test_score"] for other in others)
    assert all(winner.objectives["facts"] >= other.objectives["facts"] for other in others)
    assert found.best in found.front and len({entry.id for entry in found.front}) == len(found.front)
    assert here("--pareto", "--out", tmp_path / "run").stdout.count("facts") >= 1


def facts_as_text(file: Path) -> Path:
    rows = [f"p{part} of {subject} is {a} {b}" for part, subject, a, b in searching.facts()]
    random.Random(3).shuffle(rows)
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return file


# -- bad input --------------------------------------------------------------------------------------------------------


def encoder(folder: Path, shape, kind, seed: int) -> ModelReference:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(seed)
    kind(shape(vocab_size=300, max_position_embeddings=64, **small)).save_pretrained(folder)
    merging.tokenizer(folder, "the cat sat", size=290)
    return ModelReference(f"{kind.__name__}-{seed}", folder)


def refused(c: Configuration) -> str:
    with pytest.raises(EvoMergeException) as error:
        validate_merge_config(c)
    assert error.value.__cause__ is not None and "\n" not in str(error.value)
    return str(error.value)


def test_models_of_different_architectures_are_refused(tmp_path):
    bert = encoder(tmp_path / "bert", BertConfig, BertForMaskedLM, 0)
    roberta = encoder(tmp_path / "roberta", RobertaConfig, RobertaForMaskedLM, 1)
    said = refused(Configuration(models=[bert, roberta]))
    assert "is a bert" in said and "a roberta" in said and "another bert or another roberta" in said
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4)).save_pretrained(tmp_path / "gpt2")
    merging.tokenizer(tmp_path / "gpt2", "the cat sat", size=290)
    llamas = models(tmp_path, 2)
    said = refused(Configuration(models=[llamas[0], ModelReference("g", tmp_path / "gpt2"), llamas[1]]))
    assert "model0 is a llama, g a gpt2" in said and "model0 with model1 could be merged" in said


@pytest.mark.parametrize("shape", [{"hidden_size": 64}, {"num_hidden_layers": 2}, {"intermediate_size": 64},
                                   {"num_key_value_heads": 4}])  # fmt: skip
def test_models_of_different_shapes_are_refused(tmp_path, shape):
    other = models(tmp_path / "other", 1, **shape)[0]
    said = refused(Configuration(models=[models(tmp_path, 1)[0], ModelReference("other", other.path)]))
    assert f"{[*shape][0]} is" in said and str([*shape.values()][0]) in said


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    there = models(tmp_path, 2)
    for file in Path(there[1].path).glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer" in refused(Configuration(models=there))


def test_missing_and_broken_files_are_refused(tmp_path):
    there = models(tmp_path, 2)
    with pytest.raises(EvoMergeException, match="not a folder with a model"):
        validate_merge_config(Configuration(models=[there[0], ModelReference("x", str(tmp_path / "nowhere"))]))
    (Path(there[1].path) / "model.safetensors").write_bytes(b"\xff" * 100)
    assert "model.safetensors" in refused(Configuration(models=there))
    (Path(there[1].path) / "config.json").write_text("{")
    assert "config.json" in refused(Configuration(models=there))


@pytest.mark.parametrize("words, said", [
    (["--run", "--model1", "/nowhere"], "not a folder with a model"), (["--run", "--method", "magic"], "merge_method"),
    (["--run", "--generations", "0"], "num_generations"), (["--run", "--config", "/nowhere.json"], "cannot be read"),
    (["--generate", "/nowhere", "--prompt", "x"], "/nowhere"), (["--generate", "/nowhere"], "--prompt"),
    (["--prompt", "x", "--run"], "--generate"), (["--pareto", "--out", "/nowhere"], "not the folder of a run"),
    (["--run", "--tasks", "a:b"], "name:weight"), (["--run", "--export-gguf", "Q9"], "Q8_0"),
    (["--run", "--machines", "/nowhere.json"], "nowhere.json"),
    (["--run", "--out", "{}/a b"], "folder's name"),
    (["--evaluate", "{}"], "model_type"),
    (["--run", "--model1", "a/b", "--model2", "a/b"], "a/b is given twice"),
])  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_line(tmp_path, here, words, said):
    done = here(*(word.format(tmp_path) for word in words))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_prompt_longer_than_the_context_is_refused(finished, here):
    winner = finished[0] / "run" / "winner"
    done = here("--generate", winner, "--prompt", "the cat sat " * 50)
    assert done.returncode == 2 and "context of 64" in done.stderr
    done = here("--generate", winner, "--prompt", "the cat sat on a mat and", "--max-length", 3)
    assert done.returncode == 2 and "max_length" in done.stderr
    done = here("--generate", winner, "--prompt", "the cat", "--max-length", 12)
    assert done.returncode == 0 and done.stdout.startswith("the cat")


def test_help_without_arguments():
    said = cli()
    assert said.returncode == 0 and said.stdout.count("python -m evomerge.cli --") == 3
    promised = "run evaluate generate prompt config model1 model2 model3 tasks generations out workers machines seed"
    assert all(f"--{option}" in said.stdout for option in (*promised.split(), "export-gguf", "pareto"))


def test_the_command_line_evaluates_lists_and_exports(finished, here):
    folder, c, _ = finished
    said = here("--evaluate", folder / "run" / "winner", "--config", folder / "mine.json")
    assert said.returncode == 0 and "perplexity" in said.stdout
    said = here("--pareto", "--config", folder / "mine.json")
    assert said.returncode == 0 and tournament_results.found_in(folder / "run").best.name[:20] in said.stdout.replace(
        "\n", ""
    )
    said = here("--export-gguf", "f16", "--config", folder / "mine.json")
    assert said.returncode == 0, said.stderr
    file = folder / "run" / "winner-F16.gguf"
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    tokens = AutoTokenizer.from_pretrained(folder / "run" / "winner")("the cat sat", return_tensors="pt")["input_ids"]
    whole = AutoModelForCausalLM.from_pretrained(folder / "run" / "winner", dtype=torch.float32)
    assert torch.allclose(model(tokens).logits, whole(tokens).logits, atol=2e-2)


def test_gguf_files_compete_like_folders(tmp_path):
    from evomerge.gguf_utils import export_gguf

    c = config(tmp_path, num_generations=1)
    file = tmp_path / "model0.gguf"
    export_gguf(c.models[0].path, file, "F32")
    c.models = [ModelReference("", file), *c.models[1:]]
    assert worker(c).run() == "over"
    assert tournament_results.found_in(tmp_path / "run").best.score is not None

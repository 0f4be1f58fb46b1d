"""Candidates of a merge search, their scores, and whole searches."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from fleet.digest import digest
from fleet.history import opened
from fleet.run_config import UserError
from merge import engine
from merge.donors import Donors
from merge.evolve.recipe_evaluator import RecipeEvaluator, Resident
from merge.evolve.records import CandidateRow, SearchOutcome, text_of
from merge.evolve.search_config import EvalTask
from merge.evolve.search_space import Space
from merge.evolve.search_view import SearchView, table_of
from merge.live_models import key_of
from merge.merge_planning import plan_merge
from merge.merge_recipe import parse
from merge.merging import merge
from tests import searching
from tests.hub import call, hub
from tests.merging import llama, tokenizer, weights
from tests.searching import ROOT, command, completed, genome_file, genotypes, rows, search, wait_for
from train import lm_eval_tasks
from train.few_questions import calibrated
from train.fitness_from import Interview


@pytest.mark.parametrize("method, splits", [
    *(("linear", 0), ("slerp", 0), ("dare_ties", 0), ("della", 0), ("karcher", 0)), *(("linear", 1), ("slerp", 1)),
])  # fmt: skip
def test_a_candidate_in_memory_is_the_model_that_its_recipe_makes(method, splits, facts, tmp_path):
    file = genome_file(tmp_path, facts, method, method in ("dare_ties", "della"), genome={"layer_splits": splits})
    config = completed(file, facts)
    evaluator, one = RecipeEvaluator(config), Space(config.genome, 2)
    for n in range(2):  # one after the other in the same model
        recipe = one.recipe(np.random.default_rng(n).random(one.size))
        found = evaluator.scored(recipe)
        (tmp_path / "best.yml").write_text(text_of(recipe))
        merge(tmp_path / "best.yml", tmp_path / f"out{n}")
        wanted = weights(tmp_path / f"out{n}")
        state = evaluator.live.now.model.state_dict()
        assert wanted.keys() == state.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)
        on_disk = RecipeEvaluator(config.model_copy(update={"in_memory": False})).scored(recipe)
        assert on_disk == found


def test_copies_of_models_are_read_once_they_are_known(facts, tmp_path):
    evaluator, name = RecipeEvaluator(completed(genome_file(tmp_path, facts), facts)), str(facts / "part0")
    assert evaluator.donors[name].folder == facts / "part0"
    merge(parse(text_of({"merge_method": "passthrough", "models": [{"model": name}]})), tmp_path / "copy")
    evaluator.donors.know({name: tmp_path / "copy"})
    donor = evaluator.donors[name]
    assert donor.folder == tmp_path / "copy" and donor.reference == name
    assert evaluator.digest == RecipeEvaluator(evaluator.config).digest, "copies are no other models"


def adapter(folder: Path, seed: int) -> Path:
    """Of one matrix of `llama`."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    module = "base_model.model.model.layers.0.mlp.up_proj"
    shapes = {f"{module}.lora_A.weight": (2, 32), f"{module}.lora_B.weight": (48, 2)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 4}')
    return folder


def test_an_adapted_model_has_its_own_dtype_in_memory_too(tmp_path):
    model = f"{llama(tmp_path / 'm', 1, torch.bfloat16)}+{adapter(tmp_path / 'lora', 2)}"
    recipe = parse(text_of({"merge_method": "passthrough", "models": [{"model": model}]}))
    made, how = [], engine.MergeOptions()
    for device in ("", "cpu"):
        with Resident(device) as donors:
            jobs = plan_merge(recipe, donors).jobs
            made.append({job.name: torch.cat([block for block, _ in engine.rounded(job, how)]) for job in jobs})
    assert {each.dtype for each in made[1].values()} == {torch.bfloat16}
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_other_models_are_noticed_whatever_files_they_are_in(facts, tmp_path):
    model, lora = llama(tmp_path / "m", 1), adapter(tmp_path / "lora", 2)
    torch.save(weights(model), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    (tmp_path / "words.gguf").write_bytes(b"GGUF")
    config = completed(genome_file(tmp_path, facts), facts)
    given = config.genome.model_copy(update={"models": (f"{model}+{lora}", str(tmp_path / "words.gguf"))})
    config = config.model_copy(update={"genome": given})
    found = [RecipeEvaluator(config).digest]
    for change in (
        lambda: adapter(lora, 3),
        lambda: (lora / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 8}'),
        lambda: torch.save({n: -each for n, each in weights(facts / "part0").items()}, model / "pytorch_model.bin"),
        lambda: (tmp_path / "words.gguf").write_bytes(b"GGUG"),
        lambda: (model / "tokenizer.json").write_text("{}"),
        lambda: (model / "config.json").write_text("{}"),
    ):
        change()
        found.append(RecipeEvaluator(config).digest)
    assert len({*found}) == len(found) and found[-1] == RecipeEvaluator(config).digest


def test_a_union_of_tokenizers_in_another_order_is_another_tokenizer(tmp_path):
    """Its added tokens come in the order of the models, and slerp takes the two that weigh most."""
    models = []
    for n in range(3):
        folder = llama(tmp_path / f"m{n}", n)
        tokenizer(folder, "the same words", ("</s>", f"<{n}>"), size=40)
        models.append(str(folder))
    keys, made = [], []
    with Donors() as donors:
        for several in (models, [models[0], *models[:0:-1]], models):
            recipe = {"merge_method": "linear", "models": [{"model": name} for name in several]}
            recipe |= {"base_model": models[0], "parameters": {"weight": 1}, "tokenizer_source": "union"}
            plan = plan_merge(parse(text_of(recipe)), donors)
            keys.append(key_of(plan))
            made.append(plan.vocabulary.result.ids)
    assert keys[0] == keys[2] != keys[1] and made[0] != made[1]


def test_a_search_keeps_questions_for_the_end(facts, tmp_path):
    config = completed(genome_file(tmp_path, facts), facts, holdout=0.25)
    evaluator = RecipeEvaluator(config)
    evaluator.scored(Space(config.genome, 2).recipe([1, 1, 1]))
    evaluation = evaluator.questions(evaluator.live.now)
    now, held = (each["facts"] for each in evaluation.parted(0.25).values())
    assert 9 <= len(held) <= 27 and sorted(now + held) == list(range(72))
    assert lm_eval_tasks.parted(replace(evaluation.asked, seed=5), evaluation.loaded, 0.25)["test"]["facts"] != held


def test_of_one_held_out_question_no_interval_is_told():
    task = EvalTask(name="facts")

    def of(*marks):
        return {"score": sum(marks) / len(marks), "single": json.dumps({task.key: marks})}

    config = SimpleNamespace(models=["a", "b"], tasks=[task], max_fevals=1)
    found = SearchOutcome(config, None, [], {}, {"a": of(1.0), "b": of(1.0, 0.0)})
    assert [*table_of(found).columns[2].cells] == ["-", "1.0000", "0.5000 ± 0.9800"]


def test_a_race_gives_up_on_the_hopeless_alone(facts, tmp_path):
    config = completed(genome_file(tmp_path, facts), facts, fitness_from="racing")
    evaluator, one = RecipeEvaluator(config), Space(config.genome, 2)
    best = evaluator.scored(one.recipe([1, 1, 1]))
    assert best["asked"] == 72 and not best["given_up"]
    again = evaluator.scored(one.recipe([1, 1, 1.01]), Interview(rival=best))
    assert again["asked"] == 72 and not again["given_up"]
    poor = evaluator.scored(one.recipe([1, 0, 0]), Interview(rival=best))
    assert poor["asked"] < 72 and poor["given_up"] and poor["score"] < best["score"]
    assert abs(poor["score"] - evaluator.scored(one.recipe([1, 0, 0]))["score"]) < 0.25


def test_few_questions_tell_about_what_all_do(facts, tmp_path):
    """Of models of which nothing was known before; and finalists are asked nothing again."""
    config = completed(genome_file(tmp_path, facts), facts, fitness_from="irt", fitness_questions=16)
    evaluator, one = RecipeEvaluator(config), Space(config.genome, 2)
    first = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1], [0.6, 0.3, 0.3], [0.2, 0.5, 0.5]]
    answers = [json.loads(evaluator.scored(one.recipe(each))["single"]) for each in first]
    known = calibrated(evaluator.items(), answers, evaluator.fewest)
    assert known["respondents"] == 8 and known["few"] == 16 and known["widening"] >= 1
    for draw, point in enumerate(([1, 1, 1], [0.3, 0.6, 0.2], [0, 0.1, 1])):
        whole = evaluator.scored(one.recipe(point))
        found = evaluator.scored(one.recipe(point), Interview(few=evaluator.few(known, draw)))
        assert found["asked"] == 16 and 0 < found["standard_error"] < 0.3
        assert abs(found["score"] - whole["score"]) < 3 * found["standard_error"]
        rest = evaluator.scored(one.recipe(point), Interview(earlier=found))
        assert rest["asked"] == 72 - 16 and rest["score"] == whole["score"] and rest["single"] == whole["single"]
    assert (
        found["questions"] != evaluator.scored(one.recipe(point), Interview(few=evaluator.few(known, 0)))["questions"]
    )


def test_a_race_needs_marks_of_single_questions(facts, tmp_path):
    text = (facts / "tasks" / "facts.yaml").read_text().replace("task: facts", "task: counted")
    (tmp_path / "counted.yaml").write_text(text.replace("aggregation: mean", "aggregation: median"))
    file = genome_file(tmp_path, facts, tasks=["counted"])
    for option in ({"fitness_from": "racing"}, {"fitness_from": "irt"}, {"holdout": 0.5}):
        with pytest.raises(UserError, match="is not a mean over single questions"):
            RecipeEvaluator(completed(file, facts, task_path=(str(tmp_path),), **option)).check()
    RecipeEvaluator(completed(file, facts, task_path=(str(tmp_path),))).check()


def test_tasks_and_their_weights_make_the_score(facts, tmp_path):
    scored = [{"name": "facts", "weight": 2.0}, {"name": "facts", "metric": "acc_norm,none", "weight": -0.5}]
    config = completed(genome_file(tmp_path, facts, tasks=scored), facts)
    found = RecipeEvaluator(config).scored(Space(config.genome, 2).recipe([1, 1, 1]))
    scores = json.loads(found["scores"])
    assert found["score"] == 2 * scores["facts/acc,none"] - 0.5 * scores["facts/acc_norm,none"]


@pytest.mark.parametrize("changes, why", [
    pytest.param(  # lm-eval looks through all its tasks
        {"tasks": ["fcats"]}, "there is no task 'fcats'; the nearest known one is", marks=pytest.mark.slow
    ),
    ({"tasks": [{"name": "facts", "metric": "f1,none"}]}, "no metric 'f1,none'; it has acc,none, acc_norm,none"),
    pytest.param(
        {"tasks": ["arc_easy"]}, "arc_easy is one of lm-eval's own tasks.*--allow-benchmark-tasks",
        marks=pytest.mark.slow,
    ),
    ({"genome": {"layer_granularity": 3}}, "does not divide the models' 2 layers"),
    ({"genome": {"layer_splits": 2}}, "between the models' 2 layers are 1 places"),
    ({"genome": {"filters": ["self_atn"]}}, "'self_atn' is in no tensor's name; parts of names are .*q_proj"),
    ({"apply_chat_template": True}, "the models' tokenizer has no chat template"),
    ({"genome": {"models": ["/no/such/model", "/none"]}}, "/no/such/model: not a folder"),
])  # fmt: skip
def test_what_cannot_be_searched_is_known_before_anything_is_merged(changes, why, facts, tmp_path):
    config = completed(genome_file(tmp_path, facts, **changes), facts)
    with pytest.raises(ValueError, match=why):
        RecipeEvaluator(config).check()


def test_donors_that_do_not_fit_together(facts, tmp_path):
    searching.donors(tmp_path, layers=3, steps=1)
    other = genome_file(tmp_path, facts, genome={"models": [str(facts / "part0"), str(tmp_path / "part1")]})
    with pytest.raises(ValueError, match="model.layers.2.* is missing in"):
        RecipeEvaluator(completed(other, facts)).check()


def test_a_search_finds_a_better_model_and_writes_it_down(facts, tmp_path):
    out = tmp_path / "search"
    said = search(
        genome_file(tmp_path, facts), out, facts, "--max-fevals", "20", "--holdout", "0.3", "--save-final-model"
    )
    found = rows(out)
    assert len(found) == 20 and [row["index"] for row in found[:7]] == list(range(7))
    best = max(row["score"] for row in found)
    table = {line.split("│")[1].strip(): line.split("│")[2:4] for line in said.splitlines() if line.count("│") == 4}
    held = {name.rpartition("/")[2]: float(cells[1].split("±")[0]) for name, cells in table.items()}
    winner = next(value for name, value in held.items() if name.startswith("best merge"))
    assert all(winner > value for name, value in held.items() if name.startswith("part")) and len(held) == 4
    recipe = yaml.safe_load((out / "best_config.yaml").read_text())
    made = weights(out / "final_model")
    merge(out / "best_config.yaml", tmp_path / "again")
    assert all(torch.equal(made[name], each) for name, each in weights(tmp_path / "again").items())
    assert [each["model"] for each in recipe["models"]] == [str(facts / f"part{n}") for n in range(3)]
    lines = (out / "history.csv").read_text().splitlines()
    assert lines[0].split(",")[:3] == ["generation", "index", "score"] and len(lines) == 21
    assert (out / "progress.png").read_bytes()[:4] == b"\x89PNG" and f"{best:.4f}" in said
    AutoModelForCausalLM.from_pretrained(out / "final_model")
    line = f"lm_eval --model hf --model_args pretrained={out}/final_model "
    assert line in said and line in (out / "final_model" / "README.md").read_text()
    assert (out / "final_model" / "model.safetensors").stat().st_mode == (tmp_path / "genome.yml").stat().st_mode
    with hub() as known:
        call(known, tmp_path / "home", "-m", "train.export", str(out), "--push", "org/found")
        there = known.repositories["org/found"]
    card = there.commits[there.head]["README.md"].decode()
    assert digest(opened(out)) in card and b"score" in there.commits[there.head]["curve.svg"]


def test_the_best_so_far_is_what_it_was_when_a_generation_was_there():
    estimate = CandidateRow(2, 0, [], 0.9, {}, 0.1, "", standard_error=0.1)
    made = [CandidateRow(1, 0, [], 0.5, {}, 0.1, ""), estimate, CandidateRow(3, 0, [], 0.4, {}, 0.1, "")]
    found = SearchOutcome(SimpleNamespace(max_fevals=2), None, made, {})
    said = [SearchView.generation(None, found, generation).partition("best so far ")[2] for generation in (1, 2, 3)]
    assert said == ["0.5000", "0.9000 (estimated)", "0.5000"]


@pytest.mark.slow
@pytest.mark.parametrize("how, genome", [("all", {"layer_splits": 1}), ("irt", {})])
def test_a_killed_search_goes_on_as_if_nothing_had_been(how, genome, facts, tmp_path):
    file = genome_file(tmp_path, facts, "dare_ties", base=True, genome=genome)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ("--max-fevals", "24", "--population-size", "6", "--random-seed", "4", "--fitness-from", how)
    search(file, whole, facts, *more, "--workers", "1")
    started = subprocess.Popen(command(file, cut, facts, *more, "--workers", "2"), cwd=ROOT, start_new_session=True)
    wait_for(lambda: (cut / "rounds" / "00002" / "plan").exists())
    workers = [int(line) for line in _children(started.pid)]
    started.kill()
    for pid in workers:
        with_suppressed_kill(pid)
    started.wait()
    assert len(genotypes(whole)[:24]) == 24
    search(file, cut, facts, *more, "--workers", "2")
    assert genotypes(cut) == genotypes(whole) and digest(opened(cut)) == digest(opened(whole))
    assert [row["scores"] for row in rows(cut)] == [row["scores"] for row in rows(whole)]
    assert (cut / "best_config.yaml").read_text() == (whole / "best_config.yaml").read_text()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def with_suppressed_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

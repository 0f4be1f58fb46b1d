"""The search for a merge: points and recipes, CMA-ES as a pure function, and whole searches with real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import yaml
from cyclopts import App, Group
from transformers import AutoModelForCausalLM

from fleet.host import Host
from fleet.run import create_run
from fleet.run_config import UserError
from merge.evolve import __main__ as main_module
from merge.evolve import scoring, search_running
from merge.evolve import search_config as configs
from merge.evolve.cma_es import CmaState, Generation, Search
from merge.evolve.merge_search import MergeSearch
from merge.evolve.recipe_evaluator import RecipeEvaluator
from merge.evolve.records import text_of
from merge.evolve.search_config import METHODS, MergeGenome, SearchConfig
from merge.evolve.search_space import Space
from merge.merge_recipe import merge_of, parse
from merge.merging import merge
from merge.search.search_command import flags, given
from tests import searching
from tests.merging import weights
from train import lm_eval_tasks

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> Path:
    """base, part0, part1, part2, and a folder of tasks."""
    folder = tmp_path_factory.mktemp("facts")
    searching.donors(folder)
    searching.task(folder / "tasks")
    return folder


def genome_file(folder: Path, facts: Path, method: str = "linear", base: bool = False, **more) -> Path:
    genome = {"models": [str(facts / f"part{n}") for n in range(3)], "merge_method": method, **more.pop("genome", {})}
    genome |= {"base_model": str(facts / "base")} if base else {}
    file = folder / "genome.yml"
    file.write_text(yaml.safe_dump({"genome": genome, "tasks": ["facts"], **more}))
    return file


def command(file: Path, out: Path, facts: Path, *more: str) -> list[str]:
    strategy = () if "--strategy" in more else ("--strategy", "fleet")
    words = ["--storage-path", str(out), "--task-search-path", str(facts / "tasks"), *strategy, *more]
    return [sys.executable, "-m", "merge.evolve", str(file), *words]


def search(file: Path, out: Path, facts: Path, *more: str) -> str:
    done = subprocess.run(command(file, out, facts, *more), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def genotypes(out: Path) -> list[list[float]]:
    return [row["genotype"] for row in rows(out)]


# -- points and recipes ------------------------------------------------------------------------------------------------


def space(method: str = "ties", layers: int = 4, **more) -> Space:
    base = {} if method in ("linear", "slerp", "karcher", "nuslerp", "multislerp") else {"base_model": "base"}
    models = ("a", "b") if method == "nuslerp" else ("a", "b", "c")
    return Space(MergeGenome(models=models, merge_method=method, **base, **more), layers)


@pytest.mark.parametrize("method", get_args(METHODS))
def test_every_method_has_a_recipe_that_the_engine_reads(method):
    for more in ({}, {"layer_granularity": 2}):
        one = space(method, **more)
        assert one.size == len(one.start()) == np.prod(one.shape)
        rng = np.random.default_rng(0)
        for _ in range(20):
            recipe = one.recipe(rng.normal(size=one.size))
            read = parse(text_of(recipe))
            assert read.method == method and len(read.slices) == (2 if more else 1)
            assert merge_of(recipe, "").slices == read.slices  # text and data say the same, to the bit


def test_the_layout_of_coordinates():
    one = space("ties", 6, layer_granularity=3, filters=("mlp",))
    assert one.shape == (2, 3, 2, 2)
    recipe = one.recipe([float(n) / 100 for n in range(one.size)])
    second = recipe["slices"][1]["sources"][2]
    assert second["model"] == "c" and second["layer_range"] == [3, 6]
    assert second["parameters"] == {
        "weight": [{"filter": "mlp", "value": 0.20}, {"value": 0.22}],
        "density": [{"filter": "mlp", "value": 0.21}, {"value": 0.23}],
    }
    assert recipe["base_model"] == "base" and "parameters" not in recipe


def test_weights_and_densities_are_brought_into_their_ranges():
    point = [-0.5, -1.5, 0.25, 0.5, 0.0, -0.25]
    given = [each["parameters"] for each in space("ties").recipe(point)["models"]]
    assert given == [
        {"weight": 0.5, "density": 1.0},
        {"weight": 0.25, "density": 0.5},
        {"weight": 0.0, "density": 0.25},
    ]
    given = space("ties", allow_negative_weights=True).recipe(point)["models"][0]["parameters"]
    assert given == {"weight": -0.5, "density": 1.0}


def test_every_field_of_the_genome_changes_the_recipe():
    plain = space("linear").recipe([0.1, 0.2, 0.3])
    assert [each["parameters"]["weight"] for each in plain["models"]] == [0.1, 0.2, 0.3]
    assert space("linear", normalize=False).recipe([0.1, 0.2, 0.3])["parameters"] == {"normalize": False}
    assert space("linear", tokenizer_source="union").recipe([0.1, 0.2, 0.3])["tokenizer_source"] == "union"
    assert (plain["dtype"], plain.get("out_dtype")) == ("float32", None)
    typed = space("linear", dtype="bfloat16", out_dtype="float16").recipe([0.1, 0.2, 0.3])
    assert (typed["dtype"], typed["out_dtype"]) == ("bfloat16", "float16")
    smooth = space("linear", layer_granularity=2, smooth=True).recipe([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert [each["parameters"]["weight"] for each in smooth["models"]] == [[0.1, 0.4], [0.2, 0.5], [0.3, 0.6]]
    assert "base_model" not in plain and space("ties").recipe([0.1] * 6)["base_model"] == "base"


def test_slerp_takes_the_two_strongest_of_each_group():
    recipe = space("slerp", layer_granularity=2).recipe([0.1, -0.6, 0.2, 0.5, 0.5, 0.1])
    first, second = recipe["slices"]
    assert (first["base_model"], [each["model"] for each in first["sources"]]) == ("b", ["b", "c"])
    assert first["parameters"]["t"] == pytest.approx(0.25) and second["parameters"]["t"] == 0.5
    assert [each["model"] for each in second["sources"]] == ["a", "b"]


def test_starting_points():
    assert space("linear").start() == [1 / 3] * 3
    assert space("ties").start() == [1 / 3, 0.7] * 3
    assert space("linear").start(5) == space("linear").start(5) != space("linear").start(6)


def test_a_granularity_that_does_not_divide_the_layers():
    with pytest.raises(
        UserError, match=r"layer_granularity is 4, which does not divide the models' 6 layers.*1, 2, 3, 6"
    ):
        space("linear", 6, layer_granularity=4)


# -- CMA-ES ------------------------------------------------------------------------------------------------------------


def bowl(point) -> float:
    return -sum((x - 0.8) ** 2 for x in point)


def run_search(one: Search, generations: int, score=bowl) -> list[Generation]:
    past: list[Generation] = []
    for _ in range(generations):
        points = one.next(past)
        past.append(Generation(points, [score(point) for point in points]))
    return past


def test_the_search_finds_its_way_and_is_a_pure_function(tmp_path, monkeypatch):
    one = Search((0.3,) * 4, 1 / 6, 0, 3)
    whole = run_search(one, 30)
    assert max(whole[-1].scores) > -1e-3 > max(whole[0].scores)
    np.random.seed(99)  # others' randomness plays no part, neither does a file of commands that lies about
    np.random.rand(17)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cma_signals.in").write_text("{'maxiter': 0, 'ftarget': 1e9}")
    told = CmaState(one)
    for n in (0, 1, 7, 24):
        assert Search((0.3,) * 4, 1 / 6, 0, 3).next(whole[:n]) == [list(point) for point in whole[n].points]
        for _ in range(2):  # nor if it is the same process that heard the generations before, or is asked twice
            assert one.next(whole[:n], told) == [list(point) for point in whole[n].points]
    assert Search((0.3,) * 4, 1 / 6, 0, 4).next([]) != Search((0.3,) * 4, 1 / 6, 0, 3).next([])
    assert Search((0.3,) * 4, 1 / 6, 0, 0).next([]) == Search((0.3,) * 4, 1 / 6, 0, 0).next([])  # 0 is no clock


def test_options_of_the_search():
    small, large = (Search((0.3,) * 4, sigma, 0, 3).next([]) for sigma in (0.01, 1.0))
    assert np.std(large) > 20 * np.std(np.array(small))
    assert len(Search((0.3,) * 4, 1.0, 17, 3).next([])) == 17
    assert Search((0.3,) * 4, 1.0, 0, 3).population == 8 and Search((0.3,) * 40, 1.0, 0, 3).population == 15


def test_what_failed_ranks_last():
    one = Search((0.3,) * 3, 0.3, 8, 1)
    points = one.next([])
    scores = [bowl(point) for point in points]
    failed = [None if n < 3 else score for n, score in enumerate(scores)]
    worst = [min(scores) - 10 if n < 3 else score for n, score in enumerate(scores)]
    assert one.next([Generation(points, failed)]) == one.next([Generation(points, worst)])
    assert one.next([Generation(points, [None] * 8)])  # all of them


@pytest.mark.parametrize("size", [3, 64])
def test_a_machine_that_rounds_differently_proposes_the_same(size, monkeypatch):
    """Sums in another order, another library: seen between two processes of one machine."""
    one = Search((0.3,) * size, 0.3, 0, 1)
    past, usual, rng = run_search(one, 4), np.linalg.eigh, np.random.default_rng(1)

    def elsewhere(matrix):
        order = rng.permutation(len(matrix))
        values, vectors = usual(matrix[np.ix_(order, order)])
        return values, vectors[np.argsort(order)] * rng.choice([-1, 1], len(matrix))

    here = CmaState(one)
    monkeypatch.setattr(np.linalg, "eigh", elsewhere)
    there = CmaState(one)
    for generation in past:
        here.told(generation)
        there.told(generation)
    assert not np.array_equal(here.asked(), there.asked())
    for n in range(4):
        assert one.next(past[:n]) == past[n].points


# -- the genome file ---------------------------------------------------------------------------------------------------

GOOD = {"genome": {"models": ["a", "b"], "merge_method": "linear"}, "tasks": ["t"]}


def genome(**more) -> dict:
    return {**GOOD, "genome": {**GOOD["genome"], **more}}


@pytest.mark.parametrize("value, why", [
    ({**GOOD, "taks": []}, "unknown key 'taks'; the nearest known one is tasks"),
    ({"tasks": ["t"]}, "`genome:` and `tasks:` are expected"),
    ({**GOOD, "tasks": "t"}, "tasks: a list is expected"),
    ({**GOOD, "tasks": [3]}, "tasks, number 1: a name, or name, weight and metric"),
    ({**GOOD, "tasks": [{"name": "t", "wieght": 1}]}, "tasks, number 1: .*wieght.* nearest known key is weight"),
    ({**GOOD, "tasks": [{"name": "t", "weight": "x"}]}, "weight is .*a number"),
    ({**GOOD, "tasks": ["t", "t"]}, "one of them stands there twice"),
    ({**GOOD, "tasks": [{"name": "t", "weight": 0}]}, "all weights are 0"),
    ({**GOOD, "limit": 0}, "limit is 0: a whole number from 1"),
    ({**GOOD, "shuffle": 1}, "shuffle is 1: "),
    (genome(modles=[]), "genome: unknown key .modles.; the nearest known key is models"),
    (genome(models=["a"]), "genome: models is"),
    (genome(models=["a", "a"]), "one of them stands there twice"),
    (genome(merge_method="tise"), "merge_method is .tise"),
    (genome(merge_method="ties"), "base_model is missing: ties merges changes of a base"),
    (genome(merge_method="ties", base_model="a"), "base_model 'a' is one of the models"),
    (genome(base_model="c"), "linear has no base"),
    (genome(merge_method="slerp", filters=["mlp"]), "it knows no smooth and no filters"),
    (genome(merge_method="nuslerp", models=["a", "b", "c"]), "nuslerp merges two models, here are 3"),
    (genome(smooth=True), "smooth needs a layer_granularity"),
    (genome(merge_method="karcher", normalize=True), "karcher knows no normalize"),
    (genome(merge_method="slerp", allow_negative_weights=True), "allow_negative_weights has no sense"),
    (genome(filters=["mlp", "mlp"]), "filters: one of them stands there twice"),
    (genome(layer_granularity=-1), "layer_granularity is -1"),
])  # fmt: skip
def test_bad_genome_files(value, why, tmp_path):
    file = tmp_path / "genome.yml"
    file.write_text(yaml.safe_dump(value))
    with pytest.raises(UserError, match=why):
        configs.read(file, {})


def test_a_genome_file_that_is_no_plain_yaml(tmp_path):
    file = tmp_path / "genome.yml"
    for text, why in (("a: &x 1", "anchors"), ("genome: {a: 1, a: 2}", "twice"), ("[", "not YAML")):
        file.write_text(text)
        with pytest.raises(UserError, match=f"genome.yml: .*{why}"):
            configs.read(file, {})
    with pytest.raises(UserError, match="cannot be read"):
        configs.read(tmp_path / "nowhere.yml", {})


def test_the_examples_of_the_documentation(facts, tmp_path):
    """Genome files are read, and the task asks a model."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "merge-search.md").read_text(), re.M | re.S)
    genomes = [text for text in blocks if text.startswith("genome:")]
    shown = main_module.__doc__.split("what is scored:\n\n")[1].split("\n\nCtrl-C")[0]
    for text in [*genomes, "\n".join(line[4:] for line in shown.splitlines())]:
        (tmp_path / "genome.yml").write_text(text)
        assert configs.read(tmp_path / "genome.yml", {}).genome.models[0] == "org/math-model"
    (task,) = (text for text in blocks if "task: my_task" in text)
    (tmp_path / "my_task.yaml").write_text(task.replace("/data/my_task.json", str(facts / "tasks" / "facts.json")))
    config = completed(genome_file(tmp_path, facts, tasks=["my_task"]), facts, task_path=(str(tmp_path),))
    assert RecipeEvaluator(config).scored(Space(config.genome, 2).recipe([1, 1, 1]))["score"] > 0.6


def test_every_field_of_the_file_and_every_option_reaches_the_search(facts, tmp_path):
    fields = {
        "limit": 9,
        "num_fewshot": 2,
        "shuffle": True,
        "apply_chat_template": False,
        "fewshot_as_multiturn": False,
    }
    asked = scoring.asked(completed(genome_file(tmp_path, facts, **fields), facts, seed=7))
    given = (asked.limit, asked.num_fewshot, asked.shuffle, asked.apply_chat_template, asked.fewshot_as_multiturn)
    assert given == tuple(fields.values()) and asked.seed == 7 and asked.tasks == ("facts",)
    one = space("linear")

    def begins(**more) -> Search:
        return MergeSearch(completed(genome_file(tmp_path, facts, **more.pop("file", {})), facts, **more)).search(one)

    plain = begins()
    assert plain.start == (1 / 3,) * 3 and plain.sigma == 1 / 6 and plain.population == 7
    assert begins(file={"random_init": True}).start != plain.start
    assert begins(seed=4).next([]) != plain.next([]) and begins(sigma0=0.5).sigma == 0.5
    assert begins(population_size=5).population == 5
    assert MergeSearch(completed(genome_file(tmp_path, facts), facts, max_fevals=30)).generations(plain) == 5
    evaluator = RecipeEvaluator(completed(genome_file(tmp_path, facts), facts, batch_size=3, threads=2))
    evaluator.scored(Space(evaluator.config.genome, 2).recipe([1, 1, 1]))
    assert evaluator.questions(evaluator.live.now)._lm._most == 3 and torch.get_num_threads() == 2


def test_models_that_lie_here_have_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("m", "lora"):
        Path(name).mkdir()
    file = tmp_path / "genome.yml"
    file.write_text(yaml.safe_dump(genome(models=["./m", "m+lora", "org/name"])))
    models = configs.read(file, {}).genome.models
    assert models == (str(tmp_path / "m"), f"{tmp_path / 'm'}+{tmp_path / 'lora'}", "org/name")


KEYS = flags({Group("g"): {"max_fevals": None, "in_memory": None, "seed": "--random-seed"}}, SearchConfig)


def test_options_are_keys_of_the_settings_and_what_nobody_gave_is_left_to_them(capsys):
    app = App()

    @app.default
    def main(*, keys: KEYS = KEYS()):
        return given(keys)

    words = "--random-seed 7 --no-in-memory"
    assert app(words, result_action="return_value") == {"seed": 7, "in_memory": False}
    assert app("", result_action="return_value") == {}
    app("--help", result_action="return_value")
    assert "Candidates, at most. [default: 100]" in capsys.readouterr().out


def test_a_search_of_an_older_kind_is_refused_before_anything_of_it_is_read(facts, tmp_path):
    config = completed(genome_file(tmp_path, facts), facts)
    store, _ = create_run(tmp_path, "x", config.bound(), Host(), SearchConfig)
    about = json.loads((tmp_path / "x" / "run.json").read_bytes().split(b"\n")[0])
    (tmp_path / "x" / "run.json").unlink()
    store.settle("run.json", {**about, "results": 2})
    other = config.model_copy(update={"max_fevals": 7})
    with pytest.raises(UserError, match="results of kind 2 and this code would give it those of kind 4"):
        search_running.make_way(other, tmp_path / "x")


# -- candidates --------------------------------------------------------------------------------------------------------


def completed(file: Path, facts: Path, **options) -> SearchConfig:
    more = {"task_path": (str(facts / "tasks"),), "project_name": "x", "threads": 1, **options}
    return configs.read(file, {"algorithm": "merge-search", **more})


@pytest.mark.parametrize("method", ["linear", "slerp", "dare_ties", "della", "karcher"])
def test_a_candidate_in_memory_is_the_model_that_its_recipe_makes(method, facts, tmp_path):
    config = completed(genome_file(tmp_path, facts, method, base=method in ("dare_ties", "della")), facts)
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
    before = evaluator.digest  # opens the models where they are
    merge(parse(text_of({"merge_method": "passthrough", "models": [{"model": name}]})), tmp_path / "copy")
    evaluator.donors.know({name: tmp_path / "copy"})
    donor = evaluator.donors[name]
    assert donor.folder == tmp_path / "copy" and donor.reference == name and before


def test_a_search_keeps_questions_for_the_end(facts, tmp_path):
    config = completed(genome_file(tmp_path, facts), facts, holdout=0.25)
    evaluator = RecipeEvaluator(config)
    evaluator.scored(Space(config.genome, 2).recipe([1, 1, 1]))
    evaluation = evaluator.questions(evaluator.live.now)
    now, held = (each["facts"] for each in evaluation.parted(0.25).values())
    assert 9 <= len(held) <= 27 and sorted(now + held) == list(range(72))
    assert lm_eval_tasks.parted(replace(evaluation.asked, seed=5), evaluation.loaded, 0.25)["test"]["facts"] != held


def test_a_race_gives_up_on_the_hopeless_alone(facts, tmp_path):
    config = completed(genome_file(tmp_path, facts), facts, race=True)
    evaluator, one = RecipeEvaluator(config), Space(config.genome, 2)
    best = evaluator.scored(one.recipe([1, 1, 1]))
    assert best["asked"] == 72 and not best["given_up"]
    again = evaluator.scored(one.recipe([1, 1, 1.01]), best)
    assert again["asked"] == 72 and not again["given_up"]
    poor = evaluator.scored(one.recipe([1, 0, 0]), best)
    assert poor["asked"] < 72 and poor["given_up"] and poor["score"] < best["score"]
    assert abs(poor["score"] - evaluator.scored(one.recipe([1, 0, 0]))["score"]) < 0.25


def test_a_race_needs_marks_of_single_questions(facts, tmp_path):
    text = (facts / "tasks" / "facts.yaml").read_text().replace("task: facts", "task: counted")
    (tmp_path / "counted.yaml").write_text(text.replace("aggregation: mean", "aggregation: median"))
    file = genome_file(tmp_path, facts, tasks=["counted"])
    for option in ({"race": True}, {"holdout": 0.5}):
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


# -- whole searches ----------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
def test_a_killed_search_goes_on_as_if_nothing_had_been(facts, tmp_path):
    file = genome_file(tmp_path, facts, "dare_ties", base=True)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    more = ("--max-fevals", "24", "--population-size", "6", "--random-seed", "4")
    search(file, whole, facts, *more, "--workers", "1")
    started = subprocess.Popen(command(file, cut, facts, *more, "--workers", "2"), cwd=ROOT, start_new_session=True)
    wait_for(lambda: (cut / "rounds" / "00002" / "plan").exists())
    workers = [int(line) for line in _children(started.pid)]
    started.kill()
    for pid in workers:
        with_suppressed_kill(pid)
    started.wait()
    assert len(genotypes(whole)) == 24
    search(file, cut, facts, *more, "--workers", "2")
    assert genotypes(cut) == genotypes(whole)
    assert [row["scores"] for row in rows(cut)] == [row["scores"] for row in rows(whole)]
    assert (cut / "best_config.yaml").read_text() == (whole / "best_config.yaml").read_text()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def with_suppressed_kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait_for(there, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)

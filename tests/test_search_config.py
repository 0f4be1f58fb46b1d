"""What a merge search is told: the genome file and the options of the command line."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from cyclopts import App, Group

from fleet.host import Host
from fleet.results_version import kind
from fleet.run import create_run
from fleet.run_config import UserError
from merge.evolve import __main__ as main_module
from merge.evolve import scoring, search_running
from merge.evolve import search_config as configs
from merge.evolve.cma_es import Search
from merge.evolve.merge_search import MergeSearch
from merge.evolve.recipe_evaluator import RecipeEvaluator
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_space import Space
from merge.search.search_command import flags, given
from tests.searching import ROOT, completed, genome_file, space

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
    (genome(layer_granularity=1, layer_splits=2), "both say which layers share parameters: one of them is enough"),
    (genome(layer_splits=2, smooth=True), "smooth needs a layer_granularity"),
    (genome(layer_splits=0.5), "layer_splits is 0.5"),
])  # fmt: skip
def test_bad_genome_files(value, why, tmp_path):
    file = tmp_path / "genome.yml"
    file.write_text(yaml.safe_dump(value))
    with pytest.raises(UserError, match=why):
        configs.read(file, {})


def test_no_refusal_waits_for_what_takes_long_to_load(tmp_path, monkeypatch):
    (tmp_path / "genome.yml").write_text(yaml.dump(genome(merge_method="magic")))
    monkeypatch.delattr("merge.evolve.search_running")
    monkeypatch.setitem(sys.modules, "merge.evolve.search_running", None)
    with pytest.raises(UserError, match="magic"):
        main_module.main(tmp_path / "genome.yml", storage_path=tmp_path / "search")


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


def test_a_race_was_a_key_of_its_own(facts, tmp_path):
    """In the folders of searches that an older version began, and on command lines still."""
    config = completed(genome_file(tmp_path, facts), facts)
    for race, now in ((True, "racing"), (False, "all")):
        older = {key: value for key, value in config.bound().items() if not key.startswith("fitness_")}
        assert SearchConfig.joined({**older, "race": race}, {}).fitness_from == now
    with pytest.raises(UserError, match="--fitness-questions: it says how many questions irt asks; without irt"):
        completed(genome_file(tmp_path, facts), facts, fitness_questions=20)


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
    with pytest.raises(
        UserError, match=f"results of kind 2 and this code would give it those of kind {kind('merge-search')}"
    ):
        search_running.make_way(other, tmp_path / "x")

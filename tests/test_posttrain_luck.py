"""EDT-EvoMerge where things go wrong, or look alike: what a worker has in memory, templates, dates, odd numbers."""

import contextlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoConfig

from fleet.digest import digest
from fleet.history import opened
from fleet.recipe import Member, Recipe
from fleet.run_config import UserError
from fleet.work import Superseded
from tests import posttraining, searching
from tests.posttraining import chats, config, finished, worker
from train import posttrain_results, text_sources
from train.lm_eval_tasks import TaskEvaluation
from train.member import posttraining_genome
from train.member.posttraining_round_zero import check_positions
from train.parent_selection import Rival, crowding, matched
from train.posttrain import example_rows, posttrain_fitness
from train.posttrain.example_rows import ExampleRows
from train.posttrain_results import exported, taken
from train.splits import HELD_OUT
from train.training_commands import prepare_breeding as prepare


def test_a_child_that_is_left_in_the_middle_leaves_nothing_behind(tmp_path, monkeypatch):
    """Somebody else has finished it: the worker's model has a half-learned adapter in it, and must not be used."""
    from train.member import posttraining_tasks as finetune

    c = config(tmp_path, adapter={"r": 4, "alpha": 8.0})
    finished(c)
    again = c.model_copy(update={"project_name": "again"})
    real, left = finetune.Learner.train, [2]

    def unwanted(self, *args, **more):
        for step in real(self, *args, **more):
            if left[0] and step == 2:
                left[0] -= 1
                raise Superseded
            yield step

    monkeypatch.setattr(finetune.Learner, "train", unwanted)
    assert worker(again).run() == "over" and not left[0]
    assert digest(opened(tmp_path / "run")) == digest(opened(tmp_path / "again"))


def test_a_child_whose_learning_comes_to_nothing_is_what_its_parents_made(tmp_path, monkeypatch):
    from train.member import posttraining_tasks as finetune

    real = finetune.Learner.train

    def broken(self, *args, **more):
        for step in real(self, *args, **more):
            self.vector[3] = float("nan")
            yield step

    monkeypatch.setattr(finetune.Learner, "train", broken)
    history = finished(config(tmp_path, 1, max_generations=1, population_size=2))
    child = history["1/m1"]
    assert child.metrics["diverged"] is True
    assert child.digests["model.safetensors"] == history["0/init-0"].digests["model.safetensors"]


def test_a_model_without_a_template_gets_that_of_the_others(tmp_path):
    """Whoever is asked first: all are asked in the same words."""
    c = config(tmp_path, 2, fitness=({"task": "facts"},), task_path=(str(searching.task(tmp_path / "tasks")),))
    settings = tmp_path / "model0" / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({key: value for key, value in known.items() if key != "chat_template"}))
    history = finished(c)
    assert "no chat template" in history["0/init-0"].metrics["notes"]
    assert (history.files("0/init-0").path("chat_template.jinja")).read_text().strip() == posttraining.TEMPLATE
    again = c.model_copy(update={"project_name": "again"})
    assert worker(again).run() == "over"
    assert digest(history) == digest(opened(tmp_path / "again"))


def test_no_prompt_has_todays_date(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}" + posttraining.TEMPLATE
    tokenizer = posttraining.tokenizer_of(posttraining.model(tmp_path / "model", 1, template))
    c = config(tmp_path, 1, fitness=({"task": "facts"},), task_path=(str(searching.task(tmp_path / "tasks")),))
    evaluation = TaskEvaluation(posttrain_fitness.asked(c), tokenizer, posttrain_fitness.load_tasks(c))
    said = evaluation.tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert said.startswith("01 January")


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(200_000.0, 50_000.0), (0.0009, 0.000225), (4.0, 1.0)])
def test_the_size_of_all_weights_does_not_matter(tmp_path, weights):
    sources = tuple({"source": str(chats(tmp_path / f"{n}.jsonl", "x")), "weight": w} for n, w in enumerate(weights))
    c = config(tmp_path, 1, mutation_datasets=sources, mutation_strength=0.001)
    genome = posttraining_genome.mutated(c, posttraining_genome.unmutated(c), np.random.default_rng(1))
    assert [*posttraining_genome.mixture(c, genome).values()] == pytest.approx([0.8, 0.2], abs=0.01)


def test_rows_are_shared_out_to_the_last_one():
    for count in (1, 4, 15, 21, 60):
        found = posttraining_genome.portions({str(n): 1 / 40 for n in range(40)}, count)
        assert sum(found.values()) == count and max(found.values()) - min(found.values()) <= 1
    assert posttraining_genome.portions({"a": 0.55, "b": 0.45}, 10) == {"a": 6, "b": 4}


def test_what_counts_something_is_no_curve(tmp_path):
    c = config(tmp_path, crossover={"method": "karcher", "max_iter": 10, "tol": 1e-5}, crossover_evolves=True)
    bent = posttraining_genome.mutated(c, posttraining_genome.unmutated(c), np.random.default_rng(1))["crossover"]
    assert bent["max_iter"] == 10 and bent["tol"] != 1e-5


def test_marks_of_the_same_questions_are_added_before_their_error_is_known(tmp_path):
    objectives = ({"task": "facts"}, {"task": "facts", "metric": "acc_norm,none"}, {"task": "loss", "weight": 2.0})
    c = config(tmp_path, fitness=objectives)
    marks, losses = [0.0, 1.0, 1.0, 1.0], [1.0, 2.0, 4.0]
    wanted = np.var([2 * x for x in marks], ddof=1) / 4 + np.var([2 * x for x in losses], ddof=1) / 3
    single = {"facts": marks, "facts:acc_norm,none": marks, "loss": losses}
    assert posttrain_fitness.standard_error(c, single) == pytest.approx(wanted**0.5)
    assert posttrain_fitness.standard_error(c, {**single, "facts": []}) is None, "not known, instead of 0"


def test_an_objective_in_which_all_are_equal_makes_nobody_lonely():
    lonely = crowding([Rival(str(n), 1.0, {"same": 1.0, "other": float(n)}) for n in range(4)])
    assert lonely == {"0": np.inf, "1": pytest.approx(2 / 3), "2": pytest.approx(2 / 3), "3": np.inf}


@pytest.mark.parametrize("count", [2, 5, 6, 7])
def test_in_any_population_everybody_is_a_parent_twice(count):
    ids = [str(n) for n in range(count)]
    found = [each for k in range(count) for each in matched(ids, k, np.random.default_rng(3))]
    assert sorted(found) == sorted(ids * 2)


# -- data -------------------------------------------------------------------------------------------------------------


def test_rows_come_from_anywhere_in_a_file(tmp_path, monkeypatch):
    chats(tmp_path / "first.jsonl", "cat", 3000)
    chats(tmp_path / "then.jsonl", "dog", 3000)
    both = tmp_path / "both.jsonl"
    both.write_text((tmp_path / "first.jsonl").read_text() + (tmp_path / "then.jsonl").read_text())
    c = config(tmp_path, 1, mutation_datasets=({"source": str(both)},))
    there = example_rows.drawn(c.mutation_datasets[0], text_sources.read(str(both)), example_rows.wanted(c), c.seed)
    answers = [row["messages"][1]["content"] for _, row in there]
    assert len(answers) == example_rows.wanted(c) < 3000 and 0.4 < answers.count("cat") / len(answers) < 0.6
    assert 0.4 < answers[:200].count("cat") / 200 < 0.6


def test_a_row_that_cannot_be_used_is_named_by_its_line_wherever_it_is_drawn(tmp_path):
    file = chats(tmp_path / "rows.jsonl", "cat", 30)
    lines = file.read_text().splitlines()
    lines[20] = json.dumps({"messages": [{"role": "assistant", "content": "cat"}]})
    file.write_text("\n".join(lines))
    c = config(tmp_path, 1, mutation_datasets=({"source": str(file)},))
    tokenizer = posttraining.tokenizer_of(tmp_path / "model0")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 21: an answer is expected after a question"):
        example_rows.made_rows(c, c.mutation_datasets[0], tokenizer)


def test_the_same_row_is_never_on_both_sides(tmp_path):
    """Neither in one file that has it twice, nor in two data sets."""
    one, two = chats(tmp_path / "one.jsonl", "cat", 300), tmp_path / "two.jsonl"
    lines = one.read_text().splitlines()
    two.write_text(
        "\n".join([*lines[150:], *lines[150:], *chats(tmp_path / "x.jsonl", "dog").read_text().splitlines()])
    )
    c = config(tmp_path, 1, mutation_datasets=({"source": str(one)}, {"source": str(two)}), max_generations=1)
    history = finished(c)
    learned, held = set[bytes](), set[bytes]()
    for n in (0, 1):
        rows = ExampleRows.open(history.files(f"0/data-{n}").path("rows"))
        learned |= {bytes(rows.get(k)[0].tokens) for k in rows.parts["train"]}
        held |= {bytes(rows.get(k)[0].tokens) for part in HELD_OUT for k in rows.parts[part]}
    assert held and not learned & held


# -- refused before anything is made ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "said"), [
    ({"crossover": {"method": "nope"}}, "CROSSOVER: there is no method 'nope'; there are linear"),
    ({"adapter": {"r": 4, "targets": ["nosuch"]}}, "adapter: no linear layer has 'nosuch' in its name"),
    ({"seq_length": 8}, "rows with something to learn (60 were left out"),
])  # fmt: skip
def test_what_can_never_work_is_known_at_once(tmp_path, keys, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        finished(config(tmp_path, 2, **keys))


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
def test_rows_are_not_longer_than_a_table_of_positions(tmp_path, kind):
    """Elsewhere they may be, unless a model is to answer itself."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    has = AutoConfig.for_model(kind, max_position_embeddings=64, **shape)
    check_positions(config(tmp_path, 1, seq_length=64), "it", has)
    with contextlib.nullcontext() if kind == "llama" else pytest.raises(UserError, match="65, but it has 64 positions"):
        check_positions(config(tmp_path, 1, seq_length=65), "it", has)
    with pytest.raises(UserError, match="65, but it has 64 positions"):
        check_positions(posttraining.rl_config(tmp_path, 1, seq_length=65), "it", has)


@pytest.mark.parametrize(("keys", "said"), [
    ({"fitness": ({"task": "loss"}, {"task": "loss"})}, "FITNESS has loss twice"),
    ({"fitness": ({"task": "loss", "weight": -1.0},)}, "loss counts as less is better already"),
    ({"fitness": ({"task": "facts", "weight": 0.0},)}, "FITNESS: all weights are 0"),
    ({"quorum": 0.5}, "QUORUM is below 1"),
    ({"mutation_datasets": ({"source": "x.jsonl", "split": "test"},)}, "it has no name and no split"),
])  # fmt: skip
def test_settings_that_mean_nothing_are_refused(tmp_path, keys, said):
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **keys)


def test_examples_in_prompts_are_no_questions_of_the_end(tmp_path):
    c = config(
        tmp_path, fitness=({"task": "facts"},), task_path=(str(searching.task(tmp_path / "tasks")),), num_fewshot=2
    )
    with pytest.raises(ValueError, match="no examples besides its questions"):
        prepare(c, tmp_path)


def test_other_questions_are_not_asked_in_the_middle_of_a_run(tmp_path):
    folder = searching.task(tmp_path / "tasks")
    c = config(tmp_path, fitness=({"task": "facts"},), task_path=(str(folder),), max_generations=1)
    worker(c)
    (file,) = folder.glob("*.json")
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match="TASKS_DIGEST"):
        worker(c)


def test_a_base_model_beside_the_configuration_is_found_and_padded(tmp_path):
    base = posttraining.model(tmp_path / "base", 9, vocab_size=320)
    c = config(tmp_path, crossover={"method": "dare_ties", "base_model": base.name, "density": 0.5})
    assert finished(c).first_open > 3


# -- afterwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fitness", "best"), [
    ({"m1": 0.75, "look-m0": 0.60}, "2/m1"), ({"m1": 0.55, "look-m0": 0.60}, "2/m0"), ({}, "2/m0"),
])  # fmt: skip
def test_the_best_so_far_is_the_best_at_the_same_questions(tmp_path, monkeypatch, capsys, fitness, best):
    """The elite was better when it was made, at others."""
    c = config(tmp_path)
    elite = Member("2/m0", "1/m2", Recipe("m2", "child"), {"fitness": 0.80}, {})
    recipes = {"m1": Recipe("m1", "child"), "look-m0": Recipe("look-m0", "look", ("2/m0",))}
    made = [Member(f"2/{slot}", f"2/{slot}", recipes[slot], {"fitness": each}, {}) for slot, each in fitness.items()]
    store = SimpleNamespace(read=lambda name: {"config": c.bound()})
    history = SimpleNamespace(first_open=3, round=lambda round: [elite, *made], store=store)
    monkeypatch.setattr(posttrain_results, "opened", lambda folder: history)
    monkeypatch.setattr(posttrain_results, "exported", lambda history, id, out: out)
    taken(tmp_path, "best", tmp_path / "out")
    assert f"Exported ({best})" in capsys.readouterr().out


def test_a_card_says_where_a_member_comes_from(tmp_path, capsys):
    history = finished(config(tmp_path, max_generations=2))
    best = history[f"{history.first_open - 1}/winner"].recipe.parents[0]
    said = (exported(history, best, tmp_path / "out") / "README.md").read_text()
    assert "model0" in said and "sft for" in said and "slerp of " in said and "base_model" not in said
    assert not (tmp_path / "out" / "mergekit_config.yml").exists()
    taken(tmp_path / "run", "2-m1", tmp_path / "other")
    assert "(2/m1)" in capsys.readouterr().out and (tmp_path / "other" / "model.safetensors").is_file()
    with pytest.raises(ValueError, match="as in 3-m0"):
        taken(tmp_path / "run", "2-look-m0", tmp_path / "other")

"""Populations that learn from rewards: whole runs, the same bytes however many workers, bad input."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edt_evomerge import EvoMerge
from fleet import following, lm_eval_command
from fleet.digest import digest
from fleet.history import opened
from fleet.metrics import points as fleet_points
from fleet.recipe import Member, check, round_and_slot
from fleet.report.page import page
from fleet.report.run_reader import RunReader
from fleet.run_config import UserError
from tests.helpers import ROOT
from tests.posttraining import finished, questions, rl_config, worker
from train.member import posttraining_genome
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import Objective
from train.posttrain_results import BreedView, asked_of
from train.rl import answering, reward_curves, rollouts
from train.rl.question_rows import few_held_out
from train.rl.rollouts import FILE
from train.training_commands import prepare_breeding


def rollouts_of(history, id):
    return rollouts.unpacked(history.files(id).read(FILE))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A whole run of one worker; tests only look at it."""
    return finished(rl_config(tmp_path_factory.mktemp("ran"), grpo={"staleness": 2, "kl": 0.1}))


def test_one_worker_or_two_a_run_has_the_same_bytes_rollouts_included(ran):
    c = PosttrainConfig.joined(ran.store.read("run.json")["config"], {"base_dir": str(ran.store.root.parent)})
    again = c.model_copy(update={"project_name": "again"})
    one, two = worker(again, "one"), worker(again, "two")
    assert one.run() == "over" and two.run() == "over"
    there = opened(ran.store.root.parent / "again")
    assert digest(ran) == digest(there)
    assert ran["2/r1"].digests[FILE] == there["2/r1"].digests[FILE]


def test_a_child_learns_from_its_own_answers_and_from_others(ran):
    child, own = ran["2/m1"], rollouts_of(ran, "2/r1")
    assert len(own.groups) == 6 and {len(each.answers) for each in own.groups} == {4}
    assert own.temperature == child.recipe.genome["temperature"]
    assert child.recipe.args["own_rollouts_id"] == "2/r1" and child.recipe.args["others_rollouts_ids"]
    assert child.metrics["generated"] == own.tokens and child.metrics["steps"] > 0
    assert child.digests["model.safetensors"] != ran[child.recipe.parents[0]].digests["model.safetensors"]


def test_what_answers_were_worth_is_told(ran):
    point = reward_curves.points(ran, 2)[0].values
    assert point["reward"] == pytest.approx(np.mean([ran[f"2/r{k}"].metrics["reward"] for k in (1, 2, 3)]))
    assert "reward/a.jsonl/correct" in point and point["generated/second"] > 0
    assert point["fitness/best"] == fleet_points.points(ran, 2)[0].values["fitness/best"]
    line = reward_curves.line(ran, 2)
    assert re.search(r"answers: brief .*, correct 0\.\d+, format .*, \d+% of the groups tell nothing, \d", line)
    assert json.loads(ran["2/r1"].metrics["samples"])["best"][0]["question"]
    shown = page(RunReader(ran.store.root).look())
    assert "a.jsonl/correct</bdi>" in shown and "Answers of the last round" in shown


def test_a_page_says_whose_score_it_is_and_what_the_steps_minimize(ran):
    facts = RunReader(ran.store.root).look()
    said, (value, best) = page(facts), facts.best or (0.0, "")
    assert "What the steps minimize: by rewards" in said and "averaged model" not in said
    plan = {f"{round}/{each.slot}": each for round in range(1, ran.made + 1) for each in ran.plan(round)}
    round, slot = round_and_slot(best)
    there = f"{round}/look-{slot}" if plan[best].carried else best
    assert plan[best].role in ("member", "kept") and value == ran[there].metrics["score"]


def test_rounds_that_only_evaluate_are_not_counted(ran, capsys):
    most = ran.store.read("run.json")["config"]["max_generations"]
    assert (ran.made, ran.first_open) == (most, most + 2)
    following.say_result(ran, ran.store.root, BreedView)
    assert f"The run is over after {most} rounds." in capsys.readouterr().out


def test_one_member_that_goes_on_by_itself_is_plain_grpo(tmp_path):
    alone = {"population_size": 1, "elitism": 0, "max_generations": 2}
    history = finished(c := rl_config(tmp_path, models=1, selection="pbt", **alone))
    assert history["2/m0"].recipe.parents == ("1/m0",)
    assert history["2/m0"].recipe.genome == posttraining_genome.unmutated(c)
    assert history["2/m0"].digests["model.safetensors"] != history["1/m0"].digests["model.safetensors"]
    with pytest.raises(ValueError, match="POPULATION_SIZE is 1, and SELECTION rank: with pbt one member goes on"):
        rl_config(tmp_path, models=1, **alone)


def test_few_questions_to_be_judged_by_are_told_of(tmp_path):
    c = rl_config(tmp_path)
    why = "of its 60 questions about 3 decide who is fit, and about 3 are the test: so few say little"
    assert few_held_out(c, c.mutation_datasets[0]) == f"environment a.jsonl: {why}"
    questions(tmp_path / "a.jsonl", "a", count=1000)
    assert few_held_out(c, c.mutation_datasets[0]) == ""
    (tmp_path / "a.jsonl").write_text('{"prompt": "the cat", "answer": "a"}\n' * 10)
    with pytest.raises(UserError, match=r"a\.jsonl: too few are different \(1\) to hold some out"):
        worker(c)


@pytest.mark.parametrize(
    ("asked", "said"), [(4, ""), (40, "70 rows .*asked mostly the same"), (200, "150 .*asked all")]
)
def test_where_generations_are_hardly_asked_anything_new_it_is_said(tmp_path, capsys, asked, said):
    prepare_breeding(rl_config(tmp_path, questions=asked), tmp_path)
    found = re.findall(r"at most \d+ rows of a data set are for validation, and QUESTIONS.*", capsys.readouterr().out)
    assert bool(found) == bool(said) and re.search(said, "".join(found))


def test_genes_of_rewards_are_inherited_and_judge_nobody(tmp_path, ran):
    c = rl_config(tmp_path, grpo={"rewards": {"correct": 1.0, "format": 0.5, "brief": 0.0}})
    plain = posttraining_genome.unmutated(c)
    changed = posttraining_genome.mutated(c, plain, np.random.default_rng(1))
    assert changed["temperature"] != 1.0 and changed["rewards"]["format"] != 0.5 and changed["rewards"]["brief"] == 0.0
    child = posttraining_genome.child(
        c.model_copy(update={"mutation_probability": 0.0}), [plain, changed], np.random.default_rng(2)
    )
    assert {*child["rewards"].values()} <= {*plain["rewards"].values(), *changed["rewards"].values()}
    for k in (1, 2, 3):
        found = ran[f"3/m{k}"].metrics
        assert found["fitness"] == json.loads(found["objectives"])["reward"], "the checker's mean, whatever genes weigh"
        assert 0 <= found["fitness"] <= 1 and found["error"] >= 0


KILLED = """
import os, signal, sys
from tests.posttraining import worker
from train.posttrain.posttrain_config import PosttrainConfig
from train.rl import answering

answers, batches = answering.answers, 0

def until_the_third(*given):
    global batches
    batches += 1
    if batches == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    print("asked:", len(given[2]), flush=True)
    return answers(*given)

answering.answers = until_the_third
worker(PosttrainConfig.model_validate_json(sys.argv[1])).run()
"""


@pytest.mark.slow
def test_a_killed_worker_costs_a_batch_of_rollouts(tmp_path, monkeypatch):
    """Who goes on gives all answers but those of finished batches; the bytes are as if nothing had been."""
    c = rl_config(tmp_path, 1, batch_size=1, max_generations=1, population_size=2)
    command = [sys.executable, "-c", KILLED, c.model_dump_json()]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = [int(line.split()[1]) for line in killed.stdout.splitlines() if line.startswith("asked:")]
    given, answers = list[int](), answering.answers

    def counted(*asked):
        given.append(len(asked[3]) if asked[4].temperature else 0)
        return answers(*asked)

    monkeypatch.setattr(answering, "answers", counted)
    history = finished(c)
    assert len(kept) == 2 and sum(kept) + sum(given) == 24
    assert not [*(tmp_path / "run" / "files").glob("*/snapshot*")]
    assert digest(history) == digest(finished(c.model_copy(update={"project_name": "again"})))


# -- who learns from whom ----------------------------------------------------------------------------------------------


class Planned:
    """A past of plans, in which members are as fit as somebody says."""

    def __init__(self, c, fitness=lambda id: 0.0):
        self.plans, self.strategy, self.fitness = [], EvoMerge(c), fitness
        for round in range(c.max_generations + 1):
            self.plans.append(self.strategy.plan(round, self))

    def plan(self, round):
        return self.plans[round]

    def __getitem__(self, id):
        round, slot = round_and_slot(id)
        recipe = next(each for each in self.plans[round] if each.slot == slot)
        value = self.fitness(f"{round}/{slot.removeprefix('look-')}")
        return Member(id, id, recipe, {"fitness": value, "objectives": json.dumps({"reward": value})}, {})

    def origin(self, id):
        round, slot = round_and_slot(id)
        recipe = next(each for each in self.plans[round] if each.slot == slot)
        return self.origin(recipe.parents[0]) if recipe.carried else id


@pytest.mark.parametrize("staleness", [1, 3])
def test_others_rollouts_are_carried_as_long_as_they_may_be_old(tmp_path, staleness):
    keys = {"max_generations": 5, "elitism": 0, "selection": "matching", "grpo": {"staleness": staleness}}
    past = Planned(rl_config(tmp_path, **keys))
    for round, recipes in enumerate(past.plans):
        check(round, recipes)
    plan = {recipe.slot: recipe for recipe in past.plan(4)}
    wanted = {f"{4 - age}/r{k}" for age in range(1, staleness + 1) for k in (0, 2, 3)}
    found = {past.origin(id) for id in plan["m1"].args["others_rollouts_ids"]}
    assert found == wanted - {"1/r0"}, "who was given has answered nothing in the first generation"
    assert not set(plan["m1"].args["others_rollouts_ids"]) - set(plan["m1"].needs)


def test_nothing_is_shared_or_carried_unless_asked_for(tmp_path):
    past = Planned(rl_config(tmp_path, grpo={"share": 0.0, "staleness": 3}))
    for recipe in past.plan(3):
        assert not recipe.args.get("others_rollouts_ids") and not (recipe.carried and recipe.slot[0] == "r")


def test_answers_are_planned_before_who_learns_from_them(tmp_path):
    recipes = Planned(rl_config(tmp_path)).plan(1)
    by = {recipe.slot: recipe for recipe in recipes}
    assert [*by].index("r2") < [*by].index("m2") and "r0" not in by, "who is only given learns nothing"
    assert by["r2"].genome == by["m2"].genome and by["r2"].parents == by["m2"].parents


def test_population_based_training_copies_the_best_over_the_worst(tmp_path):
    c = rl_config(tmp_path, selection="pbt", elitism=0, population_size=5, max_generations=3)
    past = Planned(c, lambda id: (sum(map(ord, id)) * 37 % 101) / 100)
    for round in (2, 3):
        order = sorted(range(5), key=lambda k: -past.fitness(f"{round - 1}/m{k}"))
        plan = {recipe.slot: recipe for recipe in past.plan(round)}
        before = {recipe.slot: recipe for recipe in past.plan(round - 1)}
        for k in range(5):
            parent, child = order[0] if k == order[-1] else k, plan[f"m{k}"]
            assert child.parents == (f"{round - 1}/m{parent}",)
            genome = before[f"m{parent}"].genome or posttraining_genome.unmutated(c)
            assert (child.genome != genome) == (k == order[-1])
    with pytest.raises(ValueError, match="it must be 0"):
        rl_config(tmp_path, selection="pbt", elitism=1)


# -- settings ----------------------------------------------------------------------------------------------------------

OTHER = [
    {"grpo": {"answers": 5}}, {"grpo": {"max_tokens": 4}}, {"grpo": {"temperature": 0.6}}, {"grpo": {"clip_low": 1e-4}},
    {"grpo": {"clip_high": 1e-4}}, {"grpo": {"by_spread": False}}, {"grpo": {"kl": 5.0}}, {"grpo": {"share": 0.2}},
    {"grpo": {"rewards": {"correct": 1.0, "brief": 1.0}}}, {"grpo": {"truncation": 1.0}}, {"sft_epochs": 2.0},
]  # fmt: skip


@pytest.mark.slow
def test_settings_reach_the_weights(tmp_path):
    def children(name: str, **keys) -> list[str]:
        grpo = {"share": 1.0, "kl": 0.1, **keys.pop("grpo", {})}
        more = {"lr": 3e-2, "batch_size": 1, "warmup_steps": 0, "max_generations": 2, "mutation_probability": 1.0}
        history = finished(rl_config(tmp_path / name, 1, population_size=3, grpo=grpo, **{**more, **keys}))
        return [history[f"2/m{k}"].digests["model.safetensors"] for k in (1, 2)]

    plain = children("plain")
    assert children("again") == plain
    for n, keys in enumerate(OTHER):
        assert children(f"other{n}", **keys) != plain, keys


def test_where_no_answer_is_better_than_another_it_is_said_and_nothing_changes(tmp_path):
    data = ({"source": str(questions(tmp_path / "never.jsonl", "qqqqqqq"))},)
    keys = {"mutation_datasets": data, "max_generations": 1, "population_size": 2}
    history = finished(rl_config(tmp_path, 1, grpo={"rewards": {"correct": 1.0}}, **keys))
    assert "the same reward, so there was nothing to learn" in reward_curves.line(history, 1)
    child = history["1/m1"]
    assert child.metrics["steps"] == 0 and child.metrics["silent"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("keys", [
    {"adapter": {"r": 4, "alpha": 8}}, {"selection": "pbt", "elitism": 0},
    {"selection": "matching", "elitism": 0}, {"dtype": "bfloat16"},
    {"fitness": ("reward", {"task": "reward", "metric": "brief", "weight": 0.5}), "selection": "pareto"},
])  # fmt: skip
def test_every_way_gets_to_its_end(tmp_path, keys):
    history = finished(rl_config(tmp_path, max_generations=2, **keys))
    last = history.first_open - 1
    assert history[f"{last}/winner"].metrics["fitness"] >= 0


def test_lm_eval_is_named_for_what_it_can_ask(tmp_path):
    """Whoever was chosen by rewards has no task of lm-eval; by tasks, those."""
    c = rl_config(tmp_path)
    assert lm_eval_command.hint(tmp_path, asked_of(c)) == lm_eval_command.section(tmp_path, asked_of(c)) == ""
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    more = {"fitness": (Objective(task="mine"), Objective(task="ours")), "task_path": ("/my tasks",), "num_fewshot": 2}
    said = lm_eval_command.hint(tmp_path, asked_of(c.model_copy(update=more)))
    assert said.endswith(" --tasks mine,ours --include_path '/my tasks' --num_fewshot 2 --apply_chat_template")


def test_a_verifier_of_ones_own_gives_the_terms(tmp_path):
    body = "def reward(prompt, answer, row):\n    return {'correct': row['tests'] in answer, 'wide': len(answer) > 9}\n"
    (tmp_path / "mine.py").write_text(body)
    fitness = ({"task": "reward", "metric": "wide"},)
    grpo = {"verifier": "mine.py", "allow_verifier": True}
    c = rl_config(tmp_path, 1, max_generations=1, population_size=2, grpo=grpo, fitness=fitness)
    for file in (tmp_path / "a.jsonl", tmp_path / "o.jsonl"):
        file.write_text(file.read_text().replace('"answer"', '"tests": "a", "answer"'))
    history = finished(c)
    assert {"correct", "wide"} == {*rollouts_of(history, "1/r1").groups[0].terms[0]}
    assert c.of_grpo.rewards == {"correct": 1.0}
    (tmp_path / "mine.py").write_text(body + "\n")
    with pytest.raises(ValueError, match="VERIFIER_DIGEST"):
        worker(c)


@pytest.mark.parametrize(("body", "why"), [
    ("raise ValueError('no idea')", "ValueError: no idea"),
    ("return {'right': float('nan')}", "its term 'right' is nan, not from 0 to 1"),
    ("seen.append(answer); time.sleep(60 * (len(seen) > 3)); return {'right': 1}", "no answer within 0.5 seconds"),
])  # fmt: skip
def test_a_verifier_that_breaks_ends_the_run_with_one_line(tmp_path, body, why):
    file = f"import time\n\nseen = []\n\n\ndef reward(prompt, answer, row):\n    {body}\n"
    (tmp_path / "mine.py").write_text(file)
    grpo = {"verifier": "mine.py", "allow_verifier": True, "rewards": {"right": 1.0}, "verifier_seconds": 0.5}
    c = rl_config(tmp_path, 1, max_generations=1, population_size=2, grpo=grpo)
    with pytest.raises(Exception, match=f"mine.py: {why}.*; the answer was") as told:
        worker(c).run()
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(("keys", "said"), [
    ({"grpo": {"max_tokens": 47}}, "it does not fit into SEQ_LENGTH 48"),
    ({"grpo": {"max_tokens": 48}}, "max_tokens is 48; with a question it must fit into SEQ_LENGTH, 48"),
    ({"seq_length": 500}, "SEQ_LENGTH is 500, but"),
    ({"grpo": {"verifier": "mine.py"}}, '"allow_verifier": true lets it run'),
    ({"grpo": {"verifier": "mine.py", "allow_verifier": True}}, "cannot be read"),
    ({"grpo": {"rewards": {"tidy": 1.0}}}, "no term is called 'tidy'; there are correct, format, brief"),
    ({"grpo": {"rewards": {"correct": 0.0}}}, "one is above 0"),
    ({"fitness": ("loss",)}, "FITNESS asks for the loss"),
    ({"mutation": "none"}, "FITNESS asks for the reward"),
    ({"mutation_datasets": ("gym:leg_counting",), "mutation": "sft", "grpo": None, "fitness": ("loss",)},
     "from which only MUTATION grpo learns"),
])  # fmt: skip
def test_what_can_never_work_is_known_at_once(tmp_path, keys, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        worker(rl_config(tmp_path, **keys))


def test_a_model_without_an_end_or_a_template(tmp_path):
    """Without a template, a question that is a text stands there as it is; messages need one."""
    c = rl_config(tmp_path, 1, max_generations=1, population_size=2)
    settings = tmp_path / "model0" / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({key: value for key, value in known.items() if key != "chat_template"}))
    ends = tmp_path / "model0" / "generation_config.json"
    ends.write_text(json.dumps({"eos_token_id": [*range(300)]}))
    (first, *_) = rollouts_of(finished(c), "1/r1").groups
    assert first.prompt and all(each.ended and len(each.tokens) == 1 for each in first.answers), "a child's are these"
    ends.unlink()
    asked = {"prompt": [{"role": "user", "content": "x"}], "answer": "y"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(asked) + "\n" for _ in range(20)))
    with pytest.raises(UserError, match="no chat template for messages"):
        worker(c.model_copy(update={"project_name": "again"}))
    known = {key: value for key, value in known.items() if key not in ("chat_template", "eos_token")}
    settings.write_text(json.dumps(known))
    shape = json.loads((tmp_path / "model0" / "config.json").read_text())
    (tmp_path / "model0" / "config.json").write_text(json.dumps({**shape, "eos_token_id": None}))
    with pytest.raises(UserError, match="no end token"):
        worker(rl_config_of(c))


def rl_config_of(c):
    """Its questions are texts again."""
    questions(Path(c.base_dir) / "a.jsonl", "a")
    return c.model_copy(update={"project_name": "third"})

"""Fitness from fewer questions than there are: by a race, or by item response theory; in every search."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from evomerge import tournament_results
from evomerge.config import Configuration, EvaluationSettings, ModelReference, TaskSettings
from fleet.digest import digest
from fleet.history import History, opened
from fleet.run_config import UserError
from tests import posttraining, searching, tournaments
from train.few_questions import FewQuestions, Items, calibrated, pool
from train.fitness_from import Interview
from train.lm_eval_tasks import Marks
from train.posttrain.posttrain_config import PosttrainConfig
from train.question_marks import Answers

TASKS = (TaskSettings(name="one"), TaskSettings(name="other", weight=-2))
EVERYTHING = {"one": [*range(0, 80, 2)], "other": [*range(64)]}


class Model:
    """Right where the number of a question says so."""

    def __init__(self, right: Mapping[str, Sequence[int]]) -> None:
        self.right, self.asked = right, list[tuple[str, int]]()

    def __call__(self, questions: Mapping[str, Sequence[int]]) -> Marks:
        assert all(questions.values()), "a task of no questions would be asked all of them"
        self.asked += [(name, n) for name, some in questions.items() for n in some]
        single = {name: {"acc,none": [n in self.right[name] for n in some]} for name, some in questions.items()}
        return Marks({}, single)


def asked(how: Interview, model: Model, ahead: float = 0.0) -> dict:
    found = how.of(TASKS, Answers(TASKS, model), EVERYTHING, 5, ahead)
    assert len({*model.asked}) == len(model.asked) == found["asked"], "nothing is asked twice"
    return dict(found)


def knowing(one: int, other: int) -> Model:
    """The first so many questions of each."""
    return Model({"one": EVERYTHING["one"][:one], "other": EVERYTHING["other"][:other]})


def test_a_race_goes_on_with_what_was_answered():
    best = asked(Interview(), knowing(40, 0))
    assert best["asked"] == 104 and best["score"] == 1 and not best["given_up"]
    near = asked(Interview(rival=best), knowing(39, 0))
    assert near["asked"] == 104 and near["score"] == 39 / 40
    poor = asked(Interview(rival=best), knowing(20, 32))
    assert poor["given_up"] and poor["asked"] < 60 and -1.4 < poor["score"] < 0.4
    saved = asked(Interview(rival=best), knowing(20, 32), ahead=2.0)
    assert saved["asked"] == 104 and saved["score"] == 0.5 - 2 * 0.5


def test_few_questions_are_others_in_each_generation_and_the_rest_comes_once():
    items = Items(TASKS, EVERYTHING)
    whole = [asked(Interview(), knowing(one, other)) for one in (5, 15, 30, 38) for other in (4, 20, 50)]
    calibration = calibrated(items, [json.loads(each["single"]) for each in whole], 20)
    assert calibration == calibrated(items, [json.loads(each["single"]) for each in whole], 20)
    draws = [FewQuestions.of(items, calibration, 5, draw) for draw in (2, 3)]
    assert draws[0].chosen != draws[1].chosen and draws[0].chosen == FewQuestions.of(items, calibration, 5, 2).chosen
    for few in draws:
        found = asked(Interview(few=few), knowing(24, 30))
        assert found["asked"] == 20 and abs(found["score"] - (24 / 40 - 2 * 30 / 64)) < 2.5 * found["standard_error"]
        assert 0.05 < found["standard_error"] < 0.6
        rest = asked(Interview(earlier=found), knowing(24, 30))
        assert rest["asked"] == 84 and rest["score"] == pytest.approx(24 / 40 - 2 * 30 / 64)
    assert calibrated(items, [json.loads(each["single"]) for each in whole], 0)["few"] == 18, "a sixth"


def test_of_many_questions_a_part_is_asked():
    everything = {"one": [*range(0, 1024, 2)], "other": [*range(512)]}
    some = pool(everything, 5)
    assert {name: len(questions) for name, questions in some.items()} == {"one": 192, "other": 192}
    assert all({*some[name]} < {*everything[name]} for name in some)
    assert some == pool(everything, 5) != pool(everything, 6) and pool(EVERYTHING, 5) == EVERYTHING


def test_two_metrics_of_one_question_are_asked_for_together():
    both = (TaskSettings(name="one"), TaskSettings(name="one", metric="acc_norm,none", weight=0.5))
    items = Items(both, {"one": [3, 4, 5]})
    assert [*items.questions] == [0, 1, 2, 0, 1, 2] and items.weights.sum() == pytest.approx(1.5)
    model = Answers(
        both, lambda some: Marks({}, {"one": {"acc,none": [1] * len(some["one"]), "acc_norm,none": [0] * 3}})
    )
    assert model.to({"one": [3, 4, 5]}) == {"one": [1.0] * 3, "one:acc_norm,none": [0.0] * 3} and model.count == 3


def test_marks_that_are_no_shares_are_refused():
    items = Items(TASKS[:1], {"one": [0, 1]})
    with pytest.raises(UserError, match="marks between 0 and 1 are expected"):
        calibrated(items, [{"one": [0.5, 3.0]}] * 3, 0)


# -- tournaments -------------------------------------------------------------------------------------------------------


def tournament(facts: Path, out: Path, **how) -> Configuration:
    e = EvaluationSettings(tasks=[TaskSettings(name="facts")], task_path=[str(facts / "tasks")], text_weight=0, **how)
    models = [ModelReference(f"part{n}", facts / f"part{n}") for n in range(3)]
    made = Configuration(models=models, out=str(out), evaluation_settings=e)
    made.merge_settings.base_model = ModelReference("base", facts / "base")
    made.evolution_settings.num_generations = 3
    return made


def test_merged_models_answer_few_questions_and_finalists_all(facts, tmp_path):
    c = tournament(facts, tmp_path / "run", fitness_from="irt", fitness_questions=12)
    assert tournaments.worker(c).run() == "over"
    found = tournament_results.found_in(tmp_path / "run")
    count = {each.metrics["asked"] for each in found.models}.pop()
    assert {each.metrics["asked"] for each in found.generations[0]} == {count}
    later = {each.id: each for each in found.generations[2] if each.id.startswith(("2/", "3/"))}.values()
    assert later and {each.metrics["asked"] for each in later} == {12}
    assert found.finalists and {each.metrics["asked"] for each in found.finalists} == {count - 12}
    assert "standard_error" not in found.best.metrics and found.best.formula == found.tested[0].formula
    assert any(
        "standard_error" in each for each in json.loads((tmp_path / "run/history.json").read_text())["models"].values()
    )


def test_merged_models_race_the_best_one_before_them(facts, tmp_path):
    c = tournament(facts, tmp_path / "run", fitness_from="racing")
    assert tournaments.worker(c).run() == "over"
    found = tournament_results.found_in(tmp_path / "run")
    whole = found.models[0].metrics["asked"]
    given_up = [each for each in found.all if each.metrics.get("given_up")]
    assert given_up and all(each.metrics["asked"] < whole and each.score < found.best.score for each in given_up)
    assert not found.best.metrics["given_up"] and not found.finalists


def test_niches_and_attraction_look_at_single_questions(facts, tmp_path):
    """Of three models that each know a third, whoever was merged is more than a copy."""
    c = tournament(facts, tmp_path / "run")
    c.evolution_settings.selection, c.evolution_settings.mates = "niches", "attraction"
    assert tournaments.worker(c).run() == "over"
    found = tournament_results.found_in(tmp_path / "run")
    for each in found.all:
        solved = each.listed("solved")["facts"]
        assert sum(solved) / len(solved) == pytest.approx(each.objectives["facts"])
    assert found.best.score > max(each.score for each in found.models)
    c.evaluation_settings.fitness_from, c.out = "racing", str(tmp_path / "other")
    with pytest.raises(UserError, match="fitness_from racing: mates attraction compares all marks"):
        tournaments.worker(c)


@pytest.mark.slow
def test_a_tournament_of_few_questions_is_the_same_with_two_workers(facts, tmp_path):
    """And goes on as if nothing had been."""
    found = []
    for name, workers in (("one", 1), ("two", 2)):
        c = tournament(facts, tmp_path / name / "run", fitness_from="irt", fitness_questions=12)
        c.save(tmp_path / f"{name}.json")
        (tmp_path / name).mkdir()
        done = tournaments.cli("--config", tmp_path / f"{name}.json", "--run", "--workers", workers)
        assert done.returncode == 0, done.stderr
        assert re.search("all questions have been answered by [1-5] finalists?, best 0", done.stdout), done.stdout
        found.append(digest(opened(tmp_path / name / "run")))
    assert found[0] == found[1]


def test_fewer_questions_are_those_of_tasks():
    for keys in ({"fitness_from": "irt"}, {"tasks": "a", "fitness_questions": 9}):
        with pytest.raises(ValueError, match="fitness_from irt is about|it says how many questions irt asks"):
            EvaluationSettings(**keys)


# -- post-training -----------------------------------------------------------------------------------------------------


def bred(tmp_path: Path, **how) -> tuple[PosttrainConfig, History]:
    searching.task(tmp_path / "tasks")
    objectives = ({"task": "facts"}, {"task": "loss", "weight": 0.1})
    more = {"fitness": objectives, "task_path": (str(tmp_path / "tasks"),), "questions": 24, **how}
    c = posttraining.config(tmp_path, **more)
    return c, posttraining.finished(c)


def test_members_answer_few_questions_and_finalists_all(tmp_path):
    _, history = bred(tmp_path, fitness_from="irt", fitness_questions=8)
    assert history["2/questions"].metrics["respondents"] == 4
    for generation, count in ((1, 24), (2, 8), (3, 8)):
        answered = [each for each in history.round(generation) if "fitness" in each.metrics and each.recipe.task]
        answered = [each for each in answered if each.id == each.origin]
        assert answered and {each.metrics["asked"] for each in answered} == {count}
        assert all(each.metrics["error"] > 0 for each in answered)
    looks = [each for each in history.round(4) if each.recipe.role == "look"]
    assert {each.metrics["asked"] for each in looks} == {24 - 8} and all(
        "standard_error" not in each.metrics for each in looks
    )
    best = max(looks, key=lambda each: each.metrics["fitness"])
    assert history["5/winner"].recipe.parents == (best.id.replace("look-", ""),)


def test_children_race_the_fittest(tmp_path):
    _, history = bred(tmp_path, fitness_from="racing")
    plan = {recipe.slot: recipe for recipe in history.plan(2)}
    rival = history["2/look-m0"]
    for slot in ("m1", "m2", "m3"):
        child = history[f"2/{slot}"]
        assert plan[slot].args["rival"] == "2/look-m0" and "2/look-m0" in plan[slot].needs
        assert child.metrics["asked"] <= rival.metrics["asked"] == 24
        assert not child.metrics["given_up"] or child.metrics["fitness"] < rival.metrics["fitness"]


@pytest.mark.parametrize("keys, why", [
    ({"fitness_from": "irt"}, "FITNESS has none"),
    ({"fitness": ("a",), "fitness_questions": 9}, "FITNESS_QUESTIONS: it says how many questions irt asks"),
    ({"fitness": ("a",), "fitness_from": "racing", "selection": "niches"}, "to the same questions"),
    ({"fitness": ("a",), "fitness_from": "racing", "selection": "matching", "elitism": 0}, "whom the others race"),
])  # fmt: skip
def test_what_cannot_be_is_said(keys, why):
    with pytest.raises(ValueError, match=why):
        PosttrainConfig(initial_population=("a", "b"), mutation_datasets=("skill:one",), **keys)

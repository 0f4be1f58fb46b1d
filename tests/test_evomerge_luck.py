"""What must not make a difference to a tournament, and what must not come in or out of it: each was seen to."""

import json
import math
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from evomerge import formula, tournament_results, tournament_running
from evomerge.config import Configuration, ModelReference
from evomerge.evolutionary_tournament import EvolutionaryMerger
from evomerge.fitness_evaluator import alone
from evomerge.formula import Blend, Formula, Step
from evomerge.gguf_utils import export_gguf
from evomerge.model_builder import ModelBuilder
from evomerge.utils import EvoMergeException, evaluate_model, validate_merge_config
from fleet.history import opened
from merge.atomic_output import atomic_folder
from merge.tensor_files import UserError
from tests import merging
from tests.tournaments import WORDS, config, models, text, worker


def half(name: str, other: str, technique: str = "linear", **more) -> Formula:
    return Formula(blend=Blend(technique=technique, of=(name, other), shares=((1.0,), (1.0,)), **more))


def test_a_score_does_not_depend_on_what_was_looked_at_before(tmp_path):
    """Models of other contexts, of other dtypes, of other lengths take turns in a worker's memory."""
    there = models(tmp_path / "a", 2) + models(tmp_path / "b", 1, max_position_embeddings=32)
    half_precise = models(tmp_path / "c", 1, dtype=torch.bfloat16)[0]
    there = [*there[:2], ModelReference("short", there[2].path), ModelReference("halved", half_precise.path)]
    c = Configuration(models=there)
    c.evaluation_settings.text, c.evaluation_settings.passages = str(text(tmp_path / "text.jsonl")), 8
    where = {model.name: model.path for model in there}
    mixed = tuple(Step(model=("model0", "halved")[n % 2], layer=n, scale=0.7) for n in range(4))
    formulas = [Formula(blend=name) for name in where]
    formulas += [Formula(path=mixed), half("model0", "short"), Formula(path=mixed[:3])]
    by_itself = [alone(c, where).scored(one)["score"] for one in formulas]
    for order in (range(len(formulas)), reversed(range(len(formulas)))):
        evaluator = alone(c, where)
        for n in order:
            assert evaluator.scored(formulas[n])["score"] == by_itself[n], formulas[n]


def test_a_merge_does_not_depend_on_where_its_models_lie(tmp_path):
    there = models(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    one = half("model0", "model1", "dare", density=0.5)
    for place in ("here", "there"):
        where = {model.name: str(tmp_path / place / Path(model.path).name) for model in there}
        with ModelBuilder(where, "") as shop:
            shop.write(one, tmp_path / f"from {place}")
    first, second = (merging.weights(tmp_path / f"from {place}") for place in ("here", "there"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert "here/model0" in (tmp_path / "from here" / "mergekit_config.yml").read_text()


def test_a_gguf_does_not_depend_on_what_lies_beside_it(tmp_path):
    (model,) = models(tmp_path, 1)
    for place in ("alone", "beside"):
        (tmp_path / place).mkdir()
        export_gguf(model.path, tmp_path / place / "m.gguf", "F32")
    merging.tokenizer(tmp_path / "beside", "other words entirely", size=280)
    c = Configuration(models=create(tmp_path))
    c.evaluation_settings.text, c.evaluation_settings.passages = str(text(tmp_path / "text.jsonl")), 8
    scores = {evaluate_model(tmp_path / place / "m.gguf", c)["score"] for place in ("alone", "beside")}
    assert len(scores) == 1


def create(folder: Path) -> list[ModelReference]:
    return [ModelReference("a", folder / "a"), ModelReference("b", folder / "b")]


def test_a_folder_is_evaluated_as_it_is_now(tmp_path):
    c = config(tmp_path)
    merger = EvolutionaryMerger(c, tmp_path / "out")
    made = merger.merger.merge()
    before = merger.evaluate(made)
    model = merging.AutoModelForCausalLM.from_pretrained(made.path)
    with torch.no_grad():
        model.model.norm.weight.mul_(3)
    model.save_pretrained(made.path)
    after = EvolutionaryMerger(c, tmp_path / "out").evaluate(made)
    assert after != before and after == pytest.approx(evaluate_model(made, c)["score"])


def test_scores_that_are_no_numbers_win_nothing(tmp_path):
    merger = EvolutionaryMerger(Configuration(models=create(tmp_path)), tmp_path)
    there = [ModelReference(name, name) for name in "abc"]
    for scores in ([math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [1.0, 2.0, math.nan]):
        best = there[int(np.nanargmax(scores))]
        assert {merger.tournament_selection(there, scores).name for _ in range(10)} == {best.name}


def test_what_is_tested_is_what_is_written(tmp_path, monkeypatch):
    from evomerge.fitness_evaluator import FormulaEvaluator

    real = FormulaEvaluator.scored

    def rounded(self, one, on):
        found = real(self, one, on)
        return {**found, **({"score": round(found["score"], 1)} if "score" in found else {})}

    monkeypatch.setattr(FormulaEvaluator, "scored", rounded)  # as with tasks: many have the same score
    c = config(tmp_path, population_size=12, num_generations=1)
    assert worker(c).run() == "over"
    out = tournament_running.concluded(tmp_path / "run")
    found = tournament_results.found_in(tmp_path / "run")
    (id,) = opened(tmp_path / "run")["2/winner"].recipe.parents
    assert formula.read(out)[0] == found.tested[0].formula == next(e.formula for e in found.all if e.id == id)


def test_a_very_bad_model_does_not_spoil_the_end(tmp_path):
    c = config(tmp_path, num_generations=1)
    c.merge_settings.techniques = ("linear", "dfs")
    model = merging.AutoModelForCausalLM.from_pretrained(c.models[2].path)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
    model.save_pretrained(c.models[2].path)
    assert worker(c).run() == "over"
    assert (tournament_running.concluded(tmp_path / "run") / "config.json").is_file()


def test_two_starters_at_the_end_have_the_same_winner(tmp_path):
    c = config(tmp_path, num_generations=1)
    assert worker(c).run() == "over"
    found, begun = tournament_results.found_in(tmp_path / "run"), threading.Event()

    def other() -> None:
        with atomic_folder(tmp_path / "run" / "winner", 1, overwrite=False) as draft:
            begun.set()
            (draft / "config.json").write_text("{}")
            threading.Event().wait(0.5)

    one = threading.Thread(target=other)
    one.start()
    begun.wait(10)
    assert tournament_running.winner_in(tmp_path / "run", found) == tmp_path / "run" / "winner"
    one.join()
    assert (tmp_path / "run" / "winner" / "config.json").read_text() == "{}"  # the other one's, not written over


def test_a_winner_that_another_starter_has_made_meanwhile_is_taken(tmp_path, monkeypatch):
    from evomerge import model_builder

    c, real = config(tmp_path, num_generations=1), model_builder.merge
    assert worker(c).run() == "over"

    def late(recipe, out, **how):
        with atomic_folder(Path(out), 1, overwrite=False) as draft:
            (draft / "config.json").write_text("{}")
        return real(recipe, out, **how)

    monkeypatch.setattr(model_builder, "merge", late)
    found = tournament_results.found_in(tmp_path / "run")
    assert (tournament_running.winner_in(tmp_path / "run", found) / "config.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["../escaped", "/tmp/absolute", "org/model", "名" * 150, "..", "a\\b c"])
def test_a_models_name_leads_nowhere(tmp_path, name):
    c = config(tmp_path)
    made = EvolutionaryMerger(c, tmp_path / "out").merger.merge()
    mutant = EvolutionaryMerger(c, tmp_path / "out").mutate_model(ModelReference(name, made.path))
    assert Path(mutant.path).parent == tmp_path / "out"


def test_models_of_other_tokens_are_refused(tmp_path):
    there = models(tmp_path, 2)
    merging.tokenizer(Path(there[1].path), "quite other words stand here", size=290)
    with pytest.raises(EvoMergeException, match="model0 and model1 have different tokens"):
        validate_merge_config(Configuration(models=there))


def hostile(**more) -> str:
    return json.dumps({"formula": {"blend": "a"}, "models": {"a": "/a"}, "base": "", **more})


@pytest.mark.parametrize("record", [
    hostile(models={"a": "/a", "x\ny": "/b"}), hostile(models={"a": "/a", "b" * 300: "/b"}),
    hostile(formula={"blend": "a", "path": [{"layer": 0}] * 2000}),
    hostile(formula={"blend": {"technique": "linear", "of": ["a", "a"], "shares": [[1e308], [1e308]]}}),
    hostile(formula={"blend": {"technique": "linear", "of": ["a", "a"], "shares": [[1] * 300, [1] * 300]}}),
    hostile(formula={"blend": {"technique": "linear", "of": ["a"] * 200, "shares": [[1]] * 200}}),
])  # fmt: skip
def test_a_hostile_record_is_refused(tmp_path, record):
    (tmp_path / formula.FILE).write_text(record)
    with pytest.raises(UserError, match="evomerge.json"):
        formula.read(tmp_path)


def test_endless_brackets_are_no_text(tmp_path):
    c = config(tmp_path)
    Path(c.evaluation_settings.text).write_text("[" * 100_000)
    with pytest.raises(EvoMergeException, match="text.jsonl"):
        evaluate_model(c.models[0], c)


def test_a_passage_of_one_token_is_left_out(tmp_path):
    c = config(tmp_path)
    there = Path(c.evaluation_settings.text).read_text()
    before = evaluate_model(c.models[0], c)["score"]
    word = next(w for w in WORDS.split() if len(w) > 2)
    assert len(merging_tokens(c.models[0], word)) == 1
    Path(c.evaluation_settings.text).write_text(json.dumps({"text": word * 1}) + "\n" + there)
    assert evaluate_model(c.models[0], c)["score"] == pytest.approx(before, rel=0.2)


def merging_tokens(model: ModelReference, word: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model.path)(word)["input_ids"]


# -- figures ----------------------------------------------------------------------------------------------------------


def held_out(bits: list[float], sizes: list[int]) -> tournament_results.TournamentEntry:
    nats = [b * size * math.log(2) for b, size in zip(bits, sizes, strict=True)]
    metrics = {"each": json.dumps(nats), "sizes": json.dumps(sizes)}
    return tournament_results.TournamentEntry("1/x", "x", "", (), Formula(blend="x"), metrics)


def test_the_gain_is_that_of_the_score():
    """Short passages, in which the winner is worse, do not outweigh long ones."""
    sizes = [800] * 4 + [10] * 12
    winner, other = held_out([1.0] * 4 + [9.0] * 12, sizes), held_out([2.0] * 4 + [5.0] * 12, sizes)
    mean, half = tournament_results.ahead(winner, other)
    score = [sum(b * s for b, s in zip(bits, sizes, strict=True)) / sum(sizes)
             for bits in ([1.0] * 4 + [9.0] * 12, [2.0] * 4 + [5.0] * 12)]  # fmt: skip
    assert mean == pytest.approx(score[1] - score[0]) and mean > 0


@pytest.mark.parametrize("count", [8, 16, 96])
def test_intervals_hold_what_they_promise(count):
    rng, inside = np.random.default_rng(1), 0
    for _ in range(2000):
        sizes = [int(size) for size in rng.integers(200, 800, count)]
        mine, theirs = rng.normal(2, 0.3, count), rng.normal(2.1, 0.3, count)
        mean, half = tournament_results.ahead(held_out(list(mine), sizes), held_out(list(theirs), sizes))
        inside += abs(mean - 0.1) <= half
    assert 0.93 < inside / 2000 < 0.975


@pytest.mark.parametrize("count, exact", [(8, 2.364624), (16, 2.131450), (96, 1.985251)])
def test_certainty_is_students(count, exact):
    assert tournament_results.certain(count) == pytest.approx(exact, rel=1e-3)

"""What a tournament is told, and by what its models compete."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from evomerge import fitness_evaluator, tournament_results, tournament_running
from evomerge.config import (
    BITS,
    Configuration,
    EvaluationSettings,
    MergeSettings,
    ModelReference,
    TaskSettings,
    create_default_config,
    with_models,
)
from evomerge.utils import (
    MERGE_TECHNIQUES,
    evaluate_model,
    load_models,
)
from tests import searching
from tests.tournaments import config, models, text, worker
from train.passages import PassageReader, mean_and_error


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
            self.objectives, self.score = {BITS: bits, "acc": acc}, score

    e = EvaluationSettings(tasks=[TaskSettings(name="acc")])
    c = type("C", (), {"evaluation_settings": e})
    good, better, worse, same = Point(1.0, 0.5, 1), Point(2.0, 0.9, 2), Point(2.0, 0.5), Point(1.0, 0.5)
    assert tournament_results.pareto(c, [good, worse, better, same]) == [better, good]


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
    assert parts.keys() == {BITS, "facts"}
    assert found["score"] == pytest.approx(3 * parts["facts"] - parts[BITS])
    c.evaluation_settings.text_weight = 0.5
    assert evaluate_model(c.models[0], c)["score"] == pytest.approx(3 * parts["facts"] - 0.5 * parts[BITS])
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
    rows = [f"p{part} of {subject} is {a} {b}" for part, subject, a, b in searching.known_facts()]
    random.Random(3).shuffle(rows)
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return file

"""What is held out can be trusted: copies and turns lie on one side, neighbours on none, and what selects reports
nothing."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from evomerge import fitness_evaluator
from evomerge.config import EvaluationSettings
from fleet.run_config import UserError
from tests import posttraining, searching
from tests.small import config, finished
from train import lm_eval_tasks, text_sources
from train.batches import TokenFile
from train.learner import Learner
from train.lm_eval_tasks import TaskRequest
from train.member.pretraining_runtime import evaluated
from train.passages import Losses, mean_and_error
from train.posttrain.example_rows import ExampleRows
from train.pretraining_export import Exporter, samples, show
from train.splits import HELD_OUT, SPLITS, Split, part_of, part_of_chunk, parts_of
from train.training_config import Dataset

FORGETFUL = posttraining.TEMPLATE.replace(
    "<|{{ m.role }}|>{{ m.content }}</s>",
    "{% if m.role == 'user' or loop.last %}<|{{ m.role }}|>{{ m.content }}</s>{% endif %}",
)  # of what was answered before

# -- which side --------------------------------------------------------------------------------------------------------


def test_a_side_follows_from_what_is_said():
    split, texts = Split(0.2, 0.05), [f"text {n}" for n in range(10_000)]
    found = Counter(part_of(each, split) for each in texts)
    assert abs(found["test"] - 500) < 100 and abs(found["validation"] - 1500) < 150 and sum(found.values()) == 10_000
    assert all(part_of(f" {each.upper()}\n", split) == part_of(each, split) for each in texts[:500])
    assert parts_of("x", texts, split) == [part_of(each, split) for each in texts]
    assert parts_of("x", texts, split, "7") != parts_of("x", texts, split, "8")


@pytest.mark.parametrize("count", [3, 4, 7, 30])
def test_no_part_of_a_few_stays_empty(count):
    for n in range(50):
        texts = [f"{n} {k}" for k in range(count)] * 2
        found = parts_of("x", texts, Split(0.1, 0.05))
        assert {*found} == {*SPLITS} and found[:count] == found[count:]
    with pytest.raises(UserError, match=r"x: too few are different \(2\)"):
        parts_of("x", ["a", "b", "A "], Split(0.1, 0.05))
    halves = parts_of("x", [f"{k}" for k in range(count)], Split(1.0, 0.5), least=count // 2)
    assert abs(halves.count("test") - halves.count("validation")) <= 1 and "train" not in halves


@pytest.mark.parametrize("held_out", [0.01, 0.05, 0.3, 0.5, 0.9])
def test_chunks_are_held_out_evenly(held_out):
    found = [part_of_chunk(n, held_out) for n in range(1000)]
    assert abs(found.count("validation") - 500 * held_out) <= 1 and abs(found.count("test") - 500 * held_out) <= 1


# -- pre-training ------------------------------------------------------------------------------------------------------


def test_beside_held_out_text_nothing_is_learned(tmp_path):
    """Of one long document: between what is learned from and what is asked lies a gap, on both sides."""
    whole = "".join(f"line {n} of one long document\n" for n in range(40_000))
    (tmp_path / "a.txt").write_text(whole)
    found = [*text_sources.divided(Dataset(source=str(tmp_path / "a.txt")), 0.1)]
    assert {part for part, _ in found} == {*SPLITS}
    learned = [part == "train" for part, each in found for _ in range(whole.count(each))]
    assert len(learned) == len(found)  # each stands there once
    for part, each in found:
        if part != "train":
            begin = whole.index(each)
            beside = whole[begin - 1000 : begin], whole[begin + len(each) :][:1000]
            assert len(each) > 4096 and not any(gap in some for gap in beside for _, some in found if len(gap) == 1000)


def test_members_are_selected_on_text_that_reports_nothing(tmp_path, capsys):
    """What is exported is told on test text: the average by its own summary, another model when it is exported."""
    history = finished(tmp_path, selection="rank", average_every=1)
    exporter = Exporter(tmp_path / "run")
    windows = {part: {tuple(row) for each in exporter.token_files(part) for row in rows(each)} for part in SPLITS}
    assert not windows["validation"] & windows["test"] and not windows["train"] & windows["test"]
    assert {m.recipe.evaluated_on for m in history.round(2) if m.recipe.task == "child"} == {"validation"}
    average = exporter.export("average", tmp_path / "average")
    assert average == history["3/average"].metrics and history["3/average"].recipe.evaluated_on == "test"
    best = min((m for m in history.round(3) if m.recipe.role == "member"), key=lambda m: m.metrics["loss"])
    told = exporter.export("best", tmp_path / "best")
    learner = Learner(Exporter(tmp_path / "run").model, exporter.config)
    learner.load_weights(exporter.chosen("best")[1])
    wanted = evaluated(learner.eval_loss, exporter.token_files("test"), exporter.config, "test")["loss"]
    assert told["loss"] == pytest.approx(wanted, abs=1e-5) and told["loss"] != best.metrics["loss"]
    assert f"selected nobody: loss={told['loss']:.6g}" in (tmp_path / "best" / "README.md").read_text()
    show(exporter, "average", tmp_path / "shown")
    said, tokens = capsys.readouterr().out, exporter.config.test_sequences * exporter.config.seq_length
    assert f"On {tokens} tokens of test text, which selected nobody: loss={average['loss']:.6g}" in said
    assert f"The best member, {best.id}, on the same text: loss={told['loss']:.6g}" in said
    shown, plain = (load_file(tmp_path / out / "model.safetensors") for out in ("shown", "average"))
    assert all(torch.equal(shown[name], plain[name]) for name in plain)


def rows(source):
    return [source.get(n).tolist() for n in range(source.windows)]


def test_where_there_are_several_sources_the_loss_of_each_is_told(tmp_path, capsys):
    """And of all together it is their mean, by their shares of what is evaluated."""
    base = config().datasets[0]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps({"text": f"{n} fish"}) + "\n" for n in range(900)))
    other = Dataset(source=str(tmp_path / "other.jsonl"), weight=3.0)
    finished(tmp_path, datasets=(base, other), max_generations=1, max_epochs=100.0)
    exporter = Exporter(tmp_path / "run")
    tested = exporter.export("1-m0", tmp_path / "out")
    one, two = exporter.by_source()
    found = [float(each.rpartition(" ")[2]) for each in (one, two)]
    assert one.startswith(base.source) and two.startswith(other.source) and found[0] != found[1]
    assert (found[0] + 3 * found[1]) / 4 == pytest.approx(tested["loss"], abs=1e-4)
    show(exporter, "1-m0", tmp_path / "out")
    said = capsys.readouterr().out
    assert f"The exported model's loss by source: {one}, {two}\n" in said
    shown = said.partition("how the model goes on:\n")[2]
    assert all(f"{each.source}: " in shown for each in (base, other)) and shown.count("|") == 2
    assert all(map(str.strip, shown.splitlines())), "no line is empty"


def test_a_model_with_few_positions_gets_a_shorter_beginning(tmp_path):
    gpt2 = {"config": {"model_type": "gpt2", "n_positions": 6, "n_embd": 32, "n_layer": 1, "n_head": 2}}
    finished(tmp_path, initial_population=(gpt2,), seq_length=4, max_generations=1)
    (said,) = samples(Exporter(tmp_path / "run"))
    assert said.count("|") == 1


def test_diloco_is_told_on_test_text(tmp_path):
    history = finished(tmp_path, algorithm="diloco", max_generations=1)
    assert history["1/global"].recipe.evaluated_on == "test"
    exporter = Exporter(tmp_path / "run")
    assert exporter.export("average", tmp_path / "out") == history["1/global"].metrics and not exporter.by_source()


def test_a_run_of_older_code_is_exported_on_all_that_it_held_out(tmp_path, monkeypatch):
    finished(tmp_path, max_generations=1)
    exporter = Exporter(tmp_path / "run")
    known, window = exporter.parent, exporter.config.seq_length + 1
    older = {"validation": "held", "validation_bytes": "held_bytes"}

    def parent(id):
        found = known(id)
        metrics = {older.get(key, key): each for key, each in found.metrics.items() if not key.startswith("test")}
        return replace(found, member=replace(found.member, metrics=metrics)) if "/tokens" in id else found

    there = known("0/tokens-0")
    held = [TokenFile.open(there.path("validation"), there.metrics["dtype"], window)]
    monkeypatch.setattr(exporter, "parent", parent)
    monkeypatch.setattr(exporter, "token_files", {"held": held}.get)
    show(exporter, "1-m0", tmp_path / "out")
    said = (tmp_path / "out" / "README.md").read_text()
    assert "selected members, too (this run is of older code): loss=" in said and "their loss on held-out text" in said


def test_an_export_does_without_a_gpu_that_has_no_room(tmp_path, monkeypatch):
    finished(tmp_path, max_generations=1)
    wanted, exporter = Exporter(tmp_path / "run").export("1-m0", tmp_path / "out"), Exporter(tmp_path / "run")

    def to(device):
        if torch.device(device).type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(exporter.model, "to", to)
    monkeypatch.setattr("train.pretraining_export.best_device", lambda: torch.device("cuda"))
    assert exporter.export("1-m0", tmp_path / "other") == wanted
    monkeypatch.setattr("train.pretraining_export.language_loss", lambda model, windows: torch.tensor(math.nan))
    assert math.isnan(exporter.export("1-m0", tmp_path / "no-number")["loss"])
    assert "loss=nan" in (tmp_path / "no-number" / "README.md").read_text()


def test_a_source_that_is_not_evaluated_holds_nothing_out(tmp_path):
    """Not a token: also one all of whose documents are learned from will do."""
    words = next(f"fish {n} " * 2000 for n in range(99) if part_of(f"fish {n} " * 2000, Split.halved(0.05)) == "train")
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": words}) + "\n")
    base = config().datasets[0]
    more = Dataset(source=str(tmp_path / "one.jsonl"), weight=0.2, evaluated=False)
    history = finished(tmp_path, datasets=(base, more), max_generations=1, max_epochs=100.0)
    found = history["0/tokens-1"].metrics
    assert found["train"] > 1 and found["validation"] == found["test"] == 0
    assert math.isfinite(history["1/m0"].metrics["loss"])


# -- post-training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [posttraining.TEMPLATE, FORGETFUL])
def test_all_turns_of_a_conversation_lie_on_one_side(tmp_path, template):
    """Each with its history is a row, or a template makes rows of them; some are told twice, or by two data sets."""
    chats = []
    for n in range(150):
        turns = [("user", f"cat {n}"), ("assistant", f"dog {n}")] + [("user", "and"), ("assistant", "the")] * 2
        said = [{"role": role, "content": each} for role, each in turns]
        chats += [{"messages": said[:length]} for length in (2, 4, 6)]
    for name, some in {"one": chats, "two": [*chats[200:], *chats[300:]]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in some))
    sources = tuple({"source": str(tmp_path / f"{name}.jsonl")} for name in ("one", "two"))
    model = posttraining.model(tmp_path / "model", 1, template)
    keys = {"initial_population": (str(model),), "mutation_datasets": sources, "max_generations": 1}
    history = posttraining.finished(posttraining.config(tmp_path, 1, **keys))
    tokenizer, sides = posttraining.tokenizer_of(model), dict[str, set[str]]()
    for n in (0, 1):
        made = ExampleRows.open(history.files(f"0/data-{n}").path("rows"))
        assert all(made.parts.values())
        for part in SPLITS:
            for row in made.parts[part]:
                asked = tokenizer.decode(made.get(row)[0].tokens.tolist()).partition("</s>")[0]
                sides.setdefault(asked, set()).add(part)
    assert len(sides) == 150 and all(len(parts) == 1 for parts in sides.values())


# -- questions of tasks ------------------------------------------------------------------------------------------------


def test_questions_of_the_same_words_lie_on_one_side(tmp_path):
    """In a task that asks some twice, and in another task."""
    folder = searching.task(tmp_path / "tasks")
    lines = (folder / "facts.json").read_text().splitlines()
    other = [json.dumps({**json.loads(each), "id": n}) for n, each in enumerate([*lines[20:], *lines[20:]])]
    (folder / "twice.json").write_text("\n".join(other))
    (folder / "twice.yaml").write_text((folder / "facts.yaml").read_text().replace("facts", "twice"))
    asked = TaskRequest(("facts", "twice"), task_path=(str(folder),), seed=3)
    loaded = lm_eval_tasks.load(asked)
    found = lm_eval_tasks.parted(asked, loaded, 0.4)
    words = {
        on: {loaded["tasks"][name].doc_to_text(loaded["tasks"][name].eval_docs[n]) for name in some for n in some[name]}
        for on, some in found.items()
    }
    assert all(words.values()) and not words["validation"] & words["test"]
    assert sum(len(some["twice"]) for some in found.values()) == len(other)


# -- evomerge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [1, 40])
def test_what_tests_does_not_lie_beside_what_validates(tmp_path, documents):
    """Of another document, or of another passage group of a long one, and between the two is a gap."""
    size = 4000 // documents
    books = ["".join(f"line {n} of document {k}\n" for n in range(size)) for k in range(documents)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in books))
    e = EvaluationSettings(text=str(tmp_path / "t.jsonl"), passages=40)
    found, whole = fitness_evaluator.texts(e), "\0".join(books)
    places = {on: [(whole.index(each), len(each)) for each in found[on].texts] for on in HELD_OUT}
    assert all(places.values()) and len(found["test"].texts) == len(found["validation"].texts)
    for begin, length in places["validation"]:
        for other, its in places["test"]:
            between = whole[begin + length : other] if begin < other else whole[other + its : begin]
            assert "\0" in between or len(between) > 400


def test_errors_count_passage_groups_and_not_the_passages_in_them():
    """Where neighbours say the same, four of them say no more than one."""
    rng, inside, alone = np.random.default_rng(1), 0, 0
    for _ in range(1000):
        nats = np.repeat(rng.normal(200.0, 20.0, 16), 4)
        losses = Losses(tuple(nats), (100,) * 64, (400,) * 64)
        mean, error = mean_and_error(losses.together([n // 4 for n in range(64)]))
        inside += abs(mean - 2.0) <= 2.13 * error
        alone += abs(mean - 2.0) <= 2.0 * mean_and_error(losses)[1]
    assert 0.92 < inside / 1000 < 0.98 and alone / 1000 < 0.8

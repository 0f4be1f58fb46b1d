"""Where models and text may come from: files of every kind, a folder of a dataset, a trained model, an accelerator."""

import json
from itertools import islice

import pytest
import torch
from transformers import AutoTokenizer

from fleet.run_config import UserError
from tests.small import config, finished, shared
from train import source_names, text_sources
from train.member.pretraining_round_zero import own_tokenizer, tokens_of
from train.pretraining_export import Exporter
from train.splits import SPLITS
from train.training_config import Dataset

DOCUMENTS = ["one fish\n", "two fish\nred fish\n", "blue fish\n"]


def source(path, **more) -> Dataset:
    return Dataset(source=str(path), **more)


def test_text_jsonl_and_parquet_give_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.txt").write_text("\n\n".join(DOCUMENTS))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": each}) for each in DOCUMENTS))
    pyarrow.parquet.write_table(pyarrow.table({"body": DOCUMENTS}), tmp_path / "a.parquet")
    assert [*text_sources.documents(source(tmp_path / "a.txt", separator="\n\n"))] == [
        *("\n\n".join(DOCUMENTS).split("\n\n"))
    ]
    for kind in ("jsonl", "parquet"):
        assert [*text_sources.documents(source(tmp_path / f"a.{kind}", text_field="body"))] == DOCUMENTS
        with pytest.raises(UserError, match="no text in the field 'text'; it has: body"):
            text_sources.check(source(tmp_path / f"a.{kind}"))


def test_before_the_hub_is_asked_names_are_looked_at(tmp_path, capsys):
    for name in ("wikitext-2", "evolution.json"):
        (tmp_path / name).touch()
    source_names.check(["stdlib", "fake", "gone.jsonl", "gone.txt", str(tmp_path)], tmp_path)
    assert not capsys.readouterr().out
    source_names.check(["HuggingFaceFW/fineweb-edu"], tmp_path)
    assert "no file of that name is here, so the hub is asked for it.\n" in capsys.readouterr().out
    source_names.check(["wikitext"], tmp_path)
    assert "so the hub is asked for it (or is wikitext-2 meant?)" in capsys.readouterr().out
    for name, why in (
        ("evolution.jsn", "is evolution.json meant"),
        ("/gone/text", "no such file"),
        ("stdlb", "stdlib"),
    ):
        with pytest.raises(UserError, match=why):
            source_names.check([name], tmp_path)


def test_a_plain_file_is_one_document(tmp_path):
    """Given in chunks that end at lines, so that some can be held out; only a separator makes documents of it."""
    whole = "".join(f"{'word ' * (n % 30)}\n\n" for n in range(20_000)) + "x" * 10_000
    (tmp_path / "a.txt").write_text(whole)
    found = [*text_sources.documents(source(tmp_path / "a.txt"))]
    assert "".join(found) == whole and max(map(len, found)) <= 8193
    assert all(each.endswith("\n") for each in found if "x" not in each) and len(found) < 2 * len(whole) / 8192
    got, ends, wanted = dict.fromkeys(SPLITS, 0), [], {"train": 9000, "validation": 250, "test": 250}
    for separator in ("", "\n\n"):
        c = config(datasets=({"source": str(tmp_path / "a.txt"), "separator": separator},), tokenizer="")
        tokenizer = own_tokenizer(c)
        tokens = tokens_of(c, 0, lambda tokenizer=tokenizer: tokenizer, 300, wanted, dict(got))
        ends.append(sum(part.count(tokenizer.eos_token_id) for _, _, part in islice(tokens, 50)))
    assert ends[0] == 0 < ends[1]


def test_a_tokenizer_is_made_of_what_the_run_learns_from(tmp_path):
    """Of each source by its weight; words of the own text become one token, and Python's do not."""
    (tmp_path / "a.jsonl").write_text('{"text": "Donaudampfschifffahrt und Rhabarberkuchen"}\n' * 300)
    c = config(datasets=(str(tmp_path / "a.jsonl"),), tokenizer="", vocab_size=400)
    assert len(own_tokenizer(c).tokenize(" Rhabarberkuchen")) == 1 < len(own_tokenizer(c).tokenize(" self"))
    both = c.model_copy(update={"datasets": (*c.datasets, Dataset(source="stdlib", weight=99.0))})
    assert len(own_tokenizer(both).tokenize(" self")) == 1
    random = c.model_copy(update={"datasets": (Dataset(source="fake"),)})
    assert len(own_tokenizer(random).tokenize(" self")) == 1


@pytest.mark.parametrize("streaming", [True, False])
def test_a_dataset_as_the_hub_has_them(tmp_path, monkeypatch, streaming):
    """Its own loader, on a folder: no network is needed for that."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "fishes"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in DOCUMENTS))
    assert [*text_sources.documents(source(folder, streaming=streaming))] == DOCUMENTS


@pytest.mark.parametrize("data, why", [("{", "gone|Expecting|line"), ("", "no documents"), ("[1]", "no text in")])
def test_a_damaged_file_is_explained(tmp_path, data, why):
    (tmp_path / "a.jsonl").write_text(data)
    with pytest.raises(UserError, match=why):
        text_sources.check(source(tmp_path / "a.jsonl"))


def test_the_built_in_text_is_real_and_always_the_same():
    documents = [*text_sources.stdlib()]
    assert sum(map(len, documents)) > 5_000_000 and documents == [*text_sources.stdlib()]
    assert any("class Thread" in each for each in documents)
    assert text_sources.stdlib_digest() == text_sources.stdlib_digest()
    shuffled = [*text_sources.shuffled_stdlib()]
    assert {*shuffled} < {*documents} and sum(map(len, shuffled)) > 5_000_000 and shuffled[:9] != documents[:9]


def test_a_run_can_begin_with_the_models_of_another(tmp_path):
    """Two trained models, with the tokenizer that stands beside them; each slot begins at its own."""
    first = finished(tmp_path / "first")
    exporter = Exporter(first.store.root)
    exporter.export("3-m1", tmp_path / "3-m1")
    exporter.export("best", tmp_path / "best")
    models = (str(tmp_path / "3-m1"), str(tmp_path / "best"))
    second = finished(tmp_path / "second", initial_population=models, tokenizer="")
    begun = Exporter(second.store.root)
    assert torch.equal(begun.chosen("0-init-0")[1], exporter.chosen("3-m1")[1])
    assert torch.equal(begun.chosen("0-init-1")[1], exporter.chosen("best")[1])
    assert second["1/m1"].recipe.parents == ("0/init-1",)


def test_two_sources_and_their_shares(tmp_path):
    """The genome's shares of the sources are inherited and mutate."""
    both = ({"source": str(shared() / "text.jsonl"), "weight": 3.0}, {"source": "fake"})
    history = finished(tmp_path, datasets=both, mutation_probability=1.0)
    shares = {member.metrics["genome_share_1"] for member in history.round(3) if member.id.startswith("3/m")}
    assert len(shares) == 4 and history["0/tokens-0"].metrics["train"] > history["0/tokens-1"].metrics["train"]


def test_a_source_that_is_not_evaluated_is_learned_from_and_does_not_count(tmp_path):
    """Random tokens cost more than any text; evaluated with them, the same model is the worse."""
    text = {"source": str(shared() / "text.jsonl"), "weight": 3.0}
    losses = {}
    for evaluated in (True, False):
        history = finished(tmp_path / str(evaluated), datasets=(text, {"source": "fake", "evaluated": evaluated}))
        found = history["0/tokens-1"].metrics
        assert bool(found["validation"]) == bool(found["test"]) == evaluated and found["train"] > 1
        losses[evaluated] = history["3/m0"].metrics["loss"]
    assert losses[False] < losses[True]


@pytest.mark.parametrize("documents, most", [(2000, 64), (40, 2000)])
def test_held_out_tokens_come_from_many_documents_where_there_are_many(tmp_path, documents, most):
    """Of one long document, a loss would say how it is about that one."""
    rows = [json.dumps({"text": f"{n} " + "fish " * 400}) + "\n" for n in range(documents)]
    (tmp_path / "long.jsonl").write_text("".join(rows))
    c = config(datasets=(source(tmp_path / "long.jsonl"),), test_sequences=64, held_out=0.2)
    tokenizer, got, found = AutoTokenizer.from_pretrained(shared() / "tokenizer"), dict.fromkeys(SPLITS, 0), []
    wanted = {"train": 100, "validation": 0, "test": 64 * 16 + 1}
    for _, part, tokens in tokens_of(c, 0, lambda: tokenizer, 257, wanted, got):
        got[part] += len(tokens)
        found += [len(tokens)] * (part == "test")
    assert got["test"] > 64 * 16 and max(found) <= most
    assert (len(found) > 16) == (documents == 2000)

"""Text becomes tokens while train_fsdp.py trains: in shards that are the same whoever makes them, and when."""

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.ranks import one
from tests.small import config, make_text, shared
from tests.test_fsdp import curve, digest, model, training
from train.cluster import token_shards
from train.cluster.options import TrainingOptions
from train.cluster.ranks import joined
from train.cluster.token_data import Batches
from train.cluster.token_shards import TokenShardMaker, TokenShards, cut
from train.member import pretraining_round_zero
from train.training_config import alone

WINDOWS = 8  # of a shard of 16 tokens each


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(token_shards, "_TOKENS", WINDOWS * 16)
    model(tmp_path / "model")
    return tmp_path


def some(folder: Path, text: Path | None = None, steps: int = 8) -> TokenShards:
    c = config(**alone(steps), population_size=1, batch_size=4, max_epochs=1e6,
               datasets=({"source": str(text or shared() / "text.jsonl")},))  # fmt: skip
    return TokenShards(c, folder / "data" / "name", 258)


def words() -> object:
    return AutoTokenizer.from_pretrained(shared() / "tokenizer")


def run(folder: Path, name: str, **keys) -> str:
    with joined() as ranks:
        return one(training(folder, name, **{"ckpt": {}, **keys}), ranks)


def test_stretches_are_the_text_and_the_same_from_wherever_it_goes_on(place):
    s, tokenizer = some(place), words()
    found = [*cut(s, tokenizer, 0, 0, 0)]
    assert [number for number, *_ in found] == [0, 1, 2, 3, 4][: len(found)] and len(found) >= 4
    assert all(len(tokens) == WINDOWS * 16 + 1 for _, tokens, _ in found[:-1])
    joined_up = np.concatenate([found[0][1], *(tokens[1:] for _, tokens, _ in found[1:])])
    (whole,) = (tokens for _, tokens, _ in cut(_in_one(s), tokenizer, 0, 0, 0))
    assert np.array_equal(joined_up, whole)
    for (_, _, begin), (number, *wanted) in zip(found, found[1:], strict=False):
        again, *_ = cut(s, tokenizer, number, *begin)
        assert again[0] == number and np.array_equal(again[1], wanted[0]) and again[2] == wanted[1]


def _in_one(s: TokenShards) -> TokenShards:
    one_piece = TokenShards(s.c, s.place, s.vocabulary)
    one_piece.__dict__["windows"] = token_shards._ENDLESS
    return one_piece


def test_they_are_made_a_few_ahead_and_removed_when_they_are_past(place, monkeypatch):
    monkeypatch.setattr(token_shards, "_BEHIND", 2)
    s = some(place, steps=24)
    maker = TokenShardMaker(s, words(), 1)
    most = 0
    for number in range(10):  # two before the end: what is ahead of that are the first ones, for another pass
        maker.wait(number)
        most = max(most, len([*s.place.glob("*.tokens")]))
        assert s.open(number)
    maker.close()
    assert most <= 2 + 1 + 2 and not s.open(0) and s.open(9)
    maker = TokenShardMaker(s, words(), 1)  # an older checkpoint is gone on from
    maker.wait(3)
    maker.close()
    tokens = [tokens for number, tokens, _ in cut(s, words(), 0, 0, 0) if number == 3]
    assert np.array_equal(s.open(3).values, tokens[0])
    shutil.rmtree(s.place)  # all records are lost
    maker = TokenShardMaker(s, words(), 1)
    maker.wait(9)
    maker.close()
    assert s.open(9) and not s.open(3) and len([*s.place.glob("*.tokens")]) <= 2 + 1 + 2


@pytest.mark.parametrize("lost", ["nothing", "tokens", "all"])
def test_stopped_and_resumed_it_sees_the_same(place, lost):
    assert run(place, "calm") == "0"
    assert run(place, "again", stop_at=3) == "130"
    for file in (place / "again" / "data").glob("*/*.tokens" if lost == "tokens" else "*/*"):
        if lost != "nothing":
            file.unlink()
    assert run(place, "again", ckpt={"resume": "true"}) == "0"
    assert curve(place / "again") == curve(place / "calm") and digest(place / "again") == digest(place / "calm")
    assert len([*(place / "calm" / "data").glob("*/*.tokens")]) >= 4


def test_a_text_that_is_too_short_is_seen_in_passes_each_of_them_whole(place):
    make_text(place / "short.jsonl", documents=5)
    s = some(place, place / "short.jsonl", steps=24)
    (shutil.rmtree(place / "data", ignore_errors=True))
    maker = TokenShardMaker(s, words(), 1)
    ranks = SimpleNamespace(rank=0, count=1, leads_here=True, first=False)
    ranks.same = lambda do: do()
    ranks.some = lambda mine, do: do() if mine else None
    ranks.from_first = lambda value: value
    seen = [row.numpy().tobytes() for parts in Batches(s.c, ranks, s, maker).of(0, 0, 24, 4) for row in parts[0]]
    maker.close()
    total = s.total()
    assert WINDOWS < total < 48 and len({*seen}) == total
    assert {*seen[:total]} == {*seen[total : 2 * total]} and seen[:total] != seen[total : 2 * total]


def test_random_tokens_need_no_text_no_words_and_leave_nothing(place):
    shutil.rmtree(place / "model")
    for _ in range(2):
        assert run(place, "fake", path_model="tiny", fake_data=True, max_steps=2, total_steps=88_000) == "0"
    assert sorted(file.name for file in (place / "fake").iterdir()) == [".lock", "metrics-id", "metrics.csv"]
    assert len(curve(place / "fake")) == 2


def test_a_text_that_turns_out_to_be_spoilt_costs_nothing_that_was_learned(place, monkeypatch):
    monkeypatch.setattr(pretraining_round_zero, "_BATCH", 4)
    rows = (shared() / "text.jsonl").read_text().splitlines()
    (place / "text.jsonl").write_text("\n".join([*rows[:6], '{"text": 3}', *rows]))
    text = {"dataset_name_or_path": str(place / "text.jsonl")}
    assert "text.jsonl, line 7: no text in the field 'text'" in run(place, "out", **text)
    (saved,) = (place / "out").glob("step-*")
    assert saved.name == "step-00000002"
    (place / "text.jsonl").write_text("\n".join(rows))
    assert "text was" in run(place, "out", **text, ckpt={"resume": "true"})


def test_the_learning_rate_rises_for_a_tenth_unless_it_is_set(place, capsys):
    assert TrainingOptions().warmup == 1000 and TrainingOptions(total_steps=50).warmup == 5
    assert not TrainingOptions(total_steps=50).doubts() and not TrainingOptions(warmup_steps=2000).doubts()
    assert TrainingOptions(total_steps=50).bound()["warmup_steps"] == 5
    assert run(place, "out", warmup_steps=6, max_steps=1) == "0"
    assert "Note: --warmup-steps 6 is more than a tenth of --total-steps 8" in capsys.readouterr().out
    with (place / "out" / "metrics.csv").open() as file:
        assert float(next(csv.DictReader(file))["lr"]) == pytest.approx(1e-2 / 6)


def test_the_model_says_how_it_is_evaluated(place, capsys):
    assert run(place, "out", max_steps=1) == "0"
    line, card = f"lm_eval --model hf --model_args pretrained={place}/out/model ", place / "out" / "model" / "README.md"
    assert line in capsys.readouterr().out and line in card.read_text() and "for 1 step." in card.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it is another one")
def test_the_precision_is_the_one_that_suits_the_device(place):
    assert [TrainingOptions().on(device).precision for device in ("cpu", "cuda")] == ["32-true", "bf16-mixed"]
    assert TrainingOptions(precision="bf16-mixed").on("cpu").precision == "bf16-mixed"
    assert run(place, "out", precision=None, max_steps=1) == "0"
    assert run(place, "out", max_steps=2, ckpt={"resume": "true"}) == "0"  # a checkpoint knows what it came to
    assert "precision was" in run(place, "out", precision="bf16-mixed", ckpt={"resume": "true"})


def test_a_record_that_is_spoilt_is_made_anew(place):
    s = some(place)
    maker = TokenShardMaker(s, words(), 1)
    maker.wait(0)
    maker.close()
    whole = (s.place / "000000.tokens").read_bytes()
    for name, spoilt in (
        ("000000.tokens", whole[:100]),
        ("000000.json", b"{"),
        ("000000.json", json.dumps([]).encode()),
    ):
        (s.place / name).write_bytes(spoilt)
        assert not s.open(0)
        maker = TokenShardMaker(s, words(), 1)
        maker.wait(0)
        maker.close()
        assert (s.place / "000000.tokens").read_bytes() == whole

"""Several examples in one row: none has an effect on another."""

import itertools
from itertools import chain

import numpy as np
import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from fleet.run_config import UserError
from tests.chat_rows import PACKABLE, SMALL, of, some_examples
from train import packing
from train.adapters import adapted
from train.chunked_loss import ModelForward
from train.objectives import (
    answer_logprobs,
    sft_loss,
)
from train.packing import attends_by_bounds, batch, bounded, can_pack, plan, widened


def by_itself(model, example):
    """Its log-probability and number of learned tokens, as anybody would compute them."""
    tokens = torch.tensor(example.tokens, dtype=torch.long)
    said = model(input_ids=tokens[None]).logits[0].double().log_softmax(-1)
    places = [n for n, learned in enumerate(example.learned) if learned]
    return sum(float(said[n - 1, tokens[n]]) for n in places), len(places)


def test_examples_stand_in_the_first_row_with_room():
    assert plan([5, 6, 3, 2, 4, 8], 8) == [(0, 2), (1, 3), (4,), (5,)]
    assert plan([5, 6, 3], 8, packed=False) == [(0,), (1,), (2,)]
    sizes = np.random.default_rng(1).integers(1, 100, 500).tolist()
    rows = plan(sizes, 100)
    assert sorted(chain(*rows)) == [*range(500)] and all(sum(sizes[n] for n in row) <= 100 for row in rows)
    assert sum(sizes) / (100 * len(rows)) > 0.9
    with pytest.raises(UserError, match="example 1 has 9 tokens, and a row 8"):
        plan([1, 9], 8)


@torch.no_grad()
def text_by_text(q, k, v, bounds, same, widest, most, *, scale, window_size, enable_gqa=False):
    """What flash attention of several texts says, by torch's attention of one."""
    assert same is bounds and most == widest and window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1])
    found = torch.full_like(q, torch.nan)
    for begin, end in itertools.pairwise(bounds.tolist()):
        one = (each[begin:end].transpose(0, 1)[None] for each in (q, k, v))
        said = scaled_dot_product_attention(*one, is_causal=True, scale=scale, enable_gqa=enable_gqa)
        found[begin:end] = said[0].transpose(0, 1)
    return found


@pytest.mark.parametrize("kind, keys", [("llama", {}), ("gpt2", {}), ("qwen2", {"num_key_value_heads": 1})])
def test_by_bounds_a_model_says_what_it_says_by_a_mask(monkeypatch, kind, keys):
    monkeypatch.setattr(varlen, "varlen_attn", text_by_text)
    model, given = of(kind, **keys), some_examples([7, 12, 9, 5, 3])
    rows = widened(batch(given, [(0, 1), (2, 3), (4,)]), 64, torch.device("cuda"))
    assert rows.tokens.shape == (3, 32)
    parts = bounded(rows)
    assert parts.bounds.tolist() == [0, 7, 19, 32, 41, 46, 64, 67, 96, 96, 96, 96, 96, 96, 96, 96, 96]
    forward = ModelForward(model, model, torch.device("cuda"))  # which looks at no positions
    found = [answer_logprobs(forward, each).tolist() for each in (rows, parts)]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_who_has_other_kernels_keeps_the_mask(monkeypatch):
    asked = []
    monkeypatch.setattr(packing, "_tried", lambda *given, **more: asked.append(given) or True)
    cuda, cpu, narrow = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    for keys, device, dtype in [({}, cpu, narrow), ({}, cuda, None), ({"sliding_window": 32}, cuda, narrow)]:
        assert not attends_by_bounds(ModelForward(of("mistral", **keys), None, device, dtype), 64)
    assert not asked
    assert attends_by_bounds(ModelForward(of("mistral", sliding_window=64), None, cuda, narrow), 64) and asked


@pytest.mark.parametrize("kind, keys", PACKABLE)
def test_a_packed_loss_is_that_of_single_examples(kind, keys):
    model, given = of(kind, **keys), some_examples([7, 12, 1 + 1, 9, 5, 14])
    assert can_pack(model, 20)
    alone = [by_itself(model, each) for each in given]
    for rows in (plan([len(each.tokens) for each in given], 20), [[n] for n in range(6)]):
        packed = any(len(row) > 1 for row in rows)
        made = batch(given, rows, packed)
        assert answer_logprobs(model, made).tolist() == pytest.approx([nats for nats, _ in alone], rel=1e-5)
        mean = -sum(nats for nats, _ in alone) / sum(count for _, count in alone)
        assert float(sft_loss(model, made)) == pytest.approx(mean, rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind, keys", PACKABLE)
def test_an_example_has_no_effect_on_another(kind, keys):
    model, given = of(kind, **keys), some_examples([7, 12, 9, 5])
    rows = [(0, 1), (2, 3)]
    changed = [given[0], *some_examples([12], seed=5), *given[2:]]
    before, after = (answer_logprobs(model, batch(each, rows)) for each in (given, changed))
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]]) and before[1] != after[1]


@torch.no_grad()
@pytest.mark.parametrize(
    "kind, keys",
    [
        ("mamba", {"hidden_size": 32}),
        ("bloom", {"hidden_size": 32, "n_head": 2}),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 1}),
    ],
)
def test_models_that_remember_or_count_otherwise_are_not_packed(kind, keys):
    model = of(kind, **keys).train()
    assert not can_pack(model, 24) and model.training
    given = some_examples([7, 12])
    model.eval()
    found = answer_logprobs(model, batch(given, [[0], [1]], packed=False))
    assert found.tolist() == pytest.approx([by_itself(model, each)[0] for each in given], rel=1e-5)


def test_a_small_leak_and_other_positions_are_noticed():
    """In bf16 a leak may be smaller than rounding is elsewhere."""
    leaking = of("lfm2", layer_types=["conv", "full_attention"], num_key_value_heads=1).bfloat16()
    assert not can_pack(leaking, 24) and can_pack(of("llama").bfloat16(), 24)
    counting = of("llama")

    def count(model, asked, said):
        said.logits += torch.arange(said.logits.shape[1])[:, None]

    counting.register_forward_hook(count)
    assert not can_pack(counting, 24)
    assert can_pack(adapted(of("llama"), SMALL, 1), 24)

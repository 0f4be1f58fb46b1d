"""LoRA: what learns, what it follows from, and that merged is the same as applied."""

import sys

import pytest
import torch

from fleet.run_config import UserError
from tests.chat_rows import SMALL, of, some_examples
from tests.small import config
from train.adapters import adapted, merged
from train.learner import Learner
from train.model import flat, layout_of
from train.objectives import (
    sft_loss,
)
from train.packing import batch


def trained(model, steps=10, **keys):
    """Its adapter, after it has learned."""
    given = config(weight_decay=0.0, inner_optimizer="adamw", clip=1.0)  # as members of post-training have it
    learner = Learner(adapted(model, {**SMALL, **keys}, 7), given, objective=sft_loss)
    step = [batch(some_examples([9, 12, 8]), [[0, 1], [2]])]
    [*learner.train([step] * steps, [1e-2] * steps)]
    return learner, step


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_only_the_adapter_learns(kind):
    model = of(kind, tie_word_embeddings=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner, step = trained(model, 30)
    after = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert after.keys() == before.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert learner.layout.shapes and all("lora_" in name for name in learner.layout.shapes)
    learner.model.eval()
    assert float(learner.loss(*step).detach()) < float(sft_loss(of(kind), *step).detach()) - 0.2


def test_an_adapter_follows_from_its_seed_and_begins_as_nothing():
    model, tokens = of("llama"), torch.arange(9)[None]
    made = [adapted(of("llama"), SMALL, seed) for seed in (1, 1, 2)]
    one, again, other = (flat(each, layout_of(each)) for each in made)
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(made[0](input_ids=tokens).logits, model(input_ids=tokens).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merged_is_the_same_as_applied(kind, dtype, close):
    model = of(kind, tie_word_embeddings=True).to(dtype)
    before, tokens = {name: p.clone() for name, p in model.named_parameters()}, torch.arange(30)[None]
    with torch.enable_grad():
        learner, _ = trained(model, 20)
    adapter = {name: p.double() for name, p in learner.model.named_parameters() if "lora_" in name}
    applied, plainly = learner.model.eval()(input_ids=tokens).logits, of(kind).to(dtype)(input_ids=tokens).logits
    found = merged(learner.model)
    said = found.eval()(input_ids=tokens).logits
    assert (said - applied).abs().max() <= close * applied.abs().max() < 0.2 * (said - plainly).abs().max()
    assert found.state_dict().keys() == of(kind, tie_word_embeddings=True).state_dict().keys()
    assert all(p.requires_grad and p.dtype == dtype for p in found.parameters()) and not hasattr(found, "peft_config")
    for name, p in found.named_parameters():
        exact, inside = before[name].double(), f"base_model.model.{name.removesuffix('.weight')}"
        if f"{inside}.lora_A.default.weight" not in adapter:
            assert torch.equal(p, before[name]) and not name.endswith("q_proj.weight"), name
            continue
        change = adapter[f"{inside}.lora_B.default.weight"] @ adapter[f"{inside}.lora_A.default.weight"] * 2
        exact = exact + (change.T if kind == "gpt2" else change)
        assert dtype == torch.float32 or (p == exact.to(dtype)).float().mean() > 0.999, "rounded once"
        assert torch.allclose(p.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)
    assert found.lm_head.weight is found.get_input_embeddings().weight


def test_an_adapter_is_put_into_another_copy():
    learner, step = trained(of("llama"))
    whole = merged(learner.model, of("llama"))
    assert float(sft_loss(whole, *step).detach()) == pytest.approx(float(learner.loss(*step).detach()), rel=1e-5)
    assert Learner(whole, config()).layout.size == layout_of(of("llama")).size


def test_rank_scale_and_targets_are_what_was_said():
    def named(**keys):
        return layout_of(adapted(of("llama"), {**SMALL, **keys}, 1)).shapes

    assert {shape[0] for name, shape in named(r=3).items() if "lora_A" in name} == {3}
    assert len(named()) == 2 * 2 * 7 and not any("lm_head" in name for name in named())
    few = named(targets=["q_proj", "mlp"])
    assert len(few) == 2 * 2 * 4 and all("q_proj" in name or "mlp" in name for name in few)
    one, two = (adapted(of("llama"), {**SMALL, "alpha": alpha}, 1) for alpha in (8, 16))
    for each in (one, two):
        for name, p in each.named_parameters():
            if "lora_B" in name:
                p.data.fill_(0.1)
    start = flat(of("llama"), layout_of(of("llama")))
    moved = [flat(m := merged(each), layout_of(m)) - start for each in (one, two)]
    assert torch.allclose(moved[0] * 2, moved[1], atol=1e-6) and moved[0].abs().max() > 0.01


@pytest.mark.parametrize(
    "keys, seen",
    [
        ({"targets": ["q_prj"]}, "no linear layer has 'q_prj' in its name; there are q_proj, k_proj"),
        ({"targets": ["lm_head"]}, "no linear layer has 'lm_head'"),
        ({"targets": "some"}, 'targets is "some"'),
        ({"rank": 3}, 'unknown key "rank"'),
        ({"r": 0}, "r is 0"),
        ({"four_bits": True}, "four_bits works on a CUDA device only, and this is cpu"),
    ],
)
def test_adapters_that_cannot_be(keys, seen):
    with pytest.raises(UserError, match=f"adapter: {seen}"):
        adapted(of("llama"), {**SMALL, **keys}, 1)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="pip install peft"):
        adapted(of("llama"), SMALL, 1)

"""Words that are compared a few rows at a time: the same numbers, in bounded memory, of models that can be asked so."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.chunked_loss import most_bytes
from benchmarks.chunked_loss import plain as plain_loss
from train import chunked_loss
from train.chunked_loss import IGNORE_INDEX, compared, head_of, mean_nll, summed, token_nll
from train.learner import Learner
from train.objectives import answer_logprobs, sft_loss
from train.packing import batch
from train.training_config import TrainConfig

SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def model(kind: str, **more: object) -> torch.nn.Module:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **more}), dtype=torch.float32)


@pytest.fixture
def few(monkeypatch):
    """Three rows of such a model at a time, however small a batch is."""
    monkeypatch.setattr(chunked_loss, "MOST", 0)
    monkeypatch.setattr(chunked_loss, "PART", 3 * SMALL["vocab_size"])


def given() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    hidden, weight = torch.randn(10, 16, dtype=torch.float64), torch.randn(61, 16, dtype=torch.float64)
    wanted = torch.randint(61, (10,))
    wanted[[2, 7]] = IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), wanted


def slopes(loss: Tensor, *learn: Tensor) -> list[Tensor]:
    return [*torch.autograd.grad(loss, learn)]


@pytest.mark.parametrize("z", [0.0, 0.3])
def test_a_sums_gradient_is_the_plain_one(few, z):
    hidden, weight, wanted = given()
    logits, there = hidden @ weight.T, wanted != IGNORE_INDEX
    plain = cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
    plain = plain + z * logits.logsumexp(-1)[there].square().sum()
    found = summed(hidden[there] if z else hidden, weight, wanted[there] if z else wanted, torch.float64, z)
    torch.testing.assert_close(found, plain, rtol=1e-13, atol=0)
    for mine, its in zip(slopes(0.7 * found, hidden, weight), slopes(0.7 * plain, hidden, weight), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-13)


def test_each_rows_gradient_is_the_plain_one(few):
    hidden, weight, wanted = given()
    plain = cross_entropy(hidden @ weight.T, wanted, ignore_index=IGNORE_INDEX, reduction="none")
    found, counts = compared(hidden, weight, wanted, torch.float64), torch.linspace(-2, 3, 10, dtype=torch.float64)
    torch.testing.assert_close(found, plain, rtol=1e-13, atol=0)
    its, mine = (slopes((counts * nats.tanh()).sum(), hidden, weight) for nats in (plain, found))
    for one, other in zip(mine, its, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_frozen_head_has_no_gradient(few):
    hidden, weight, wanted = given()
    for loss in (summed, lambda *asked: compared(*asked).sum()):
        (found,) = slopes(loss(hidden, weight.detach(), wanted, torch.float64), hidden)
        assert found.isfinite().all()


@pytest.mark.parametrize("learns", [True, False])
def test_memory_is_bounded_by_what_is_compared_at_once(monkeypatch, learns):
    monkeypatch.setattr(chunked_loss, "PART", 1 << 16)
    hidden, weight, wanted = torch.randn(512, 8), torch.randn(2048, 8), torch.randint(2048, (512,))
    asked = (hidden.requires_grad_(), weight.requires_grad_(learns), wanted)
    kept = sum(each.nbytes for each in asked)
    for loss in (summed, lambda *asked: compared(*asked).mean()):
        most = most_bytes(lambda *asked, loss=loss: loss(*asked, torch.float32), asked)
        assert most < 3 * 4 * (1 << 16) + 2 * kept + (1 << 15)
    assert most_bytes(plain_loss, asked) > 2 * 4 * 512 * 2048


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_learner_takes_the_same_step(few, monkeypatch, kind, precision):
    found = []
    for most in (1 << 28, 0):
        monkeypatch.setattr(chunked_loss, "MOST", most)
        shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        learner = Learner(
            model(kind, **(shape if kind == "gpt2" else {})), TrainConfig(z_loss=1e-2, precision=precision)
        )
        windows = torch.randint(61, (3, 9), generator=torch.Generator().manual_seed(3))
        learner.begin(0.0)
        loss = learner.loss(windows)
        loss.backward()
        found.append((loss.detach(), learner.gradient.clone(), learner.eval_loss(windows)))
        assert (learner.model in chunked_loss._KNOWN) == (most == 0)
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "32-true" else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(*found, **close)


@pytest.mark.parametrize("strategy", ["NO_SHARD", "FULL_SHARD"])
def test_ranks_that_share_a_model_take_the_same_steps(few, monkeypatch, strategy):
    from train.cluster.ranks import joined
    from train.cluster.shared_learner import learner_of

    found, rng = [], torch.Generator().manual_seed(3)
    windows = [torch.randint(61, (2, 9), generator=rng) for _ in range(4)]
    for most in (1 << 28, 0):
        monkeypatch.setattr(chunked_loss, "MOST", most)
        with joined() as ranks:
            learner = learner_of(model("llama"), TrainConfig(gradient_accumulation=2), ranks, strategy)
            steps = [*learner.train([windows[:2], windows[2:]], [1e-2, 1e-2])]
            found.append((learner.eval_loss(windows[0]), learner.vector.clone(), learner.summed_loss()))
            assert steps == [1, 2] and bool(chunked_loss._KNOWN.get(learner.model)) == (most == 0)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def asked_in_parts(each: torch.nn.Module) -> bool:
    windows = torch.arange(12).view(2, 6)
    whole = cross_entropy(each(input_ids=windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
    found = mean_nll(each, windows[:, 1:], 0.0, input_ids=windows[:, :-1], use_cache=False)
    torch.testing.assert_close(found, whole)
    return "_Summed" in str(found.grad_fn.next_functions)


@pytest.mark.parametrize(
    ("kind", "more", "parts"),
    [
        ("llama", {}, True),
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 30.0}, False),
        ("granite", {"logits_scaling": 3.0}, False),
        ("cohere", {"logit_scale": 0.3}, False),
        ("phi", {}, False),  # its head has a bias
        ("mixtral", {"num_local_experts": 2}, True),
    ],
)
def test_what_a_model_does_to_its_logits_is_found_out(few, kind, more, parts):
    assert asked_in_parts(model(kind, **more).eval()) == parts


def test_an_adapter_on_the_head_is_asked_whole(few):
    from peft import LoraConfig, get_peft_model

    beside = get_peft_model(model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    assert asked_in_parts(beside.eval())
    on_it = get_peft_model(model("llama"), LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    assert head_of(on_it) is None and not asked_in_parts(on_it.eval())


def test_another_head_is_asked_whole(few):
    each = model("llama").eval()
    assert asked_in_parts(each)
    each.resize_token_embeddings(67)
    assert not asked_in_parts(each)


def test_rows_of_several_examples(few, monkeypatch):
    from tests.chat_rows import some_examples

    made, each = batch(some_examples((7, 5, 6)), [[0, 1], [2]]), model("llama", vocab_size=257).eval()
    found = [answer_logprobs(each, made), sft_loss(each, made)]
    monkeypatch.setattr(chunked_loss, "MOST", 1 << 28)
    torch.testing.assert_close(found, [answer_logprobs(each, made), sft_loss(each, made)])


def test_small_batches_are_asked_whole():
    each, windows = model("llama").eval(), torch.arange(12).view(2, 6)
    logits = each(input_ids=windows[:, :-1], use_cache=False).logits.float().flatten(0, 1)
    asked = {"input_ids": windows[:, :-1], "use_cache": False}
    assert torch.equal(mean_nll(each, windows[:, 1:], 0.0, **asked), cross_entropy(logits, windows[:, 1:].flatten()))
    same = cross_entropy(logits, windows[:, 1:].flatten(), reduction="none")
    assert torch.equal(token_nll(each, windows[:, 1:], **asked), same) and each not in chunked_loss._KNOWN

"""What only a GPU can tell: that it does the same each time, as near to a CPU as its numbers are wide, and that nobody
waits for it."""

import copy

import pytest
import torch

from fleet.digest import digest
from tests import posttraining
from tests.chat_rows import PACKABLE, of, some_examples
from tests.small import MODEL, config, finished
from train import chunked_loss
from train.chunked_loss import compared, summed
from train.kernels import in_fixed_order, looking
from train.learner import Learner
from train.model import built
from train.objectives import answer_logprobs, sft_loss
from train.packing import Batch, attends_by_bounds, batch, bounded, can_pack, plan, single

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: nothing is tested on one")
PRECISIONS = ("32-true", "tf32-true", "bf16-mixed")
WINDOWS = torch.randint(257, (8, 513), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def as_before():
    in_fixed_order(1)
    yield
    torch.use_deterministic_algorithms(False)


def packed_rows(bounds: bool = False) -> Batch:
    given = some_examples([40, 90, 33, 120, 7, 61, 15, 80])
    rows = batch(given, plan([len(each.tokens) for each in given], 128))
    return bounded(rows) if bounds else rows


def trained(part: torch.Tensor | Batch, steps: int = 3, **keys: object) -> Learner:
    objective = None if isinstance(part, torch.Tensor) else sft_loss
    learner = Learner(built(MODEL, 257, 3), config(**keys), objective=objective)
    [*learner.train([[part]] * steps, [1e-2] * steps)]
    return learner


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "muon+"])
@pytest.mark.parametrize("rows", [False, True])
def test_a_step_is_the_same_each_time(precision, optimizer, rows):
    in_fixed_order(1, precision=precision)
    part = packed_rows(precision == "bf16-mixed") if rows else WINDOWS
    found = [trained(part, precision=precision, inner_optimizer=optimizer).vector.clone() for _ in range(3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and found[0].isfinite().all()


@pytest.mark.parametrize("rows", [False, True])
def test_a_loss_is_a_cpus(rows):
    part = packed_rows() if rows else WINDOWS
    objective = sft_loss if rows else None
    here = Learner(built(MODEL, 257, 3), config(), torch.device("cpu"), objective)
    wanted = float(here.loss(part).detach())
    for precision, close in (("32-true", 1e-5), ("bf16-mixed", 5e-3)):
        there = Learner(built(MODEL, 257, 3), config(precision=precision), objective=objective)
        assert float(there.loss(part).detach()) == pytest.approx(wanted, rel=close)
        assert there.eval_loss(part) == pytest.approx(wanted, rel=close)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed"])
def test_it_learns_and_whole_runs_repeat_themselves(tmp_path, precision):
    tokens = WINDOWS[:4, :17]
    learner = Learner(built(MODEL, 257, 3), config(precision=precision))
    before = float(learner.loss(tokens).detach())
    [*learner.train([[tokens]] * 30, [1e-2] * 30)]
    assert learner.device.type == "cuda" and float(learner.loss(tokens).detach()) < before - 0.5
    runs = [digest(finished(tmp_path / str(n), precision=precision)) for n in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("mutation", ["sft", "dpo", "grpo", "es"])
def test_breeding_repeats_itself(tmp_path, mutation):
    keys, of = {"mutation": mutation}, {"grpo": posttraining.rl_config, "es": posttraining.es_config}
    if mutation == "dpo":
        keys["mutation_datasets"] = ({"source": str(posttraining.preferences(tmp_path / "pairs.jsonl"))},)
    found = []
    for _ in range(2):  # in the same place: paths are part of a run
        config = of.get(mutation, posttraining.config)(tmp_path / "here", **({} if mutation == "es" else keys))
        history = posttraining.finished(config)
        found.append(digest(history))
        (tmp_path / "here" / "run").rename(tmp_path / f"run{len(found)}")
    assert found[0] == found[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon+"])
@pytest.mark.parametrize("most", [1 << 28, 0])
@pytest.mark.parametrize("rows", ["", "single", "packed", "bounded"])
def test_no_step_is_waited_for(monkeypatch, optimizer, most, rows):
    monkeypatch.setattr(chunked_loss, "MOST", most)
    given = config(inner_optimizer=optimizer, z_loss=1e-3, precision="bf16-mixed")
    learner = Learner(built(MODEL, 257, 3), given, objective=sft_loss if rows else None)
    part = {
        "": WINDOWS,
        "single": single(some_examples((7, 9))),
        "packed": packed_rows(),
        "bounded": packed_rows(True),
    }[rows]
    learner.begin()
    learner.step([part, part], 1e-3)  # what is found out once
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.step([part, part], 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_in_parts_have_the_gradients_of_all_at_once(monkeypatch, dtype):
    monkeypatch.setattr(chunked_loss, "PART", 1 << 16)
    rng = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 64, generator=rng).mul_(0.3).cuda().requires_grad_() for n in (512, 1000))
    words = torch.randint(1000, (512,), generator=rng).cuda()
    whole = torch.nn.functional.cross_entropy(hidden @ weight.T, words, reduction="sum")
    wanted = torch.autograd.grad(whole, (hidden, weight))
    close = 1e-4 if dtype == torch.float32 else 0.05
    for loss in (summed(hidden, weight, words, dtype), compared(hidden, weight, words, dtype).sum()):
        assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=close)
        for found, exact in zip(torch.autograd.grad(loss, (hidden, weight)), wanted, strict=True):
            assert (found - exact).norm() <= close * exact.norm()


@pytest.mark.parametrize("kind, keys", PACKABLE)
def test_models_are_packed_on_it_as_on_a_cpu(kind, keys):
    model = of(kind, **keys)
    given = some_examples([7, 12, 9, 5])
    made = batch(given, [(0, 1), (2, 3)])
    with torch.no_grad():
        here = answer_logprobs(model, made)
        there = copy.deepcopy(model).cuda()
        assert can_pack(there, 20)
        assert answer_logprobs(there, made.to("cuda")).tolist() == pytest.approx(here.tolist(), rel=1e-4)
        with looking(torch.device("cuda"), "bf16-mixed"):
            assert answer_logprobs(there, made.to("cuda")).tolist() == pytest.approx(here.tolist(), rel=0.02)


@pytest.mark.parametrize("kind, keys", [each for each in PACKABLE if each[0] != "mixtral"])
def test_models_without_windows_attend_by_bounds_and_learn_the_same(kind, keys):
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    found = []
    for bounds in (False, True):
        given = config(precision="bf16-mixed")
        learner = Learner(of(kind, **keys, **dropout).train(), given, objective=sft_loss)
        assert attends_by_bounds(learner.answer, 128) == ("sliding_window" not in keys)
        rows = packed_rows(bounds and "sliding_window" not in keys)
        learner.begin()
        learner.step([rows], 0.0)
        found.append((learner.summed_loss(), learner.gradient.clone()))
    (loss, gradient), (other, steps) = found
    assert loss == pytest.approx(other, rel=2e-3) and (gradient - steps).norm() <= 0.03 * gradient.norm()


def test_dropout_and_wide_numbers_keep_the_mask():
    dropping = Learner(of("gpt2"), config(precision="bf16-mixed"))
    assert not attends_by_bounds(dropping.answer, 64)
    assert not attends_by_bounds(Learner(of("llama"), config()).answer, 64)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_compiled_step_is_compiled_once_and_close_to_a_plain_one(deterministic):
    in_fixed_order(1, deterministic)
    torch._dynamo.reset()
    keys = {"precision": "bf16-mixed", "deterministic": deterministic}
    plain = trained(WINDOWS, **keys)
    learner, count = trained(WINDOWS, compile=True, **keys), torch._dynamo.utils.counters["stats"]
    assert learner.summed_loss() == pytest.approx(plain.summed_loss(), rel=5e-3)
    learner.eval_loss(WINDOWS)
    before, first = count["unique_graphs"], learner.vector.clone()
    assert before
    [*learner.train([[WINDOWS]] * 3, [1e-2] * 3)]
    learner.eval_loss(WINDOWS)
    assert count["unique_graphs"] == before
    if deterministic:
        assert torch.equal(trained(WINDOWS, compile=True, **keys).vector, first)


def test_a_step_with_a_large_vocabulary_takes_no_logits():
    """8 x 2048 tokens of 131,072 words: logits alone would be 8.6 GB, and three times that with their gradients."""
    entry = {"config": {**MODEL["config"], "max_position_embeddings": 2048}}
    learner = Learner(built(entry, 131_072, 3), config(precision="bf16-mixed"))
    windows = torch.randint(131_072, (8, 2049))
    learner.begin()
    learner.step([windows], 1e-3)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    learner.step([windows], 1e-3)
    assert torch.cuda.max_memory_allocated() - before < 3e9

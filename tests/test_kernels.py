"""Which kernels a learner may compute with: in a fixed order while it learns, all of them while it looks."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.backends import cuda
from torch.utils._python_dispatch import TorchDispatchMode

from fleet.run_config import UserError
from tests.small import MODEL, config
from train import chunked_loss
from train.chat_examples import Example
from train.chunked_loss import ModelForward
from train.kernels import in_fixed_order, learning, looking
from train.learner import Learner
from train.model import built, skeleton
from train.objectives import sft_loss, with_first_logprobs
from train.packing import Batch, batch, one_of_few, plan, single


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.use_deterministic_algorithms(False)


def allowed() -> tuple[str, tuple[bool, ...]]:
    """How strict torch is about orders, and whether each kind of attention may be chosen at all."""
    order = ("any", "warned", "strict")[torch.get_deterministic_debug_mode()]
    kinds = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled, cuda.math_sdp_enabled)
    return order, tuple(enabled() for enabled in kinds)


def recorded(deterministic: bool) -> dict[str, tuple[str, tuple[bool, ...]]]:
    """Of a step and an evaluation: what is allowed on the way there, on the way back, and while it only looks."""
    in_fixed_order(1, deterministic)
    found = {}
    learner = Learner(built(MODEL, 257, 3), config(deterministic=deterministic))

    def forward(module: object, given: object, said: torch.Tensor) -> None:
        found["forward" if torch.is_grad_enabled() else "look"] = allowed()
        if said.requires_grad:
            said.register_hook(lambda slope: found.update(backward=allowed()))

    learner.model.model.norm.register_forward_hook(forward)
    windows = torch.randint(257, (2, 9))
    [*learner.train([[windows]], [1e-3])]
    learner.eval_loss(windows)
    assert torch.get_deterministic_debug_mode() == (1 if deterministic else 0)
    return found


def test_orders_are_fixed_while_it_learns_and_every_attention_is_there():
    """Strict: cuDNN's attention refuses itself, flash and memory-efficient attention take their fixed order."""
    there = (True,) * 4
    assert recorded(True) == {"forward": ("strict", there), "backward": ("strict", there), "look": ("warned", there)}
    assert recorded(False) == dict.fromkeys(("forward", "backward", "look"), ("any", there))


def test_a_gradient_without_a_fixed_order_is_a_verdict():
    in_fixed_order(1)
    place, one = torch.tensor([0]), torch.ones(1)
    with pytest.raises(UserError, match="put_ does not have a deterministic implementation.*DETERMINISTIC false"):
        with learning():
            torch.zeros(2).put_(place, one)
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    with pytest.raises(RuntimeError, match="another"), learning():
        raise RuntimeError("another")
    in_fixed_order(1, deterministic=False)
    with learning():
        torch.zeros(2).put_(place, one)


def test_both_methods_of_training_hand_the_key_on(tmp_path):
    from tests.posttraining import config as posttrain_config
    from train.member import posttraining_tasks, pretraining_tasks

    for make, settings in (
        (pretraining_tasks.maker, config()),
        (posttraining_tasks.maker, posttrain_config(tmp_path, 1)),
    ):
        for deterministic in (False, True):
            make(settings.model_copy(update={"deterministic": deterministic}))
            assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert posttraining_tasks.inner(posttrain_config(tmp_path, 1, deterministic=False), 4, 1.0).deterministic is False


def test_options_reach_the_settings_and_leave_checkpoints_as_they_are():
    from train.cluster.finetune_options import FinetuneOptions, Size, settings
    from train.cluster.options import TrainingOptions

    plain, free = (TrainingOptions(fake_data=True, precision="32-true", deterministic=each) for each in (True, False))
    assert (plain.settings().deterministic, free.settings().deterministic) == (True, False)
    assert plain.bound() == free.bound()
    row = [Example(np.arange(9, dtype=np.int32), np.ones(9, dtype=np.bool_))]
    asked = ("model", "rows.jsonl", "sft", [row], Size(0, 257, 1, "cpu", True))
    for each in (True, False):
        assert settings(FinetuneOptions(deterministic=each), *asked).deterministic is each
    assert FinetuneOptions().bound() == FinetuneOptions(deterministic=False).bound()


def some_examples(sizes: Sequence[int]) -> list[Example]:
    dice = np.random.default_rng(1)
    return [Example(dice.integers(0, 257, n).astype(np.int32), np.ones(n, dtype=np.bool_)) for n in sizes]


def two_rows(sizes: Sequence[int] = (7, 9, 5, 12)) -> Batch:
    return batch(some_examples(sizes), plan(sizes, 20))


class Waits(TorchDispatchMode):
    """What a process would wait for a device for: each operation whose answer it has to know."""

    NAMES = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (name := function._schema.name.removeprefix("aten::")) in self.NAMES:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon+"])
@pytest.mark.parametrize("most", [1 << 28, 0])
@pytest.mark.parametrize("rows", ["", "single", "packed"])
def test_no_step_waits_for_the_device(monkeypatch, optimizer, most, rows):
    """But every twentieth, which looks at the loss."""
    monkeypatch.setattr(chunked_loss, "MOST", most)
    given = config(inner_optimizer=optimizer, z_loss=1e-3)
    learner = Learner(built(MODEL, 257, 3), given, objective=sft_loss if rows else None)
    learner.answer = replace(learner.answer, device=torch.device("cuda"))  # is asked as one there is
    part = {"single": single(some_examples((7, 9))), "packed": two_rows()}.get(rows, torch.randint(257, (2, 9)))
    learner.begin()
    learner.step([part, part], 1e-3)  # what is found out once
    with Waits() as waits:
        learner.step([part, part], 1e-3)
        assert len(waits.found) == (2 if rows else 0) * 2  # rows' words are counted before they are sent
        waits.found.clear()
        learner.summed_loss()
        assert waits.found == ["_local_scalar_dense"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon+"])
@pytest.mark.parametrize("rows", [False, True])
def test_a_step_takes_place_where_the_model_is(optimizer, rows):
    """On a device without any numbers: nothing is made elsewhere, and nobody has to know what a number is."""
    model, given = skeleton(MODEL, 257), config(inner_optimizer=optimizer, z_loss=1e-3)
    learner = Learner(model, given, torch.device("meta"), sft_loss if rows else None)
    learner.answer = replace(learner.answer, device=torch.device("cuda"))  # is asked as one there is
    learner.begin()
    learner.step([two_rows() if rows else torch.zeros(2, 9, dtype=torch.long)] * 2, 1e-3)
    kept = (learner.vector, learner.gradient, learner.moments, learner.total)
    assert {each.device.type for each in kept} == {"meta"}


@pytest.mark.parametrize("sizes", [(7, 9, 5, 12), (20, 20)])
def test_packed_rows_say_what_they_say_where_transformers_looks_for_itself(sizes):
    """By the same mask; where rows have one text each, it would find that they need none."""
    found = {}
    for there in ("cpu", "cuda"):
        learner = Learner(built(MODEL, 257, 3), config(), torch.device("cpu"), sft_loss)
        learner.answer = replace(learner.answer, device=torch.device(there))
        loss = learner.loss(two_rows(sizes))
        loss.backward()
        found[there] = torch.cat([loss.detach()[None], learner.gradient])
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-4, atol=1e-7)
    assert len(sizes) < 4 or torch.equal(found["cuda"], found["cpu"])


def test_rows_on_gpus_have_few_widths_and_count_the_same(tmp_path):
    """Compiled for each width that it meets, as cuDNN's attention is: few graphs, instead of one a width."""
    from tests.posttraining import config as breeding

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    widths = [one_of_few(n, 1000, gpu) for n in range(1, 1001)]
    assert all(0 <= a - n < max(32, n / 2) for n, a in enumerate(widths, 1)) and len({*widths}) == 10
    assert all(one_of_few(n, n, gpu) == one_of_few(n, 9, cpu) == n for n in (1, 33, 700))
    model, steps = built(MODEL, 257, 3), [[single(some_examples((n, n // 2)))] for n in (33, 40, 61, 65, 90)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = ModelForward(model, torch.compile(model, backend="eager", dynamic=False), cpu)
    c, losses = breeding(tmp_path, 1, seq_length=128), list[torch.Tensor]()
    with torch.no_grad():
        for asked, device in ((model, cpu), (compiled, gpu)):
            rows = with_first_logprobs(c, SimpleNamespace(device=device, answer=asked), steps)
            losses.append(torch.stack([sft_loss(asked, part) for (part,) in rows]))
    torch.testing.assert_close(*losses)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("there", ["cpu", "cuda"])
def test_compiled_attention_of_windows_needs_no_mask_on_gpus(there):
    """What a compiler is given to compile, as it is on such a device."""
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    model = built(MODEL, 257, 3)
    compiled = torch.compile(model, backend=lambda graph, given: graphs.append(graph) or graph.forward)
    ModelForward(model, compiled, torch.device(there))(input_ids=torch.randint(257, (2, 8)), use_cache=False)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    (attention,) = (node for node in nodes if "scaled_dot_product_attention" in str(node.target))
    assert (attention.kwargs["attn_mask"] is None) == attention.kwargs["is_causal"] == (there == "cuda")


@pytest.mark.parametrize("most", [1 << 28, 0])
def test_nothing_is_compiled_again_from_round_to_round(monkeypatch, most):
    """Whatever compiles: what it is given, and how often."""
    monkeypatch.setattr(chunked_loss, "MOST", most)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, compiled = (Learner(built(MODEL, 257, 3), config(compile=each, z_loss=1e-3)) for each in (False, True))
    found, made = [], list[int]()
    for learner in (plain, compiled):
        rng = torch.Generator().manual_seed(1)
        for _ in range(3):
            [*learner.train([[torch.randint(257, (2, 17), generator=rng)] for _ in range(3)], [1e-2] * 3)]
            found.append((learner.eval_loss(torch.randint(257, (4, 17), generator=rng)), learner.summed_loss()))
            made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert found[:3] == found[3:]
    assert made[:3] == [0] * 3 and made[3] and made[3:] == made[3:4] * 3


def test_what_only_looks_is_narrow_on_gpus_alone():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    with warnings.catch_warnings(), looking(cuda, "bf16-mixed") as found:
        warnings.simplefilter("ignore")  # there is none here
        assert found.device == "cuda" and found.fast_dtype == torch.bfloat16
    for device, precision in ((cpu, "bf16-mixed"), (cuda, "32-true"), (cuda, "auto")):
        with looking(device, precision) as found:
            assert found is None

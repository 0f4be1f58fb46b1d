"""Which kernels a learner may compute with: in a fixed order while it learns, all of them while it looks."""

import numpy as np
import pytest
import torch
from torch.backends import cuda

from fleet.run_config import UserError
from tests.small import MODEL, config
from train.chat import Example
from train.kernels import in_fixed_order, learning
from train.loop import Learner
from train.model import built


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
    from tests.posttraining import config as breeding
    from train.member import posttraining_tasks, pretraining_tasks

    for make, settings in ((pretraining_tasks.maker, config()), (posttraining_tasks.maker, breeding(tmp_path, 1))):
        for deterministic in (False, True):
            make(settings.model_copy(update={"deterministic": deterministic}))
            assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert posttraining_tasks.inner(breeding(tmp_path, 1, deterministic=False), 4, 1.0).deterministic is False


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: its kernels are not tested")
@pytest.mark.parametrize("precision", ["32-true", "tf32-true", "bf16-mixed"])
def test_a_step_on_cuda_is_the_same_each_time(precision):
    in_fixed_order(1, precision=precision)
    windows = torch.randint(257, (8, 513), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        learner = Learner(built(MODEL, 257, 3), config(precision=precision))
        [*learner.train([[windows]] * 3, [1e-2] * 3)]
        found.append(learner.vector.clone())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])

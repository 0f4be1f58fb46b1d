"""What a training takes of memory: the formula beside all tensors that are alive at a time, counted while it trains."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train import chunked_loss
from train.learner import Learner
from train.memory import largest_batch, memory_of
from train.model import built
from train.training_config import TrainConfig

WORDS = 512
SHAPES = {
    "equal heads": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4},
    "fewer keys": {
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
}  # fmt: skip


class Alive(TorchDispatchMode):
    """Bytes of all tensors that are made in it and not gone yet, and the most that there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and (key := each.untyped_storage()._cdata) not in {*before, *self._sizes}:
                self._sizes[key] = size = each.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(each.untyped_storage(), self._gone, key)
        return found

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def config(shape: str, **keys: Any) -> TrainConfig:
    model = {"config": {"model_type": "llama", **SHAPES[shape]}}
    usual = {"initial_population": (model,), "vocab_size": WORDS, "batch_size": 4, "seq_length": 96}
    return TrainConfig(**{**usual, **keys})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer, whole", [("adamw", True), ("muon+", True), ("muon+", False), ("muon", True)])
def test_the_formula_is_what_is_alive(shape, precision, optimizer, whole, monkeypatch):
    if not whole:  # words are looked at in parts
        monkeypatch.setattr(chunked_loss, "MOST", 0)
        monkeypatch.setattr(chunked_loss, "PART", 64 * WORDS)
    c = config(shape, precision=precision, inner_optimizer=optimizer)
    learner = Learner(built(c.initial_population[0], WORDS, 1), c, torch.device("cpu"))
    windows = torch.randint(WORDS, (c.batch_size, c.seq_length + 1))
    learner.begin()
    learner.step([windows], 1e-3)  # what is made once is there
    wanted = memory_of(c)
    assert wanted.kept == sum(each.nbytes for each in (learner.vector, learner.gradient, learner.moments))
    with Alive() as alive:
        learner.loss(windows, [windows]).backward()
        learning, alive.most = alive.most, alive.now
        learner._step(1e-3)
    assert learning == pytest.approx(wanted.narrow + wanted.layers + wanted.logits, rel=0.02 if whole else 0.05)
    if optimizer != "adamw":  # of which a CPU multiplies what it makes orthogonal in fp32
        ahead = 4 * learner.layout.hidden
        assert alive.most == pytest.approx(ahead + 2 * (wanted.step - ahead), rel=0.05)


def test_parts_of_a_model_take_a_part_of_its_memory_and_rows_that_of_their_own():
    one, two = (config("fewer keys", devices_per_worker=n, sharding_strategy="FULL_SHARD") for n in (1, 2))
    assert memory_of(two).kept == memory_of(one).kept / 2
    assert memory_of(two).layers == memory_of(one).layers / 2
    copies = config("fewer keys", devices_per_worker=2, sharding_strategy="NO_SHARD")
    assert memory_of(copies).kept == memory_of(one).kept


def test_the_largest_batch_is_the_last_one_that_fits():
    c = config("fewer keys")
    for size in (1, 8):
        room = memory_of(c, size).total + 1e9
        assert (largest_batch(c, room), largest_batch(c, room - 1)) == (size, size // 2)

"""Parts of a model on two ranks: what each rank holds while it learns, and experts that only one of them asks."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tests.helpers import LONG
from tests.small import SHAPE
from train.cluster import ranks as process_ranks
from train.cluster.checkpoints import CheckpointKeeper
from train.cluster.ranks import Ranks, assembled
from train.cluster.shared_learner import Parts, learner_of
from train.cluster.startup import save
from train.learner import Learner
from train.model import built, layout_of, skeleton
from train.optimizers import WEIGHTS
from train.training_config import TrainConfig

ROOT = Path(__file__).parent.parent
PARTS, STEPS = 3, 2  # of a batch; of a training


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(2))
        self.asked: list[int] = []
        self.seen: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen |= {f"weights {self.experts[0].weight.dtype}", f"from layer to layer {x.dtype}"}
        return x + torch.stack([self.experts[n](x) for n in self.asked]).float().sum(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model(asked: list[int]) -> Any:
    torch.manual_seed(3)
    made = Model()
    for layer in made.layers:
        layer.asked = asked
    return made


def objective(answer: Any, part: Tensor, step: Any) -> Tensor:
    return (answer(x=part) - 1).square().mean() / len(step)


def config(precision: str = "32-true") -> TrainConfig:
    return TrainConfig(precision=precision, inner_optimizer="adamw", clip=0.5)


def batches() -> list[list[Tensor]]:
    rng = torch.Generator().manual_seed(1)
    return [[torch.randn(4, 5, generator=rng) for _ in range(PARTS)] for _ in range(STEPS)]


def trained(learner: Learner) -> Learner:
    for _ in learner.train(batches(), [0.1] * STEPS):
        pass
    return learner


def held(learner: Parts) -> int:
    """Numbers of gradients that are whole here after a part of a batch that is not the last."""
    learner.begin()
    part = batches()[0][0]
    learner.loss(part, [part, part]).backward()
    states = [each._get_fsdp_state() for each in learner.model.modules() if isinstance(each, FSDPModule)]
    params = [each for state in states for group in state._fsdp_param_groups for each in group.fsdp_params]
    whole = [each.unsharded_accumulated_grad for each in params] + [each._unsharded_param.grad for each in params]
    return sum(each.numel() for each in whole if each is not None)


def rank(folder: Path, ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = {}
    learner = trained(learner_of(model([ranks.rank]), config(), ranks, "FULL_SHARD", objective))
    found["weights"] = {name: learner.gathered(WEIGHTS, name).tolist() for name in learner.layout.shapes}
    found["held"] = held(learner)
    narrow = trained(learner_of(model([ranks.rank]), config("bf16-mixed"), ranks, "FULL_SHARD", objective))
    found["seen"] = sorted(narrow.model.layers[1].seen)
    found["gradient"] = str(narrow.gradient.dtype)
    for strategy in ("NO_SHARD", "FULL_SHARD"):
        each = learner_of(built({"config": SHAPE}, 16, 1), config(), ranks, strategy)
        if ranks.first:
            (folder / strategy).mkdir()
        dist.barrier()
        keeper = CheckpointKeeper(folder / strategy, ranks, {}, None)
        save(keeper, 1, each, True, "")
        keeper.close()
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The second rank is a process of its own, the first one this process."""
    folder = tmp_path_factory.mktemp("parts")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "tests.test_fsdp_parts", str(folder)]
    with pytest.MonkeyPatch.context() as patch, (folder / "said").open("w+") as said:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            patch.setenv(name, "lo")
        patch.setattr(process_ranks, "_device", lambda local, here: torch.device("cpu"))
        patch.setattr(process_ranks, "_PATIENCE", timedelta(seconds=LONG))
        other = subprocess.Popen(words, cwd=ROOT, env=env, stdout=said, stderr=said)
        try:
            found = together(folder, 0)
            assert other.wait(LONG) == 0, (folder / "said").read_text()
        finally:
            other.kill()
            other.wait()
    return folder, found


def together(folder: Path, number: int) -> dict[str, Any]:
    ranks = assembled(folder, number, 2)
    try:
        found = rank(folder, ranks)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()


def test_an_expert_that_one_rank_did_not_ask_learns_of_the_other(two):
    """As in one process that asks both, each for half of the loss."""

    def both(answer: Any, part: Tensor, step: Any) -> Tensor:
        losses = []
        for asked in (0, 1):
            for layer in alone.model.layers:
                layer.asked = [asked]
            losses.append(objective(answer, part, step))
        return torch.stack(losses).mean()

    alone = Learner(model([0]), config(), torch.device("cpu"), both)
    trained(alone)
    wanted = alone.layout.views(alone.vector)
    assert {*two[1]["weights"]} == {*wanted}
    for name, values in two[1]["weights"].items():
        assert torch.allclose(torch.tensor(values), wanted[name], atol=1e-6), name


def test_no_gradient_waits_whole_for_the_last_part_of_a_batch(two):
    assert two[1]["held"] == 0


def test_layers_travel_as_narrow_as_they_are_multiplied_and_all_else_stays_wide(two):
    wanted = ["from layer to layer torch.float32", "weights torch.bfloat16"]
    assert (two[1]["seen"], two[1]["gradient"]) == (wanted, "torch.float32")


def test_of_ranks_that_have_the_same_one_writes(two):
    """And of ranks that have parts, each its own."""
    counts = {}
    for strategy in ("NO_SHARD", "FULL_SHARD"):
        names = []
        for file in sorted((two[0] / strategy / "step-00000001").glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                names.append({*opened.keys()})
        counts[strategy] = names
    (whole,) = counts["NO_SHARD"]
    assert len(whole) == 3 * len(layout_of(skeleton({"config": SHAPE}, 16)).shapes)
    assert len(counts["FULL_SHARD"]) == 2 and set.union(*counts["FULL_SHARD"]) == whole


if __name__ == "__main__":
    together(Path(sys.argv[1]), 1)

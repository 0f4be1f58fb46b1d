"""The inner loop's learner, where several ranks share one model: whole copies of it, or parts of each tensor."""

import contextlib
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from train.chunked_loss import may_be_large, try_out
from train.cluster.ranks import Agreed, Ranks
from train.kernels import MIXED
from train.learner import Learner, Objective
from train.model import layout_of
from train.optimizers import orthogonal
from train.training_config import TrainConfig
from train.vector_layout import Stack, VectorLayout

_PIECE = 1 << 24  # numbers that are squared at a time


def learner_of(
    model: PreTrainedModel, config: TrainConfig, ranks: Ranks, strategy: str, objective: Objective | None = None
) -> "SharedLearner":
    return (Copies if strategy == "NO_SHARD" else Parts)(model, config, ranks, strategy, objective)


class SharedLearner(Learner):
    """All ranks take the same step; each has seen a part of its batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        ranks: Ranks,
        strategy: str,
        objective: Objective | None = None,
    ) -> None:
        self.ranks, self.strategy = ranks, strategy
        super().__init__(model, config, ranks.device, objective)

    @property
    def leads_part(self) -> bool:
        """Whether this rank speaks for its part of the tensors; others have copies of it."""
        return self.ranks.first

    @property
    def part_number(self) -> int:
        return 0

    def from_leader(self, vector: Tensor) -> Tensor:
        """A vector on the CPU, as the rank has it that speaks for this part."""
        dist.broadcast(vector, src=0)
        return vector

    def finite(self) -> bool:
        """Of all ranks' parts."""
        return not self.ranks.any(not super().finite())

    def step_loss(self, step: int, advice: str) -> float:
        """Of the step that was just taken, over all ranks; each has the mean of its own."""
        loss = float(self.ranks.mean(self.total))
        self.total.zero_()
        if not math.isfinite(loss):
            raise Agreed(f"step {step}: the loss became {loss}; {advice}")
        return loss

    def named(self, kind: str, vector: Tensor) -> dict[str, Tensor]:
        """Of a vector like one of the learner's: each tensor by its name, as a checkpoint keeps it."""
        return self.layouts[kind].views(vector)

    def joined(self, named: Mapping[str, Tensor]) -> Tensor:
        """The vector that these are the tensors of; of a rank's parts, those that it has."""
        parts = (each.to_local() if isinstance(each, DTensor) else each for each in named.values())
        return torch.cat([part.flatten() for part in parts]).cpu()

    def gathered(self, kind: str, name: str) -> Tensor:
        """One tensor of one of the vectors, whole, on every rank."""
        return self._view(kind, name)

    def take(self, kind: str, name: str, whole: Tensor) -> None:
        """Of a whole tensor, what this rank has of it."""
        self._view(kind, name).copy_(whole)

    def _view(self, kind: str, name: str) -> Tensor:
        return self.layouts[kind].views(self.vectors[kind])[name]

    def loaded(self) -> None:
        """The vector has other weights now."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """The model's weights, on the CPU of the first rank."""
        return {name: each.detach().cpu() for name, each in self.model.state_dict().items()}

    def _fill(self, module: torch.nn.Module) -> None:
        """Ranks that have built the model without its numbers get them from the first one, part by part."""
        given = cache(self._given)  # what is tied stays tied
        for each in module.modules():
            for name, there in (*each._parameters.items(), *each._buffers.items()):
                if there is not None and not isinstance(there, DTensor):
                    setattr(each, name, given(there))

    def _given(self, there: Tensor) -> Tensor:
        given = self.ranks.given(None if there.is_meta else there.detach().cpu(), there.shape, there.dtype)
        if not there.is_meta:
            return there
        found = given.to(self.device)
        return torch.nn.Parameter(found, there.requires_grad) if isinstance(there, torch.nn.Parameter) else found

    def _compiled(self, model: PreTrainedModel) -> None:
        """Layer by layer, in place: much sooner than the whole, and names stay what they are. Before, all ranks try the
        model out, where a batch of pairs might be too large to be asked whole."""
        rows = max(self.config.batch_size // self.ranks.count, self.config.eval_batch_size)
        if may_be_large(model, 2 * self.config.seq_length * rows):
            try_out(model)
            self.loaded()
        if self.config.compile is True:
            for layer in layers_of(model):
                layer.compile()

    def _step(self, lr: float) -> None:
        if self._scaling and self.ranks.any(not bool(self.gradient.isfinite().all())):
            self.gradient[:1] = torch.inf  # all skip a step that one has to skip
        super()._step(lr)


class Copies(SharedLearner):
    """DDP: gradients are averaged while they are computed."""

    def _bound(self, model: PreTrainedModel) -> tuple[VectorLayout, Tensor, Tensor]:
        self._fill(model)
        return super()._bound(model)

    def _runner(self, model: PreTrainedModel) -> Callable[..., Any]:
        found = DistributedDataParallel(model, forward_sync_buffers=False)
        self._warm_up(found)
        self._compiled(model)  # afterwards, or its kernels would be made for any number of tokens
        return found

    def _warm_up(self, found: Any) -> None:
        """DDP puts gradients into other groups after its first step, and sums them in another order then. Before the
        first step of all, it is the same after every start."""
        tokens = torch.zeros((1, 2), dtype=torch.long, device=self.device)
        for _ in range(2):
            found(input_ids=tokens, use_cache=False).logits.sum().mul(0).backward()
        self.gradient.zero_()

    def _part(self, last: bool) -> AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else self.answer.run.no_sync()  # type: ignore[attr-defined]

    def _orthogonal(self, matrices: Tensor, stack: Stack) -> Tensor:
        """Each rank does its share of them."""
        shares = _shared_out(len(matrices), self.ranks.count)
        found = torch.empty_like(matrices)
        for rank, (share, into) in enumerate(zip(matrices.split(shares), found.split(shares), strict=True)):
            if rank == self.ranks.rank and len(share):
                into.copy_(orthogonal(share))
            dist.broadcast(into, src=rank)
        return found


class Parts(SharedLearner):
    """FSDP2: each rank has a part of each tensor, its gradients and its optimizer. These parts lie in one vector of our
    own, on which the optimizer works as it does for a whole model."""

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Of HYBRID strategies: parts on one machine, copies on the others."""
        if "HYBRID" not in self.strategy:
            return init_device_mesh(self.device.type, (self.ranks.count,), mesh_dim_names=("part",))
        shape = (self.ranks.count // self.ranks.here, self.ranks.here)
        return init_device_mesh(self.device.type, shape, mesh_dim_names=("copy", "part"))

    @property
    def leads_part(self) -> bool:
        return "copy" not in (self.mesh.mesh_dim_names or ()) or self.mesh.get_local_rank("copy") == 0

    @property
    def part_number(self) -> int:
        return int(self.mesh.get_local_rank("part"))

    def from_leader(self, vector: Tensor) -> Tensor:
        if "copy" in (self.mesh.mesh_dim_names or ()):
            group = self.mesh.get_group("copy")
            dist.broadcast(vector, src=dist.get_global_rank(group, 0), group=group)
        return vector

    def _bound(self, model: PreTrainedModel) -> tuple[VectorLayout, Tensor, Tensor]:
        gathered_again = self.strategy in ("FULL_SHARD", "HYBRID_SHARD")
        for part in [*layers_of(model), model]:
            self._fill(part)  # no rank but the first ever has more than a layer whole
            policy = MixedPrecisionPolicy() if part is model else self._policy
            fully_shard(part, mesh=self.mesh, reshard_after_forward=gathered_again, mp_policy=policy)
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # an expert that one rank did not ask
        found = dict(model.named_parameters())
        layout = layout_of(model, lambda each: each.to_local())
        self._there: dict[str, DTensor] = {name: found[name] for name in layout.shapes}  # type: ignore[misc]
        vector = torch.cat([each.to_local().detach().flatten() for each in self._there.values()]).to(self.device)
        gradient = torch.zeros_like(vector)
        for each, slope in zip(self._there.values(), layout.views(gradient).values(), strict=True):
            each.grad = _like(each, slope)  # every part of a batch is added here; what waits to be, waits whole
        return layout, vector, gradient

    @property
    def _policy(self) -> MixedPrecisionPolicy:
        """A layer's weights travel as narrow as they are multiplied, its gradients are added in fp32, and what goes
        from layer to layer stays as it is by oneself. Embeddings, head and last norm are the model's own: wide."""
        return MixedPrecisionPolicy(MIXED.get(self.config.precision), torch.float32, cast_forward_inputs=False)

    def _runner(self, model: PreTrainedModel) -> Callable[..., Any]:
        self._compiled(model)
        return model

    def _step(self, lr: float) -> None:
        super()._step(lr)
        self.loaded()

    def _clip(self) -> None:
        """By the length of all parts together."""
        total = torch.stack([piece.double().square().sum() for piece in self.gradient.split(_PIECE)]).sum()
        dist.all_reduce(total, group=self.mesh.get_group("part"))
        self.gradient.mul_((self.config.clip / (total.sqrt() + 1e-6)).clamp(max=1.0).float())

    def _orthogonal(self, matrices: Tensor, stack: Stack) -> Tensor:
        """Each rank gets some of them whole, and gives everybody his rows back."""
        if stack.rows == stack.whole:  # experts, of which each rank has some
            return orthogonal(matrices)
        group, rank, count = self.mesh.get_group("part"), self.part_number, self.mesh["part"].size()
        shares, rows = _shared_out(stack.count, count), _rows(stack.whole, count)
        sent = [share * stack.rows * stack.columns for share in shares]
        got = [shares[rank] * each * stack.columns for each in rows]
        mine = matrices.new_empty(sum(got))
        dist.all_to_all_single(mine, matrices.flatten(), got, sent, group)
        parts = [part.view(-1, each, stack.columns) for part, each in zip(mine.split(got), rows, strict=True)]
        done = orthogonal(torch.cat(parts, dim=1)) if shares[rank] else torch.cat(parts, dim=1)
        back, found = [part.flatten() for part in done.split(rows, dim=1)], torch.empty_like(matrices)
        dist.all_to_all_single(found.view(-1), torch.cat(back).to(found.dtype), sent, got, group)
        return found

    def gathered(self, kind: str, name: str) -> Tensor:
        return _like(self._there[name], self._view(kind, name)).full_tensor()

    def take(self, kind: str, name: str, whole: Tensor) -> None:
        each = self._there[name]
        part = distribute_tensor(whole.to(self.device), each.device_mesh, each.placements, src_data_rank=None)
        self._view(kind, name).copy_(part.to_local())

    def loaded(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what was gathered for a look, without learning, is old now
        with torch.no_grad():
            local = [each.to_local() for each in self._there.values()]
            torch._foreach_copy_(local, list(self.layout.views(self.vector).values()))

    def named(self, kind: str, vector: Tensor) -> dict[str, Tensor]:
        return {name: _like(self._there[name], part) for name, part in super().named(kind, vector).items()}

    def state_dict(self) -> Mapping[str, Tensor]:
        state = self.model.state_dict().items()
        whole = ((name, each.full_tensor() if isinstance(each, DTensor) else each) for name, each in state)
        return {name: each.detach().cpu() for name, each in whole if self.ranks.first}


def _shared_out(things: int, count: int) -> list[int]:
    """How many of them each rank gets."""
    return [(things + rank) // count for rank in range(count)]


def _rows(whole: int, count: int) -> list[int]:
    """Of a matrix, as FSDP cuts it."""
    part = -(-whole // count)
    return [max(0, min(part, whole - rank * part)) for rank in range(count)]


def _like(each: DTensor, part: Tensor) -> DTensor:
    return DTensor.from_local(
        part, each.device_mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride()
    )


def layers_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The longest list of modules in it."""
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


@dataclass
class OuterState:
    """What belongs to the outer step, on the CPU: of each rank, its part."""

    round: int
    start: Tensor
    momentum: Tensor

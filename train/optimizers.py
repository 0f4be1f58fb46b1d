"""The inner loop's optimizers, on flat vectors: AdamW for all numbers; or Muon for the matrices within the model, and
AdamW for the rest, as Muon's authors do it; or Muon+, which moves all rows of a matrix equally far."""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from train.training_config import TrainConfig
from train.vector_layout import Stack, VectorLayout

_EPS = 1e-8
_MOMENTUM = 0.95
_POLYNOMIAL, _TIMES = (3.4445, -4.7750, 2.0315), 5  # of Muon's first author: steep at zero, later about one
_AS_ADAMW = 0.2  # how far AdamW moves a number in a step, in learning rates: so the same rate serves both

WEIGHTS, MOMENTS = "weights", "moments"  # what a learner is made of

Orthogonal = Callable[[Tensor, Stack], Tensor]  # of a stack's matrices, or of a rank's rows of them


def orthogonal(matrices: Tensor) -> Tensor:
    """Their singular values brought near to one, by a polynomial that needs nothing but products."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if tall else matrices
    found = found.to(torch.bfloat16) if found.is_cuda else found
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _POLYNOMIAL
    for _ in range(_TIMES):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


class AdamW(torch.optim.Optimizer):
    """On one vector in two ranges, what decays and what does not: AdamW does not care where a tensor ends."""

    def __init__(
        self, vector: Tensor, gradient: Tensor, layout: VectorLayout, config: TrainConfig, orthogonal: Orthogonal
    ) -> None:
        self._decay, self._betas, self._orthogonal = config.weight_decay, config.adamw_betas, orthogonal
        self.whole = torch.nn.Parameter(vector)
        self.whole.grad = gradient
        super().__init__([self.whole], {"lr": config.lr})
        self.layout, self.first = layout, len(vector) - self.squared(layout).size
        self.moments = torch.zeros(2 * len(vector) - self.first, device=vector.device)
        self.average, self.square = self.moments[: len(vector)], self.moments[len(vector) :]
        self._adamw = self._on_ranges(layout.decaying, self._decay)

    @staticmethod
    def squared(layout: VectorLayout) -> VectorLayout:
        """Of what has a second moment."""
        return layout

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self._adamw:
            for group in self._adamw.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            self._adamw.step()

    @property
    def steps(self) -> float:
        """How many it has taken; AdamW's first ones count for more."""
        states = self._adamw.state.values() if self._adamw else ()
        return next((float(each["step"]) for each in states), 0.0)

    @steps.setter
    def steps(self, value: float) -> None:
        for each in self._adamw.state.values() if self._adamw else ():
            each["step"].fill_(value)

    def _on_ranges(self, cut: int, decay: float) -> torch.optim.AdamW | None:
        """Its state is a view of ours."""
        whole, begin, groups, states = self.whole, self.first, [], {}
        for place, share in ((slice(begin, cut), decay), (slice(cut, len(whole)), 0.0)):
            if place.start < place.stop:
                part = torch.nn.Parameter(whole.detach()[place])
                part.grad = cast(Tensor, whole.grad)[place]
                groups.append({"params": [part], "weight_decay": share})
                square = self.square[place.start - begin : place.stop - begin]
                states[part] = {"exp_avg": self.average[place], "exp_avg_sq": square}
        if not groups:
            return None
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=self._betas, eps=_EPS, fused=True)
        for part, state in states.items():
            optimizer.state[part] = {**state, "step": torch.zeros((), device=whole.device)}
        return optimizer


class Muon(AdamW):
    """Each matrix within the model moves as far in every direction in which its gradients agree."""

    @staticmethod
    def squared(layout: VectorLayout) -> VectorLayout:
        return layout.outside

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        lr, whole = self.param_groups[0]["lr"], self.whole
        both = (cast(Tensor, whole.grad), self.average)
        weights, slope, average = (each[: self.first] for each in (whole, *both))
        average.lerp_(slope, 1 - _MOMENTUM)
        ahead = slope.lerp(average, _MOMENTUM)
        weights.mul_(1 - lr * self._decay)
        for stack, place, matrices in zip(self.layout.stacks, *map(self.layout.stacked, (weights, ahead)), strict=True):
            length = _AS_ADAMW * self._to_one(stack)
            place.add_(self._direction(matrices, stack), alpha=-lr * length)
        super().step()

    def _direction(self, matrices: Tensor, stack: Stack) -> Tensor:
        return self._orthogonal(matrices, stack)

    @staticmethod
    def _to_one(stack: Stack) -> float:
        """What a direction is multiplied by, for numbers of about one."""
        return math.sqrt(max(stack.whole, stack.columns))


class MuonPlus(Muon):
    """What is brought near to orthogonal has rows of any length, most of all where there are more of them than columns;
    here they all have one length, before and after. (One step of normalization after it: arXiv 2602.21545.)"""

    def _direction(self, matrices: Tensor, stack: Stack) -> Tensor:
        return _level(self._orthogonal(_level(matrices), stack))

    @staticmethod
    def _to_one(stack: Stack) -> float:
        return math.sqrt(stack.columns)


def _level(matrices: Tensor) -> Tensor:
    """All their rows made as long as one, in place."""
    return matrices.div_(matrices.norm(dim=-1, keepdim=True, dtype=torch.float32).clamp_(min=1e-12))


OPTIMIZERS = {"adamw": AdamW, "muon": Muon, "muon+": MuonPlus}  # the values of INNER_OPTIMIZER


def layouts_of(layout: VectorLayout, config: TrainConfig) -> dict[str, VectorLayout]:
    """Of the weights and of each moment."""
    return {WEIGHTS: layout, "average": layout, "square": OPTIMIZERS[config.inner_optimizer].squared(layout)}

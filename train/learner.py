"""The inner loop on one model, plain and fast. Everything that it needs to go on lies in three flat vectors."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from train import chunked_loss
from train.kernels import MIXED, learning, sent
from train.model import bound_to_vector, layout_of
from train.optimizers import MOMENTS, OPTIMIZERS, WEIGHTS, layouts_of, orthogonal
from train.training_config import TrainConfig
from train.vector_layout import Stack, VectorLayout
from train.verdicts import NotFinite

_FLOOR = 0.1  # of the learning rate, at the last step of a cosine
_FALL = 0.4  # of all steps, in which a trapezoid does so
_LOOK = 20  # steps between two looks at whether the loss is finite: looking waits for the device

MicroBatch = Any  # a part of a step's batch: a tensor of windows, or a record that can be moved to a device
Objective = Callable[[Callable[..., Any], MicroBatch, Sequence[MicroBatch]], Tensor]  # its share in the step's loss


def best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def rate(config: TrainConfig, step: int) -> float:
    """The learning rate at a global step: a closed form, so that nothing about it has to be remembered."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    match config.lr_schedule:
        case "cosine":
            return config.lr * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2)
        case "linear":
            return config.lr * (1 - done)
        case "trapezoid":
            return config.lr * min(1.0, (1 - done) / _FALL)
    return config.lr


def language_loss(model: Callable[..., Any], windows: Tensor, step: Sequence[Tensor] = (), z: float = 0.0) -> Tensor:
    """Of windows of text: each token but the first is to be predicted. While it learns, `z` keeps the logits' sums of
    exponentials near one: large ones lose their digits in narrow numbers."""
    z = z if torch.is_grad_enabled() else 0.0
    loss = chunked_loss.mean_nll(model, windows[:, 1:], z, input_ids=windows[:, :-1], use_cache=False)
    return loss / max(1, len(step))


class Learner:
    """A model in this process's memory, with its optimizer, which a caller loads, trains and reads again. It remembers
    nothing of data and of the learning rate: batches and rates come with each training. Only parameters that require a
    gradient learn."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        device: torch.device | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.config, self.device = config, device or best_device()
        self._objective = objective or partial(language_loss, z=config.z_loss)
        self.layout, self.vector, self.gradient = self._bound(model)
        self.model = model
        self.answer = chunked_loss.ModelForward(model, self._runner(model), self.device, MIXED.get(config.precision))
        self._scaling = config.precision == "fp16-mixed"
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self._scaling)
        kind = OPTIMIZERS[config.inner_optimizer]
        self._optimizer = kind(self.vector, self.gradient, self.layout, config, self._orthogonal)
        self.moments = self._optimizer.moments
        self.vectors = {WEIGHTS: self.vector, "average": self._optimizer.average, "square": self._optimizer.square}
        self.layouts = layouts_of(self.layout, config)

    def train(self, batches: Iterable[list[MicroBatch]], rates: Iterable[float], total: float = 0.0) -> Iterator[int]:
        """Take a step for each batch, and say after each how many were taken. A batch may come in parts. The losses
        are added to `total`."""
        self.begin(total)
        for count, (parts, lr) in enumerate(zip(batches, rates, strict=False), 1):
            self.step(parts, lr)
            if count % _LOOK == 0:
                self.summed_loss()
            yield count

    def begin(self, total: float = 0.0) -> None:
        """Of a training whose losses so far add up to this. Sums of fp32 numbers in fp64 are exact: whoever goes on
        with what ranks had added up by then comes to the same."""
        self.model.train()
        wide = torch.float64 if self.device.type != "mps" else torch.float32  # where nobody shares a model
        self.total = torch.tensor(total, dtype=wide, device=self.device)

    def step(self, parts: Sequence[MicroBatch], lr: float) -> None:
        self.gradient.zero_()
        for number, part in enumerate(parts, 1):
            with learning(), self._part(number == len(parts)):
                loss = self.loss(part, parts)
                self._scaler.scale(loss).backward()
            self.total += loss.detach()
        self._step(lr)

    def summed_loss(self) -> float:
        """Of the steps of this training so far."""
        if not math.isfinite(value := float(self._total())):
            raise NotFinite(f"the loss became {value}")
        return value

    def check(self) -> None:
        """Nothing that is not a number leaves a worker: it would be in every average from then on."""
        if not self.finite():
            raise NotFinite("the weights, or the optimizer's moments of them, are not finite after training")

    def finite(self) -> bool:
        return all(bool(each.isfinite().all()) for each in (self.vector, self.moments))

    def eval_loss(self, windows: Tensor) -> float:
        """Their loss, without learning from them."""
        self.model.eval()
        with torch.inference_mode():
            return float(self.loss(windows))

    def loss(self, part: MicroBatch, step: Sequence[MicroBatch] = ()) -> Tensor:
        """Of a part of a step, its share; of a part by itself, all of it."""
        there = sent(part, self.device) if isinstance(part, Tensor) else part.to(self.device, non_blocking=True)
        return self._objective(self.answer, there, step or [part])

    def seed(self, value: int) -> None:
        """Of dropout, where a model has it. torch.manual_seed would note a whole stack for each absent device."""
        torch.default_generator.manual_seed(value)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(value)

    def buffer(self, kind: str) -> Tensor:
        """Its weights or its moments, as one vector to read."""
        return self.vector if kind == WEIGHTS else self.moments

    def filling(self, kind: str) -> AbstractContextManager[Tensor]:
        """A vector to write its weights or its moments into."""
        return contextlib.nullcontext(self.buffer(kind))

    def load_weights(self, vector: Tensor) -> None:
        with self.filling(WEIGHTS) as room:
            room.copy_(vector)

    def reset_optimizer(self) -> None:
        """An optimizer that has seen nothing."""
        with self.filling(MOMENTS) as room:
            room.zero_()
        self.load_optimizer_state(
            {"steps": 0.0, "scaling": torch.amp.GradScaler(self.device.type, enabled=self._scaling).state_dict()}
        )

    def state(self) -> dict[str, Any]:
        """What belongs to the optimizer besides its moments."""
        return {"steps": self._optimizer.steps, "scaling": self._scaler.state_dict()}

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        self._optimizer.steps = state["steps"]
        if self._scaling and state["scaling"]:
            self._scaler.load_state_dict(dict(state["scaling"]))

    # -- inside: what is otherwise where several processes share a model ----------------------------------------------

    def _bound(self, model: PreTrainedModel) -> tuple[VectorLayout, Tensor, Tensor]:
        """All that learns in one vector, its gradients in another."""
        layout = layout_of(model)
        return layout, *bound_to_vector(model, layout, self.device)

    def _runner(self, model: PreTrainedModel) -> Callable[..., Any]:
        if self.config.compile is not True:
            return model
        chunked_loss.try_out(model)  # afterwards it is what it is
        return torch.compile(model)

    def _part(self, last: bool) -> AbstractContextManager[Any]:
        """Around each part of a step."""
        return contextlib.nullcontext()

    def _total(self) -> Tensor:
        return self.total

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._optimizer.whole, self.config.clip)

    def _orthogonal(self, matrices: Tensor, stack: Stack) -> Tensor:
        """For Muon, of its matrices or of what is here of them."""
        return orthogonal(matrices)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _step(self, lr: float) -> None:
        self._scaler.unscale_(self._optimizer)
        if self.config.clip:
            self._clip()
        self._optimizer.param_groups[0]["lr"] = lr
        self._scaler.step(self._optimizer)
        self._scaler.update()

"""The inner loop: AdamW on one model, plain and fast. Everything that it needs to go on lies in three flat vectors."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from train.config import TrainConfig
from train.model import Layout, bound_to_vector, layout_of

_BETAS, _EPS = (0.9, 0.95), 1e-8
_FLOOR = 0.1  # of the learning rate, at the last step of a schedule that falls
_LOOK = 20  # steps between two looks at whether the loss is finite: looking waits for the device
_MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}

Part = Any  # of a step's batch: a tensor of windows, or a record that can be moved to a device
Objective = Callable[[Callable[..., Any], Part, Sequence[Part]], Tensor]  # a part's share in the loss of its step


class NotFinite(ValueError):
    """The loss is not a number any more."""


def best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def in_fixed_order(threads: int) -> None:
    """The same sums in the same order, each time, on this kind of machine."""
    torch.set_num_threads(threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it CUDA's sums have no fixed order
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs a tenth of the speed
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its gradients are summed in no fixed order


def rate(config: TrainConfig, step: float) -> float:
    """The learning rate at a global step: a closed form, so that nothing about it has to be remembered."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    match config.lr_schedule:
        case "cosine":
            return config.lr * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2)
        case "linear":
            return config.lr * (1 - (1 - _FLOOR) * done)
    return config.lr


def language_loss(model: Callable[..., Any], windows: Tensor, step: Sequence[Tensor] = ()) -> Tensor:
    """Of windows of text: each token but the first is to be foretold."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()) / max(1, len(step))


class Learner:
    """A model in this process's memory, with its optimizer; it is told everything that makes a difference. Only
    parameters that require a gradient learn."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainConfig,
        device: torch.device | None = None,
        objective: Objective = language_loss,
    ) -> None:
        self.config, self.device, self._objective = config, device or best_device(), objective
        self.layout, self.vector, self.gradient = self._bound(model)
        self.moments = [torch.zeros_like(self.vector) for _ in range(2)]
        self.model = model
        self._run = self._runner(model)
        self._dtype = _MIXED.get(config.precision)
        self._scaling = config.precision == "fp16-mixed"
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self._scaling)
        self._whole = torch.nn.Parameter(self.vector)
        self._whole.grad = self.gradient
        self._optimizer = self._adamw()

    def train(self, batches: Iterable[list[Part]], rates: Iterable[float], total: float = 0.0) -> Iterator[int]:
        """Take a step for each batch, and say after each how many were taken. A batch may come in parts. The losses
        are added to `total`."""
        self.begin(total)
        for count, (parts, lr) in enumerate(zip(batches, rates, strict=False), 1):
            self.step(parts, lr)
            if count % _LOOK == 0:
                self.summed_loss()
            yield count

    def begin(self, total: float = 0.0) -> None:
        """Of a training whose losses so far add up to this."""
        self.model.train()
        self.total = torch.tensor(total, device=self.device)

    def step(self, parts: Sequence[Part], lr: float) -> None:
        self.gradient.zero_()
        for number, part in enumerate(parts, 1):
            with self._part(number == len(parts)):
                loss = self.loss(part, parts)
                self._scaler.scale(loss).backward()
            self.total += loss.detach()
        self._step(lr)

    def summed_loss(self) -> float:
        """Of the steps of this training so far."""
        if not math.isfinite(value := float(self._total())):
            raise NotFinite(f"the loss became {value}")
        return value

    def looked_at(self, windows: Tensor) -> float:
        """Their loss, without learning from them."""
        self.model.eval()
        with torch.inference_mode():
            return float(self.loss(windows))

    def loss(self, part: Part, step: Sequence[Part] = ()) -> Tensor:
        """Of a part of a step, its share; of a part by itself, all of it."""
        return self._objective(self._answer, part.to(self.device, non_blocking=True), step or [part])

    def seed(self, value: int) -> None:
        """Of dropout, where a model has it. torch.manual_seed would note a whole stack for each absent device."""
        torch.default_generator.manual_seed(value)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(value)

    def whole(self, vector: Tensor) -> Tensor:
        """One of this learner's vectors, to be read or written down."""
        return vector

    @contextlib.contextmanager
    def filling(self, vector: Tensor) -> Iterator[Tensor]:
        """Room for the numbers that one of this learner's vectors is to have."""
        yield vector

    def start(self, vector: Tensor) -> None:
        with self.filling(self.vector) as room:
            room.copy_(vector)

    def forget(self) -> None:
        """An optimizer that has seen nothing."""
        for moment in self.moments:
            moment.zero_()
        self.recall(
            {"steps": 0.0, "scaling": torch.amp.GradScaler(self.device.type, enabled=self._scaling).state_dict()}
        )

    def state(self) -> dict[str, Any]:
        """What belongs to the optimizer besides its moments."""
        step = next(iter(self._optimizer.state.values()))["step"]
        return {"steps": float(step), "scaling": self._scaler.state_dict()}

    def recall(self, state: Mapping[str, Any]) -> None:
        for each in self._optimizer.state.values():
            each["step"].fill_(state["steps"])
        if self._scaling:
            self._scaler.load_state_dict(dict(state["scaling"]))

    # -- inside: what is otherwise where several processes share a model ----------------------------------------------

    def _bound(self, model: PreTrainedModel) -> tuple[Layout, Tensor, Tensor]:
        """All that learns in one vector, its gradients in another."""
        layout = layout_of(model)
        return layout, *bound_to_vector(model, layout, self.device)

    def _runner(self, model: PreTrainedModel) -> Callable[..., Any]:
        return torch.compile(model) if self.config.compile else model

    def _part(self, last: bool) -> AbstractContextManager[Any]:
        """Around each part of a step."""
        return contextlib.nullcontext()

    def _total(self) -> Tensor:
        return self.total

    def _clip(self) -> None:
        torch.nn.utils.clip_grad_norm_([self._whole], self.config.clip)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _answer(self, **asked: Any) -> Any:
        with self._precision():
            return self._run(**asked)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)

    def _adamw(self) -> torch.optim.AdamW:
        """On two long vectors, what decays and what does not: AdamW does not care where a tensor ends. Its state is a
        view of ours."""
        cut, groups, states = self.layout.decaying, [], {}
        for place, decay in ((slice(0, cut), self.config.weight_decay), (slice(cut, self.layout.size), 0.0)):
            if place.start < place.stop:
                part = torch.nn.Parameter(self.vector[place])
                part.grad = self.gradient[place]
                groups.append({"params": [part], "weight_decay": decay})
                average, square = (moment[place] for moment in self.moments)
                states[part] = {"exp_avg": average, "exp_avg_sq": square}
        optimizer = torch.optim.AdamW(groups, lr=self.config.lr, betas=_BETAS, eps=_EPS, fused=True)
        for part, state in states.items():
            optimizer.state[part] = {**state, "step": torch.zeros((), device=self.device)}
        return optimizer

    def _step(self, lr: float) -> None:
        self._scaler.unscale_(self._optimizer)
        if self.config.clip:
            self._clip()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._scaler.step(self._optimizer)
        self._scaler.update()

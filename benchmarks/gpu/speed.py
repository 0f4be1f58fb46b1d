"""Tokens a second and what share of the GPU's arithmetic they are, beside a bare loop and transformers.Trainer, in one
process; and the memory that each takes, beside the formula of train.memory.

Operations of a token are counted as 6 for each parameter but the table of words, and 12 x layers x hidden size x T for
attention. The limit beside it is one large product of bf16 matrices, measured in the same process.
"""

import copy
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.running import say_row
from benchmarks.train_loop import bare_optimizers
from train.kernels import in_fixed_order
from train.learner import Learner, MicroBatch, Objective, best_device
from train.memory import largest_batch, memory_of
from train.model import built, described, without_numbers
from train.objectives import sft_loss
from train.packing import Batch
from train.training_config import TrainConfig

WORDS, MOST_BATCH = 32000, 16
TOY = {"config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}}
_MADE: list[Any] = []  # one preset a process
_ROOM = 0.9  # of the memory that is free: the allocator leaves gaps


@dataclass(frozen=True)
class Trial:
    """What is trained, where, and how many steps count after the first ones, in which kernels are made and chosen."""

    config: TrainConfig
    device: torch.device
    warm: int = 4
    timed: int = 12

    @property
    def steps(self) -> int:
        return self.warm + self.timed

    def windows(self) -> Tensor:
        return torch.randint(self.config.vocab_size, (self.config.batch_size, self.config.seq_length + 1))


class Stopwatch:
    """It waits for the device twice only: after the first steps, and after the last."""

    def __init__(self, trial: Trial) -> None:
        self._trial, self._count, self._marks = trial, 0, list[float]()

    def step(self) -> None:
        self._count += 1
        if self._count in (self._trial.warm, self._trial.steps):
            self._marks.append(now(self._trial.device))

    @property
    def rate(self) -> float:
        c, (begin, end) = self._trial.config, self._marks
        return self._trial.timed * c.batch_size * c.seq_length / (end - begin)


def run(preset: str, length: int, dry: bool, compiles: bool = True) -> None:
    entry, words, length = (TOY, 512, length // 32) if dry else (preset, WORDS, length)
    device = best_device()
    config = TrainConfig(
        initial_population=(entry,), vocab_size=words, seq_length=length, batch_size=1, precision="bf16-mixed",
        inner_optimizer="adamw",
    )  # fmt: skip
    room = _ROOM * torch.cuda.mem_get_info()[0] if device.type == "cuda" else 8e9
    if not (batch := min(2 if dry else MOST_BATCH, largest_batch(config, room))):
        needs = memory_of(config, 1).total / 1e9
        return say_row(model=preset, T=length, what=f"does not fit: {needs:.1f} GB of {room / 1e9:.1f} GB")
    config = config.model_copy(update={"batch_size": batch})
    limit, each = fastest(device, 256 if dry else 8192), operations(config)
    trial = Trial(config, device, 1, 1) if dry else Trial(config, device)
    for what, rate, tried in measures(trial, compiles):
        used = rate * each / limit / (3 if "evaluation" in what else 1)  # nothing goes back
        taken = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        say_row(
            **{"model": preset, "T": length, "batch": batch, "what": what, "tokens/s": rate, "MFU": used},
            **{"limit, TFLOP/s": limit / 1e12, "GB": taken, "formula, GB": memory_of(tried).total / 1e9},
        )


def measures(trial: Trial, compiles: bool) -> Iterator[tuple[str, float, TrainConfig]]:
    """What matters most first; each with the memory to itself."""
    ways: dict[str, Callable[[Trial], float]] = {
        "ours, compiled, deterministic": partial(ours, compiled=True, deterministic=True),
        "bare loop": bare,
        "ours, deterministic": partial(ours, compiled=False, deterministic=True),
        "transformers.Trainer": trainer,
        "ours, evaluation": evaluation,
        "ours, deterministic, Muon": partial(ours, compiled=False, deterministic=True),
        "ours, not deterministic": partial(ours, compiled=False, deterministic=False),
        "bare loop, compiled": partial(bare, compiled=True),
        "ours, compiled, not deterministic": partial(ours, compiled=True, deterministic=False),
    }
    for what, rate in ways.items():
        optimizer = {"inner_optimizer": "muon" if "Muon" in what else "adamw"}
        each = replace(trial, config=trial.config.model_copy(update=optimizer))
        if "compiled" in what and not compiles:
            continue
        gc.collect()
        torch._dynamo.reset()
        if trial.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found = rate(each)
        except torch.OutOfMemoryError as error:
            say_row(what=f"{what}: does not fit", why=str(error).splitlines()[0][:120])
            continue
        yield what, found, each.config


def ours(trial: Trial, compiled: bool, deterministic: bool, rows: Batch | None = None) -> float:
    learner = learner_of(trial, compiled, deterministic, None if rows is None else sft_loss)
    watch = Stopwatch(trial)
    part: MicroBatch = trial.windows() if rows is None else rows
    for _ in learner.train(repeat([part], trial.steps), repeat(1e-4)):
        watch.step()
    return watch.rate


def evaluation(trial: Trial) -> float:
    learner, windows, watch = learner_of(trial), trial.windows(), Stopwatch(trial)
    for _ in range(trial.steps):
        learner.eval_loss(windows)
        watch.step()
    return watch.rate


def learner_of(
    trial: Trial, compiled: bool = False, deterministic: bool = True, objective: Objective | None = None
) -> Learner:
    keys = {"compile": compiled, "deterministic": deterministic}
    known = {key: value for key, value in keys.items() if key in TrainConfig.model_fields}
    config = trial.config.model_copy(update=known)
    learner = Learner(model_of(config), config, objective=objective)
    in_fixed_order(torch.get_num_threads())
    if not deterministic:
        in_any_order()
    return learner


def model_of(config: TrainConfig) -> Any:
    """The same, each time; to make a large one takes a processor longer than all steps."""
    if not _MADE:
        _MADE.append(built(config.initial_population[0], config.vocab_size, 1))
    return copy.deepcopy(_MADE[0])


def in_any_order() -> None:
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_mem_efficient_sdp(True)


def bare(trial: Trial, compiled: bool = False) -> float:
    """As anybody would write it."""
    in_any_order()
    model: Any = model_of(trial.config)
    model.to(trial.device)
    optimizers, tokens, watch = bare_optimizers(model, "adamw"), trial.windows().to(trial.device), Stopwatch(trial)
    run = torch.compile(model) if compiled else model
    for _ in range(trial.steps):
        model.zero_grad()
        with torch.autocast(trial.device.type, torch.bfloat16):
            logits = run(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        watch.step()
    return watch.rate


def trainer(trial: Trial) -> float:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    in_any_order()
    c, watch = trial.config, Stopwatch(trial)

    class Clock(TrainerCallback):
        def on_step_end(self, *known: Any, **more: Any) -> None:
            watch.step()

    rows = torch.randint(c.vocab_size, (trial.steps * c.batch_size, c.seq_length))
    with tempfile.TemporaryDirectory() as place:
        settings = TrainingArguments(
            output_dir=place, per_device_train_batch_size=c.batch_size, max_steps=trial.steps, bf16=True,
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=trial.device.type == "cpu", dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        Trainer(model_of(c), settings, train_dataset=data, callbacks=[Clock()]).train()
    return watch.rate


def operations(config: TrainConfig) -> float:
    """Of a token that is learned."""
    shape = described(config.initial_population[0])
    shape.vocab_size = config.vocab_size
    numbers = sum(each.numel() for each in without_numbers(shape).parameters()) - shape.vocab_size * shape.hidden_size
    return 6.0 * numbers + 12.0 * shape.num_hidden_layers * shape.hidden_size * config.seq_length


def fastest(device: torch.device, size: int) -> float:
    """Operations a second of a bf16 product."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        begin = now(device)
        one @ other
        times.append(now(device) - begin)
    return 2.0 * size**3 / min(times)


def now(device: torch.device) -> float:
    """When all that was begun is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()

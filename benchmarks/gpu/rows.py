"""What fine-tuning learns from: rows of several examples, which a mask tells apart, or their bounds."""

import numpy as np
import torch

from benchmarks.gpu.running import say_row
from benchmarks.gpu.speed import TOY, WORDS, Trial, learner_of, ours
from train.chat_examples import Example
from train.learner import best_device
from train.packing import Batch, attends_by_bounds, bounded, chosen_rows, plan, widened
from train.training_config import TrainConfig


def run(preset: str, length: int, dry: bool) -> None:
    entry, words, length = (TOY, 512, length // 32) if dry else (preset, WORDS, length)
    device, size = best_device(), 2 if dry else 8
    config = TrainConfig(
        initial_population=(entry,), vocab_size=words, seq_length=length, batch_size=size, precision="bf16-mixed",
        inner_optimizer="adamw",
    )  # fmt: skip
    trial, rows = Trial(config, device, 1, 1) if dry else Trial(config, device), packed(config)
    able = attends_by_bounds(learner_of(trial).answer, length)
    for compiled in (False,) if dry else (True, False):
        for what, part in {"bounds": bounded(rows), "a mask": rows}.items() if able else [("a mask", rows)]:
            torch._dynamo.reset()
            rate = ours(trial, compiled, True, part)
            say_row(model=preset, T=length, batch=size, by=what, compiled=compiled, **{"tokens/s": rate})


def packed(config: TrainConfig) -> Batch:
    rng = np.random.default_rng(1)
    sizes = rng.integers(config.seq_length // 16, config.seq_length // 2, 16 * config.batch_size)
    some = [Example(rng.integers(0, config.vocab_size, n), np.arange(n) > n // 4) for n in sizes]
    rows = plan([*map(int, sizes)], config.seq_length)[: config.batch_size]
    return widened(chosen_rows(some, rows, True), config.seq_length, best_device())

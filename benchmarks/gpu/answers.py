"""What learning from rewards is made of: a model's own answers, drawn one token at a time, and the steps that learn of
them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.running import say_row
from benchmarks.gpu.speed import TOY, WORDS, Trial, learner_of, model_of, now
from train.kernels import looking
from train.learner import best_device
from train.packing import telling_apart
from train.rl import answering, grpo
from train.rl.grpo import Lesson, Settings, grpo_loss
from train.training_config import TrainConfig

_TEMPERATURE = 1.0


def run(preset: str, dry: bool) -> None:
    """Of 128 tokens' questions, answers of 128 tokens, by a model that has learned nothing and never ends one."""
    asked, room, groups = (8, 8, 2) if dry else (128, 128, 32)
    config = TrainConfig(
        initial_population=(TOY if dry else preset,), vocab_size=512 if dry else WORDS, seq_length=2 * (asked + room),
        batch_size=8, precision="bf16-mixed", inner_optimizer="adamw",
    )  # fmt: skip
    prompts = np.random.default_rng(1).integers(1, config.vocab_size, (groups, asked)).repeat(8, 0)
    lessons, rate = answered(config, prompts.tolist(), room)
    say_row(model=preset, what="answers", at_a_time=len(prompts), **{"tokens/s": rate})
    for by, told in (("bounds", True), ("a mask", False)):
        rate = learned(config, lessons, told)
        say_row(model=preset, what="learning from them", at_a_time=config.batch_size, by=by, **{"tokens/s": rate})


def answered(config: TrainConfig, prompts: list[list[int]], room: int) -> tuple[list[Lesson], float]:
    """And tokens a second, when the device has been asked once."""
    device, seeds = best_device(), range(len(prompts))
    model = model_of(config).to(device).eval()
    how = answering.Asking(_TEMPERATURE, room, (config.vocab_size,), len(prompts) * config.seq_length)
    with looking(device, config.precision):
        answering.answers(model, _Words(), prompts[:8], seeds[:8], replace(how, longest=4))
        begin = now(device)
        said = answering.answers(model, _Words(), prompts, seeds, how)
        seconds = now(device) - begin
    lessons = [Lesson.of(*pair, 1.0 - 2 * (n % 2)) for n, pair in enumerate(zip(prompts, said, strict=True))]
    return lessons, sum(len(each.tokens) for each in said) / seconds


def learned(config: TrainConfig, lessons: list[Lesson], told_apart: bool) -> float:
    device = best_device()
    learner = learner_of(Trial(config, device), objective=_loss)
    steps = grpo.steps_of(lessons, True, config.seq_length, config.batch_size, 1, _TEMPERATURE, device)
    parts = [part for step in steps for part in step]
    if told_apart:
        apart = telling_apart(learner.answer, [each.batch for each in parts])
        parts = [replace(each, batch=apart(each.batch)) for each in parts]
    parts = [grpo.with_first_logprobs(learner.answer, each, device) for each in parts]
    [*learner.train([[parts[0]]], [1e-5])]
    begin = now(device)
    [*learner.train([[each] for each in parts], [1e-5] * len(parts))]
    return sum(len(each.tokens) for each in lessons) / (now(device) - begin)


def _loss(model: Any, part: Any, step: Any = ()) -> torch.Tensor:
    return grpo_loss(model, part, step, s=Settings(0.2, 0.28, 0.0, 2.0))


class _Words:
    """Of a model whose words nobody reads."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return ""

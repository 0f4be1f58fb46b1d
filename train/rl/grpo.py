"""Group relative policy optimization: answers that were better than their group become likelier, worse ones less so."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from train import packing
from train.chat_examples import Example
from train.chunked_loss import IGNORE_INDEX, Model, token_nll
from train.kernels import sent
from train.packing import Batch
from train.rl.checkers import Said
from train.rl.rl_config import Grpo
from train.rl.rollouts import Group, advantages, rewards_differ


@dataclass(frozen=True)
class Lesson:
    """One answer to learn from: question and answer as tokens, of which the answer's count."""

    example: Example
    advantage: float
    logprobs: Sequence[float]  # of the answer's tokens, as who gave it said them

    @classmethod
    def of(cls, prompt: Sequence[int], said: Said, advantage: float) -> "Lesson":
        tokens = np.asarray([*prompt, *said.tokens], dtype=np.int32)
        return cls(Example(tokens, np.arange(len(tokens)) >= len(prompt)), advantage, said.logprobs)

    @property
    def tokens(self) -> NDArray[np.int32]:
        return self.example.tokens


@dataclass(frozen=True)
class LessonBatch:
    """Answers side by side. What belongs to tokens lies as they do, behind the first of each row."""

    batch: Batch
    advantage: Tensor
    behaviour: Tensor  # log-probabilities of who gave the answers
    first: Tensor  # those of the policy that the steps begin with
    temperature: float

    @property
    def count(self) -> int:
        """Tokens that are learned."""
        return self.batch.count

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "LessonBatch":
        names = ("advantage", "behaviour", "first")
        there: dict[str, Any] = {name: sent(getattr(self, name), device, non_blocking) for name in names}
        return replace(self, batch=self.batch.to(device, non_blocking), **there)


@dataclass(frozen=True)
class Settings:
    """Of the loss."""

    clip_low: float
    clip_high: float
    kl: float
    truncation: float


def settings_of(c: Grpo) -> Settings:
    return Settings(c.clip_low, c.clip_high, c.kl, c.truncation)


# -- the loss ----------------------------------------------------------------------------------------------------------


def token_losses(logprobs: Tensor, part: LessonBatch, s: Settings) -> Tensor:
    """Of each token. The ratio is to the policy that the steps began with; how far that one is from who gave the answer
    weighs the token, and never more than so much."""
    ratio = torch.exp(logprobs - part.first)
    weight = torch.exp(part.first - part.behaviour).clamp(max=s.truncation)
    clipped = ratio.clamp(1 - s.clip_low, 1 + s.clip_high)
    gain = torch.minimum(ratio * part.advantage, clipped * part.advantage)
    if not s.kl:
        return -weight * gain
    back = part.first - logprobs  # Schulman's estimate of the divergence, which is never below 0
    return -weight * (gain - s.kl * (torch.exp(back) - back - 1))


def grpo_loss(model: Model, part: LessonBatch, step: Sequence[LessonBatch] = (), *, s: Settings) -> Tensor:
    """The mean over learned tokens of the whole step, of which this part is its own tokens' share."""
    counts = _wanted(part.batch).flatten() != IGNORE_INDEX
    losses = token_losses(policy_logprobs(model, part), part, s).masked_fill(~counts, 0.0)
    return losses.sum() / sum(each.count for each in step or [part])


def policy_logprobs(model: Model, part: LessonBatch) -> Tensor:
    """Of each token behind the first of its row; 0 where it is none of an answer."""
    cool = model if part.temperature == 1 else _at(model, part.temperature)
    return -token_nll(cool, _wanted(part.batch), **part.batch.inputs, use_cache=False)


def _at(model: Model, temperature: float) -> Callable[..., Any]:
    def cooled(**asked: Any) -> Any:
        return SimpleNamespace(logits=model(**asked).logits / temperature)

    return cooled


def _wanted(batch: Batch) -> Tensor:
    return batch.tokens.masked_fill(~batch.learned, IGNORE_INDEX)[:, 1:]


# -- from rollouts to steps --------------------------------------------------------------------------------------------


def lessons(groups: Sequence[Group], weights: Mapping[str, float], by_spread: bool) -> list[Lesson]:
    """All answers of those groups that tell something."""
    found = list[Lesson]()
    for group in groups:
        rewards = group.rewards(weights)
        if not rewards_differ(rewards):
            continue
        for said, advantage in zip(group.answers, advantages(rewards, by_spread), strict=True):
            found.append(Lesson.of(group.prompt, said, advantage))
    return found


def batch_of(batch: Batch, order: Sequence[Lesson], temperature: float) -> LessonBatch:
    """A batch of these lessons' examples, numbered in this order."""
    advantage, behaviour = (torch.zeros(batch.tokens.shape) for _ in range(2))
    for number, lesson in enumerate(order):
        places = batch.learned & (batch.example == number)
        advantage[places], behaviour[places] = lesson.advantage, torch.tensor(lesson.logprobs)
    flat = [each[:, 1:].flatten() for each in (advantage, behaviour)]
    return LessonBatch(batch, flat[0], flat[1], flat[1], temperature)


@torch.no_grad()
def with_first_logprobs(model: Model, part: LessonBatch, device: torch.device) -> LessonBatch:
    """A batch with its tokens' log-probabilities under the policy before its first step."""
    return replace(part, first=policy_logprobs(model, part.to(device)).cpu())


def steps_of(
    some: Sequence[Lesson],
    packed: bool,
    length: int,
    rows_of_part: int,
    parts_of_step: int,
    temperature: float,
    device: torch.device,
) -> list[list[LessonBatch]]:
    """Steps, each of some parts, which are rows in which several answers stand, where the model can read such rows."""
    rows = packing.plan([len(each.example.tokens) for each in some], length, packed)
    parts = list[LessonBatch]()
    for n in range(0, len(rows), rows_of_part):
        chosen = rows[n : n + rows_of_part]
        batch = packing.chosen_rows([each.example for each in some], chosen, packed)
        order = [some[number] for row in chosen for number in row]
        parts.append(batch_of(packing.widened(batch, length, device), order, temperature))
    return [parts[n : n + parts_of_step] for n in range(0, len(parts), parts_of_step)]

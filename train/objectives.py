"""What fine-tuning makes smaller: the loss of answers (SFT), or of preferences (DPO)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from train import chat_examples, packing, text_sources
from train.chat_examples import ChatExamples, Example
from train.chunked_loss import IGNORE_INDEX, Model, summed_nll, token_nll
from train.kernels import sent
from train.learner import Learner
from train.packing import Batch
from train.posttrain.posttrain_config import PosttrainConfig


@dataclass(frozen=True)
class Comparison:
    """Pairs of answers: those of even numbers are chosen, the next ones rejected."""

    batch: Batch
    reference: Tensor  # what the model that it began as says of each: its log-probability

    @property
    def count(self) -> int:
        return self.batch.examples // 2

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Comparison":
        return Comparison(self.batch.to(device, non_blocking), sent(self.reference, device, non_blocking))


def sft_loss(model: Model, batch: Batch, step: Sequence[Batch] = ()) -> Tensor:
    """The mean over learned tokens of the whole step, of which this part is the share that its own tokens have: a token
    counts the same in whichever part of a step it stands. Without a step, of the part."""
    count = sum(part.count for part in step or [batch])
    return summed_nll(model, _wanted(batch), **batch.inputs, use_cache=False) / count


def answer_logprobs(model: Model, batch: Batch) -> Tensor:
    """Of each example, by its number: the sum over its learned tokens."""
    nats = token_nll(model, _wanted(batch), **batch.inputs, use_cache=False)
    owner = batch.example[:, 1:].flatten().clamp(min=0)  # nothing is learned of the filling
    return -nats.new_zeros(batch.examples).index_add(0, owner, nats)


def reward_margin(
    chosen: Tensor, rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, beta: float
) -> Tensor:
    """By how much the better answer's reward is above the worse one's: beta times what each has gained in summed
    log-probability since the beginning."""
    return beta * ((chosen - reference_chosen) - (rejected - reference_rejected))


def dpo_loss(margin: Tensor) -> Tensor:
    """Direct preference optimization (Rafailov and others, 2023), for each pair."""
    return -logsigmoid(margin)


def preference_loss(model: Model, part: Comparison, step: Sequence[Comparison] = (), *, beta: float = 0.1) -> Tensor:
    """The mean over the pairs of the whole step, of which this part is its pairs' share."""
    return dpo_loss(margins(model, part, beta)).sum() / sum(each.count for each in step or [part])


def margins(model: Model, part: Comparison, beta: float) -> Tensor:
    """Of each pair."""
    said, before = answer_logprobs(model, part.batch), part.reference
    return reward_margin(said[0::2], said[1::2], before[0::2], before[1::2], beta)


def preference_measures(model: Model, part: Comparison, beta: float) -> Mapping[str, Tensor]:
    """Sums over the pairs: of the loss; of how many are in the right order, of equal ones half; of the margins."""
    found = margins(model, part, beta)
    right = (found > 0).sum() + (found == 0).sum() / 2
    return {"held_out": dpo_loss(found).sum(), "reward_accuracy": right, "reward_margin": found.sum()}


def _wanted(batch: Batch) -> Tensor:
    """Of each row, what comes behind its tokens but the last, where it is learned."""
    return batch.tokens.masked_fill(~batch.learned, IGNORE_INDEX)[:, 1:]


# -- the ways to learn ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingObjective:
    """Of one value of MUTATION."""

    check: text_sources.Check  # of a row of its data sets
    examples: Callable[..., ChatExamples]  # of such rows
    loss: Callable[[PosttrainConfig], Callable[..., Tensor]]
    part: Callable[[Learner, Batch], Any] = lambda learner, batch: batch  # of a step, before anything is learned
    pairs: bool = False  # a row is two examples, the better answer before the worse one


def _compared(learner: Learner, batch: Batch) -> Comparison:
    """In the precision of what is compared with it: margins begin at nothing."""
    with torch.no_grad():
        learner.model.eval()
        return Comparison(batch, answer_logprobs(learner.answer, batch.to(learner.device)).cpu())


OBJECTIVES: Mapping[str, TrainingObjective] = {  # the names stand in train.posttrain.posttrain_config, too
    "sft": TrainingObjective(text_sources.conversation, chat_examples.examples, lambda c: sft_loss),
    "dpo": TrainingObjective(
        text_sources.preference,
        chat_examples.pairs,
        lambda c: partial(preference_loss, beta=c.dpo_beta),
        _compared,
        pairs=True,
    ),
}


def objective_of(c: PosttrainConfig) -> TrainingObjective:
    """Where nobody learns, rows are those of sft: they only measure."""
    return OBJECTIVES.get(c.mutation, OBJECTIVES["sft"])


def steps_of(c: PosttrainConfig, model: Any, examples: Sequence[Example]) -> list[list[Batch]]:
    """Steps, each of some batches: rows in which several examples stand, where the model can read such rows."""
    objective = objective_of(c)
    packed = not objective.pairs and packing.can_pack(model, min(64, c.seq_length))
    rows = packing.plan([len(example.tokens) for example in examples], c.seq_length, packed)
    size, several = c.batch_size * (2 if objective.pairs else 1), c.gradient_accumulation
    batches = [packing.chosen_rows(examples, rows[n : n + size], packed) for n in range(0, len(rows), size)]
    return [batches[n : n + several] for n in range(0, len(batches), several)]


def with_first_logprobs(c: PosttrainConfig, learner: Learner, steps: Sequence[Sequence[Batch]]) -> list[list[Any]]:
    """Each batch with what the objective needs of the model as it is before the first step; on a GPU in a few widths,
    where it can without masks."""
    begin, device = objective_of(c).part, learner.device
    wide = [[packing.widened(batch, c.seq_length, device) for batch in step] for step in steps]
    told_apart = packing.telling_apart(learner.answer, [batch for step in wide for batch in step])
    return [[begin(learner, told_apart(batch)) for batch in step] for step in wide]

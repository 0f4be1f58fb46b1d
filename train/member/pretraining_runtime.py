"""What a worker keeps in its memory from one recipe to the next: a model that learns, is evaluated, and says what it
has learned in messages."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleet.work import InputMember, Work
from train.batches import TokenFile, batch, held_windows, owned
from train.learner import Learner, MicroBatch, rate
from train.member import inner_loop, vectors
from train.member.exchange_tasks import outer_of
from train.member.global_model import GlobalModel
from train.member.inner_loop import Metrics
from train.member.own_fragments import OwnFragments
from train.member.vectors import FillStart, Moment
from train.model import empty, read_config
from train.optimizers import MOMENTS, WEIGHTS
from train.pretraining_genome import Genome, fittest, inherited
from train.recipe_arguments import FIRST, Turn, token_files
from train.seeds import mixed
from train.splits import EvalSplit
from train.token_budget import held_count, origin_of
from train.training_config import TrainConfig
from train.vector_layout import VectorLayout
from train.verdicts import NotFinite

CONFIG = "config.json"
SCALING = "scaling.json"  # of fp16's gradients


class PretrainingRuntime:
    def __init__(self, config: TrainConfig) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.config = config
        self.outer, self.usual = outer_of(config), Genome()
        self.global_model, self.own = GlobalModel(), OwnFragments(config.comes_late)
        self._learner: Learner | None = None

    def learner(self, work: Work) -> Learner:
        """The run's model; which weights are in it, its user knows."""
        if self._learner is None:
            model = work.inputs[FIRST].read(CONFIG)
            if self.config.devices_per_worker > 1:
                from train.cluster.process_group import Leader  # which takes a while to import

                self._learner = Leader(model, self.config)
            else:
                shape = read_config(model, self.config)
                self._learner = Learner(empty(shape, 0, self.config.trust_remote_code), self.config)
        return self._learner

    # -- training -----------------------------------------------------------------------------------------------------

    def layout(self, work: Work) -> VectorLayout:
        return self.learner(work).layout

    def train(
        self, work: Work, turn: Turn, start: Tensor, fill_start: FillStart, genome: Genome
    ) -> tuple[Tensor, Metrics]:
        """The inner loop on the slot's own batches: the weights that it ends with. `fill_start` fills
        what the optimizer begins with."""
        c, learner = self.config, self.learner(work)
        sources, weights = self._token_files(work, "train"), genome.weights([each.weight for each in c.datasets])

        def begin() -> None:
            learner.load_weights(start)
            self.inherit(work, turn, fill_start)

        def batch_of(step: int) -> list[MicroBatch]:
            numbers = (owned(c, turn.slot, turn.round, step, part) for part in range(c.gradient_accumulation))
            return [batch(sources, weights, each, c.seed) for each in numbers]

        before = c.steps_before(turn.round)
        total = inner_loop.train(
            work,
            learner,
            begin,
            turn.steps,
            batch_of,
            rate=lambda step: genome.rate_factor * rate(c, before + step),
            seed=lambda step: mixed(c.seed, turn.round, turn.slot, step) & 0x7FFFFFFF,
            said=self.own.said,
        )
        tokens = turn.steps * c.gradient_accumulation * c.batch_size * c.seq_length
        return learner.buffer(WEIGHTS).cpu(), {"train_loss": total / turn.steps, "tokens": tokens}

    def inherit(self, work: Work, turn: Turn, fill_start: FillStart) -> None:
        """The optimizer as a member finds it: moments that others have made, too, and the slot's own scaling."""
        learner = self.learner(work)
        learner.reset_optimizer()
        if turn.round > 1 and self.config.keeps_moments:
            with learner.filling(MOMENTS) as room:
                for moment, part in zip(self.moments_of(work), self._divided(work, room), strict=True):
                    fill_start(moment.stem, part)
            scaling = json.loads(parent.read(SCALING)) if (parent := _before(work, turn, SCALING)) else {}
            learner.load_optimizer_state({"steps": float(self.config.steps_before(turn.round)), "scaling": scaling})

    def moments(self, work: Work) -> Iterator[tuple[Moment, Tensor]]:
        """What a member has learned about its gradients."""
        if not (kinds := self.moments_of(work)):
            return
        if scaling := self.learner(work).state()["scaling"]:
            work.write(SCALING, json.dumps(scaling).encode())
        yield from zip(kinds, self._divided(work, self.learner(work).buffer(MOMENTS)), strict=True)

    def moments_of(self, work: Work) -> tuple[Moment, ...]:
        """As they travel."""
        return self._counted(work.inputs[FIRST])

    def first_moments(self, parent: InputMember) -> Iterator[tuple[Moment, Tensor]]:
        return ((moment, torch.zeros(moment.count)) for moment in self._counted(parent))

    def averaged(self, old: InputMember, replicas: Sequence[InputMember]) -> tuple[Moment, ...]:
        """Of all replicas, in a shard."""
        return self._counted(old)

    def _counted(self, member: InputMember) -> tuple[Moment, ...]:
        counts = member.metrics
        return vectors.moments_of(self.config, counts["parameters"], counts["moments"])

    def _divided(self, work: Work, whole: Tensor) -> list[Tensor]:
        return [*whole.split([moment.count for moment in self.moments_of(work)])]

    # -- genomes ------------------------------------------------------------------------------------------------------

    def inherited(self, turn: Turn, parents: Sequence[Mapping[str, Any]]) -> Genome:
        return inherited(self.config, turn.slot, turn.round, parents)

    def fittest(self, parents: Sequence[Mapping[str, Any]]) -> Genome:
        return fittest(parents, len(self.config.datasets))

    def advice(self, genome: Genome) -> str:
        """To whoever's training diverges."""
        return inner_loop.slower(genome.rate_factor * self.config.lr)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, work: Work, weights: Tensor, on: EvalSplit) -> Metrics:
        """On text for validation, which selects, or for the test, which reports."""
        learner = self.learner(work)
        learner.load_weights(weights)
        metrics = evaluated(learner.eval_loss, self._token_files(work, on), self.config, on)
        sources = [work.inputs[id].metrics for id in token_files(self.config)]
        return metrics | bits_per_byte(metrics["loss"], sources, self.config, on)

    def _token_files(self, work: Work, part: str) -> list[TokenFile]:
        return token_files_of([work.inputs[id] for id in token_files(self.config)], part, self.config)

    # -- the exchange -------------------------------------------------------------------------------------------------

    def exchanged(self, work: Work) -> list[tuple[str, int, str]]:
        """Of what a member goes on from: its stem, how many numbers, and the wire that they go through."""
        count, wire = work.inputs[FIRST].metrics["parameters"], self.config.wire
        state = [(stem, count, wire) for stem in vectors.outer_stems(self.outer)]
        return state + [(moment.stem, moment.count, moment.wire) for moment in self.moments_of(work)]


def token_files_of(parents: list[InputMember], part: str, config: TrainConfig) -> list[TokenFile]:
    """Of each source, the tokens to learn from, for validation, or for the test."""
    return [
        TokenFile.open(each.path(part), each.metrics["dtype"], config.seq_length + 1, *origin_of(config, number))
        for number, each in enumerate(parents)
    ]


def evaluated(loss_of: Callable[[Tensor], float], sources: list[TokenFile], config: TrainConfig, on: str) -> Metrics:
    """Loss a token, and perplexity, over the held-out windows of all sources: always the same windows."""
    loss = mean_loss(loss_of, held_windows(sources, config, on), config.eval_batch_size)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def mean_loss(loss_of: Callable[[Tensor], float], windows: Sequence[Sequence[int]], size: int) -> float:
    """Over windows, so many at a time."""
    rows, total = [torch.tensor(row) for row in windows], 0.0
    for begin in range(0, len(rows), size):
        batch = torch.stack(rows[begin : begin + size])
        total += loss_of(batch) * len(batch)
    if not math.isfinite(total):
        raise NotFinite(f"the loss on held-out text is {total}")
    return total / len(rows)


def bits_per_byte(loss: float, sources: Sequence[Mapping[str, Any]], config: TrainConfig, on: str) -> Metrics:
    """The same in a unit in which models of other tokens can be compared, where it is known how many bytes the held-out
    tokens of each source stand for."""
    windows = [held_count(config, number, on) for number in range(len(sources))]
    there = [(count, each) for count, each in zip(windows, sources, strict=True) if count]
    if not all(f"{on}_bytes" in each for _, each in there):
        return {}
    bytes = math.fsum(count * each[f"{on}_bytes"] / each[on] for count, each in there)
    return {"bits_per_byte": loss / math.log(2) * sum(windows) / bytes}


def _before(work: Work, turn: Turn, file: str) -> InputMember | None:
    """The slot's own last member, if it has such a file."""
    parent = work.inputs.get(turn.before)
    return parent if parent and file in parent.member.digests else None

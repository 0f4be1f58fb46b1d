"""What a worker keeps in its memory from one recipe to the next: a model that learns, is evaluated, and says what it
has learned in messages."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleet.work import Input, Work
from merge.outer import Outer
from merge.wire import WIRES
from train.batches import TokenFile, batch, held_count, held_windows, origin_of, owned
from train.config import TrainConfig
from train.genome import Genome
from train.loop import Learner, NotFinite, Part, rate
from train.member import inner_loop, vectors
from train.member.inner_loop import Metrics
from train.member.vectors import Joining
from train.model import empty, read_config
from train.optimizers import MOMENTS, WEIGHTS
from train.training_recipes import FIRST, Turn, token_files

CONFIG = "config.json"
_WORD, _PRIME = (1 << 64) - 1, (1 << 61) - 1
SCALING = "scaling.json"  # of fp16's gradients


def mixed(*numbers: int) -> int:
    """A number of 64 bits that follows from these (xxHash's lanes, in the constants of CPython's tuples): seeds of
    dropout are the same in every Python."""
    mixed = first = 2870177450012600261
    for number in numbers:
        mixed = (mixed + number % _PRIME * 14029467366897019727) & _WORD
        mixed = ((mixed << 31 | mixed >> 33) & _WORD) * 11400714785074694791 & _WORD
    return (mixed + (len(numbers) ^ first ^ 3527539)) & _WORD


class PretrainingRuntime:
    def __init__(self, config: TrainConfig) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.config = config
        self.outer = outer_of(config)
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

    def train(
        self, work: Work, turn: Turn, start: Tensor, join: Joining, genome: Genome = Genome()
    ) -> tuple[Tensor, Metrics]:
        """The inner loop on the slot's own batches: the weights that it ends with. `join` makes one optimizer of those
        of the parents."""
        c, learner = self.config, self.learner(work)
        sources, weights = self._sources(work, "train"), genome.weights([each.weight for each in c.datasets])

        def begin() -> None:
            learner.start(start)
            self.inherit(work, turn, join)

        def batch_of(step: int) -> list[Part]:
            numbers = (owned(c, turn.slot, turn.round, step, part) for part in range(c.gradient_accumulation))
            return [batch(sources, weights, each, c.seed) for each in numbers]

        before = c.steps_before(turn.round)
        total = inner_loop.train(
            work,
            learner,
            begin,
            turn.steps,
            batch_of,
            rate=lambda step: genome.rate * rate(c, before + step),
            seed=lambda step: mixed(c.seed, turn.round, turn.slot, step) & 0x7FFFFFFF,
        )
        tokens = turn.steps * c.gradient_accumulation * c.batch_size * c.seq_length
        return learner.whole(WEIGHTS).cpu(), {"train_loss": total / turn.steps, "tokens": tokens}

    def inherit(self, work: Work, turn: Turn, join: Joining) -> None:
        """The optimizer as a member finds it: moments that others have made, too, and the slot's own scaling."""
        learner = self.learner(work)
        learner.forget()
        if turn.round > 1 and self.config.keeps_moments:
            with learner.filling(MOMENTS) as room:
                join(vectors.parents_of(work), vectors.MOMENTS, room)
            scaling = json.loads(parent.read(SCALING)) if (parent := _before(work, turn, SCALING)) else {}
            learner.recall({"steps": float(self.config.steps_before(turn.round)), "scaling": scaling})

    def moments(self, work: Work) -> Tensor:
        """What a member has learned about its gradients; none, where nobody asks for it."""
        if not self.config.keeps_moments:
            return torch.empty(0)
        learner = self.learner(work)
        if scaling := learner.state()["scaling"]:
            work.write(SCALING, json.dumps(scaling).encode())
        return learner.whole(MOMENTS)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluate(self, work: Work, weights: Tensor) -> Metrics:
        learner = self.learner(work)
        learner.start(weights)
        metrics = evaluated(learner, self._sources(work, "held"), self.config)
        sources = [work.inputs[id].metrics for id in token_files(self.config)]
        return metrics | bits_per_byte(metrics["loss"], sources, self.config)

    def _sources(self, work: Work, part: str) -> list[TokenFile]:
        return sources([work.inputs[id] for id in token_files(self.config)], part, self.config)

    # -- messages -----------------------------------------------------------------------------------------------------

    def message(self, work: Work, turn: Turn, name: str, vector: Tensor) -> Tensor:
        """Error feedback: what the wire lost of the slot's last message of this name is added to this one."""
        if self.config.error_feedback and (parent := _before(work, turn, _residual(name))):
            residual = torch.empty_like(vector)
            vectors.load(parent, _residual(name), residual)
            vector = vector + residual
        return checked(vector)

    def arrived(self, message: Tensor) -> Tensor:
        """What there is of it at the other end of the wire."""
        wire = WIRES[self.config.wire_dtype]
        return wire.decode(wire.encode(message), len(message))

    def keep_residual(self, work: Work, name: str, message: Tensor) -> None:
        """What the wire will lose of this message."""
        if self.config.error_feedback:
            vectors.save(work, _residual(name), message - self.arrived(message))


def outer_of(config: TrainConfig) -> Outer:
    return Outer(config.outer_lr, config.outer_momentum, config.outer_nesterov)


def sources(parents: list[Input], part: str, config: TrainConfig) -> list[TokenFile]:
    """Of each source, the tokens to learn from or those that are held out."""
    return [
        TokenFile.open(each.path(part), each.metrics["dtype"], config.seq_length + 1, *origin_of(config, number))
        for number, each in enumerate(parents)
    ]


def evaluated(learner: Learner, sources: list[TokenFile], config: TrainConfig) -> Metrics:
    """Loss a token, and perplexity, over the held-out windows of all sources: always the same windows."""
    rows = [torch.tensor(row) for row in held_windows(sources, config)]
    total = 0.0
    for begin in range(0, len(rows), config.eval_batch_size):
        batch = torch.stack(rows[begin : begin + config.eval_batch_size])
        total += learner.looked_at(batch) * len(batch)
    if not math.isfinite(total):
        raise NotFinite(f"the loss on held-out text is {total}")
    loss = total / len(rows)
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def bits_per_byte(loss: float, sources: Sequence[Mapping[str, Any]], config: TrainConfig) -> Metrics:
    """The same in a unit in which models of other tokens can be compared, where it is known how many bytes the held-out
    tokens of each source stand for."""
    windows = [held_count(config, number) for number in range(len(sources))]
    there = [(count, each) for count, each in zip(windows, sources, strict=True) if count]
    if not all("held_bytes" in each for _, each in there):
        return {}
    bytes = math.fsum(count * each["held_bytes"] / each["held"] for count, each in there)
    return {"bits_per_byte": loss / math.log(2) * sum(windows) / bytes}


def checked(vector: Tensor) -> Tensor:
    """What is made of finite numbers may be too large for a number."""
    if not bool(vector.isfinite().all()):
        raise NotFinite("the weights and what changed them are too large for numbers")
    return vector


def _before(work: Work, turn: Turn, file: str) -> Input | None:
    """The slot's own last member, if it has such a file."""
    parent = work.inputs.get(turn.before)
    return parent if parent and file in parent.member.digests else None


def _residual(name: str) -> str:
    return f"residual-{name}"

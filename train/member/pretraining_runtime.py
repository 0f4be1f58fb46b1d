"""What a worker keeps in its memory from one recipe to the next, and how it trains."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.work import Input, Work
from merge.outer import Outer
from merge.wire import WIRES
from train.batches import TokenFile, batch, owned
from train.config import TrainConfig
from train.evaluate import evaluated
from train.genome import Genome
from train.loop import Learner, NotFinite, rate
from train.member import vectors
from train.model import empty, read_config
from train.optimizers import MOMENTS, WEIGHTS
from train.pretraining_tasks import Turn
from train.round_zero import FIRST, token_files

CONFIG = "config.json"
SCALING = "scaling.json"  # of fp16's gradients
MOMENTS_WIRE = "bf16"  # small ones count as much as large ones, in the square root that divides a step

Metrics = dict[str, Any]
Fill = Callable[[Tensor], None]  # puts into a vector what others have made


class PretrainingRuntime:
    def __init__(self, config: TrainConfig) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.config = config
        self.outer = outer_of(config)
        self._learner: Learner | None = None

    def learner(self, work: Work) -> Learner:
        """The run's model; which weights are in it, its user knows."""
        if self._learner is None:
            self._learner = _learner(work.inputs[FIRST].read(CONFIG), self.config)
        return self._learner

    def evaluate(self, work: Work) -> Metrics:
        """How good the weights are that are in the model now."""
        return dict(evaluated(self.learner(work), self.sources(work, "held"), self.config))

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, work: Work, turn: Turn, start: Tensor, moments: Fill, genome: Genome = Genome()) -> Metrics:
        """The inner loop, from the start or from where an earlier attempt got to."""
        learner, done, total = self.learner(work), 0, 0.0
        if saved := work.resume():
            done, total = saved.step, saved.state["total"]
            for kind in (WEIGHTS, MOMENTS):
                with learner.filling(kind) as room:
                    vectors.load(saved, kind, room)
            learner.recall(saved.state["optimizer"])
        else:
            learner.start(start)
            self.remember(work, turn, moments)

        def save(saver: Any) -> Mapping[str, Any]:
            total = learner.summed_loss()
            for kind in (WEIGHTS, MOMENTS):
                vectors.save(saver, kind, learner.whole(kind))
            return {"total": total, "optimizer": learner.state()}

        before = self.config.steps_before(turn.round)
        rates = (genome.rate * rate(self.config, before + n) for n in range(done, turn.steps))
        for step in learner.train(self._batches(work, turn, range(done, turn.steps), genome), rates, total):
            work.between_steps(done + step, save)
        learner.check()
        sequences = turn.steps * self.config.gradient_accumulation * self.config.batch_size
        return {"train_loss": learner.summed_loss() / turn.steps, "tokens": sequences * self.config.seq_length}

    def remember(self, work: Work, turn: Turn, moments: Fill) -> None:
        """The optimizer as a member finds it: moments that others have made, too, and the slot's own scaling."""
        learner = self.learner(work)
        learner.forget()
        if turn.round > 1 and self.remembers:
            with learner.filling(MOMENTS) as room:
                moments(room)
            scaling = json.loads(parent.read(SCALING)) if (parent := self._before(work, turn, SCALING)) else {}
            learner.recall({"steps": float(self.config.steps_before(turn.round)), "scaling": scaling})

    @property
    def remembers(self) -> bool:
        """Whether moments outlive a round."""
        return self.config.inner_optimizer_state == "average"

    def rate(self, genome: Genome = Genome()) -> float:
        """The highest that a genome makes of LR."""
        return genome.rate * self.config.lr

    def moments(self, work: Work) -> Tensor:
        """What a member has learned about its gradients; none, where nobody asks for it."""
        learner = self.learner(work)
        if self.remembers and (scaling := learner.state()["scaling"]):
            work.write(SCALING, json.dumps(scaling).encode())
        return learner.whole(MOMENTS) if self.remembers else torch.empty(0)

    def sources(self, work: Work, part: str = "train") -> list[TokenFile]:
        files, window = [work.inputs[id] for id in token_files(self.config)], self.config.seq_length + 1
        return [TokenFile.open(file.path(part), file.metrics["dtype"], window) for file in files]

    # -- what travels -------------------------------------------------------------------------------------------------

    def through(self, message: Tensor) -> Tensor:
        """What arrives of it at the other end."""
        wire = WIRES[self.config.wire_dtype]
        return wire.decode(wire.encode(message), len(message))

    def checked(self, vector: Tensor) -> Tensor:
        """What is made of finite numbers may be too large for a number."""
        if not bool(vector.isfinite().all()):
            raise NotFinite("the weights and what changed them are too large for numbers")
        return vector

    def message(self, work: Work, turn: Turn, name: str, vector: Tensor) -> Tensor:
        """Error feedback: what the wire lost of the slot's last message of this name is added to this one."""
        if self.config.error_feedback and (parent := self._before(work, turn, _residual(name))):
            residual = torch.empty_like(vector)
            vectors.load(parent, _residual(name), residual)
            vector = vector + residual
        return self.checked(vector)

    def keep_residual(self, work: Work, name: str, message: Tensor) -> None:
        """What the wire will lose of this message."""
        if self.config.error_feedback:
            vectors.save(work, _residual(name), message - self.through(message))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _before(self, work: Work, turn: Turn, file: str) -> Input | None:
        """The slot's own last member, if it has such a file."""
        parent = work.inputs.get(turn.before)
        return parent if parent and file in parent.member.digests else None

    def _batches(self, work: Work, turn: Turn, steps: range, genome: Genome) -> Iterator[list[Tensor]]:
        c, round, slot = self.config, turn.round, turn.slot
        sources, weights = self.sources(work), genome.weights([each.weight for each in c.datasets])
        for step in steps:
            self.learner(work).seed(hash((c.seed, round, slot, step)) & 0x7FFFFFFF)
            parts = range(c.gradient_accumulation)
            yield [batch(sources, weights, owned(c, slot, round, step, part), c.seed) for part in parts]


def _residual(name: str) -> str:
    return f"residual-{name}"


def outer_of(config: TrainConfig) -> Outer:
    return Outer(config.outer_lr, config.outer_momentum, config.outer_nesterov)


def _learner(model: bytes, config: TrainConfig) -> Learner:
    if config.devices_per_worker > 1:
        from train.cluster.process_group import Leader  # which takes a while to import

        return Leader(model, config)
    return Learner(empty(read_config(model, config), 0, config.trust_remote_code), config)

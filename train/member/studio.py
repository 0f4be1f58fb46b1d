"""What a worker keeps in its memory from one recipe to the next, and how it trains."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.recipe import place
from fleet.work import Parent, Work
from merge.outer import Outer
from merge.wire import WIRES
from train.batches import Tokens, batch, owned
from train.config import TrainConfig
from train.evaluate import evaluated
from train.genome import Genome
from train.loop import Learner, NotFinite, in_fixed_order, rate
from train.member import vectors
from train.model import empty, read_config

CONFIG = "config.json"
AVERAGE, SQUARE, STATE = "average.safetensors", "square.safetensors", "optimizer.json"  # AdamW's
RESIDUAL = "residual.safetensors"

Metrics = dict[str, Any]


class Studio:
    def __init__(self, config: TrainConfig) -> None:
        in_fixed_order(config.threads)
        self.config = config
        self.outer = Outer(config.outer_lr, config.outer_momentum, config.outer_nesterov)
        self._learner: Learner | None = None
        self._holds = ""  # the checksum of the optimizer's state that is in memory

    def learner(self, work: Work) -> Learner:
        """The run's model; which weights are in it, its user knows."""
        if self._learner is None:
            self._learner = _learner(named(work, "init-0").read(CONFIG), self.config)
        return self._learner

    def evaluate(self, work: Work) -> Metrics:
        """How good the weights are that are in the model now."""
        return dict(evaluated(self.learner(work), self.sources(work, "held"), self.config))

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, work: Work, start: Tensor, genome: Genome = Genome()) -> Metrics:
        """The inner loop, from the start or from where an earlier attempt got to."""
        learner, round = self.learner(work), work.recipe.train["round"]
        steps = genome.steps(work.recipe.train["steps"])
        done, total, held = 0, 0.0, self._holds
        self._holds = ""  # what is in memory is nobody's until it is published
        if saved := work.resume():
            done, total = saved.step, saved.state["total"]
            with learner.filling(learner.vector) as room:
                vectors.load(saved, "vector", room)
            _load_optimizer(saved, learner, saved.state["optimizer"])
        else:
            learner.start(start)
            self._recall(work, learner, held)

        def save(saver: Any) -> Mapping[str, Any]:
            vectors.save(saver, "vector", learner.whole(learner.vector))
            _save_optimizer(saver, learner)
            return {"total": learner.summed_loss(), "optimizer": learner.state()}

        rates = (genome.rate * rate(self.config, self._global_step(round, n / steps)) for n in range(done, steps))
        for step in learner.train(self._batches(work, range(done, steps), genome), rates, total):
            work.between_steps(done + step, save)
        sequences = steps * len(self._slots(work)) * self.config.gradient_accumulation * self.config.batch_size
        return {"train_loss": learner.summed_loss() / steps, "tokens": sequences * self.config.seq_length}

    def keep_optimizer(self, work: Work) -> None:
        """It is part of the member; and it stays in memory for the slot's next one."""
        if self.config.inner_optimizer_state == "keep":
            learner = self.learner(work)
            state = json.dumps(learner.state()).encode()
            work.write(STATE, state)
            self._holds = _save_optimizer(work, learner) + hashlib.sha256(state).hexdigest()

    def sources(self, work: Work, part: str = "train") -> list[Tokens]:
        parents = [named(work, f"tokens-{number}") for number in range(len(self.config.datasets))]
        window = self.config.seq_length + 1
        return [Tokens.open(parent.path(part), parent.metrics["dtype"], window) for parent in parents]

    # -- what travels -------------------------------------------------------------------------------------------------

    def through(self, vector: Tensor, wire: str) -> Tensor:
        """What arrives of it at the other end."""
        return WIRES[wire].decode(WIRES[wire].encode(vector), len(vector))

    def checked(self, vector: Tensor) -> Tensor:
        """Nothing that is not a number leaves a worker: it would be in every average from then on."""
        if not bool(vector.isfinite().all()):
            raise NotFinite("the weights are not finite after training")
        return vector

    def with_residual(self, work: Work, message: Tensor) -> Tensor:
        """Error feedback: what the wire lost of the slot's last message is added to this one, and what it will lose of
        this one is kept."""
        if self.config.error_feedback:
            parent = self._before(work)
            if parent and RESIDUAL in parent.member.digests:
                residual = torch.empty_like(message)
                vectors.load(parent, RESIDUAL, residual)
                message = message + residual
            vectors.save(work, RESIDUAL, message - self.through(message, self.config.wire_dtype))
        return message

    # -- inside -------------------------------------------------------------------------------------------------------

    def _before(self, work: Work) -> Parent | None:
        """The slot's own last member."""
        return work.parents.get(work.recipe.train.get("before", ""))

    def _recall(self, work: Work, learner: Learner, held: str) -> None:
        """The optimizer as the slot's last member left it: still in memory, or from its files."""
        parent = self._before(work)
        if parent is None or AVERAGE not in parent.member.digests:
            learner.forget()
        elif held != "".join(parent.member.digests[name] for name in (AVERAGE, SQUARE, STATE)):
            _load_optimizer(parent, learner, json.loads(parent.read(STATE)))

    def _batches(self, work: Work, steps: range, genome: Genome) -> Iterator[list[Tensor]]:
        c, round, slots = self.config, work.recipe.train["round"], self._slots(work)
        sources, weights = self.sources(work), genome.weights([each.weight for each in c.datasets])
        for step in steps:
            self.learner(work).seed(hash((c.seed, round, slots[0], step)) & 0x7FFFFFFF)
            yield [
                batch(sources, weights, owned(c, slot, round, step, part), c.seed)
                for slot in slots
                for part in range(c.gradient_accumulation)
            ]

    def _slots(self, work: Work) -> range:
        """Whose batches it trains on: its own, or in round 0 everybody's."""
        slot = work.recipe.train.get("slot")
        return range(self.config.population_size) if slot is None else range(slot, slot + 1)

    def _global_step(self, round: int, share: float) -> float:
        """For the learning rate: however many steps a member takes, a round is as long as any other."""
        c = self.config
        return share * c.warm_start_steps if round == 0 else c.warm_start_steps + (round - 1 + share) * c.inner_steps


def _learner(model: bytes, config: TrainConfig) -> Learner:
    if config.devices_per_worker > 1:
        from train.cluster.group import Leader  # which takes a while to import

        return Leader(model, config)
    return Learner(empty(read_config(model, config), 0, config.trust_remote_code), config)


def named(work: Work, slot: str) -> Parent:
    """The parent in this slot."""
    (found,) = (parent for id, parent in work.parents.items() if place(id)[1] == slot)
    return found


def _save_optimizer(work: Any, learner: Learner) -> str:
    return "".join(
        vectors.save(work, name, learner.whole(moment))
        for name, moment in zip((AVERAGE, SQUARE), learner.moments, strict=True)
    )


def _load_optimizer(parent: Any, learner: Learner, state: Mapping[str, Any]) -> None:
    for name, moment in zip((AVERAGE, SQUARE), learner.moments, strict=True):
        with learner.filling(moment) as room:
            vectors.load(parent, name, room)
    learner.recall(state)

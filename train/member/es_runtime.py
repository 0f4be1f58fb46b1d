"""The model that evolution strategies move, in memory: from the weights published last on, by rewards alone."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fleet.work import Work
from train.member.posttraining_runtime import ChildModel, PosttrainingRuntime
from train.recipe_arguments import FIRST
from train.rl import es

Log = list[list[float]]  # of each round since the weights were published: what each pair counts


@dataclass
class Policy:
    """Where this process is."""

    weights: dict[str, Tensor]
    published: int  # the round whose weights it goes on from; 0: the given ones
    log: Log

    def reaches(self, published: int, log: Log) -> bool:
        """Without going back."""
        return self.published == published and log[: len(self.log)] == self.log


class EsRuntime(PosttrainingRuntime):
    _policy: Policy | None = None
    _start: Mapping[str, Tensor] | None = None
    _child: ChildModel | None = None

    def dismiss(self) -> None:
        self._policy = self._start = self._child = None
        super().dismiss()

    def at(self, work: Work, base: str, log: Log, round: int) -> Policy:
        """The model of a round, with the updates of those before it. Who has it in memory goes on there, also past the
        weights that somebody has published since; another one begins with these."""
        published = round - 1 - len(log)
        before: Log = logged(work, base)
        found = self._policy
        if found and before and found.published == published - len(before) and found.reaches(found.published, before):
            self._go_on(work, found, before)
            found.published, found.log = published, []
            for value in found.weights.values():
                value.copy_(value.to(self.dtype))  # as others read it
        if not (found and found.reaches(published, log)):
            found = self._policy = Policy(self._read(work, base), published, [])
        self._go_on(work, found, log)
        return found

    def child(self, work: Work) -> ChildModel:
        """A model to put weights into."""
        self._child = self._child or self.model_of(work, FIRST)
        return self._child

    def model_of(self, work: Work, id: str) -> ChildModel:
        """A member's, with its own weights for the time being."""
        recipe = {"merge_method": "passthrough", "models": [{"model": id}]}
        places: dict[str, Path] = {id: work.inputs[id].folder}
        return self.take_on(recipe, places)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is published. Small steps would be lost in narrow numbers."""
        found: torch.dtype = getattr(torch, self.config.dtype or "float32")
        return found

    def _go_on(self, work: Work, policy: Policy, log: Log) -> None:
        c = self.config
        how, first = es.Step(c.lr, c.weight_decay, c.of_es.rank), policy.published + 1
        start = self._begun(work) if c.weight_decay else {}
        for n in range(len(policy.log), len(log)):
            es.take(how, policy.weights, start, (c.seed, first + n), log[n])
            policy.log.append(log[n])

    def _begun(self, work: Work) -> Mapping[str, Tensor]:
        self._start = self._start or self._read(work, FIRST)
        return self._start

    def _read(self, work: Work, id: str) -> dict[str, Tensor]:
        model = self.model_of(work, id).live.model
        return {name: each.detach().clone() for name, each in model.named_parameters()}


def logged(work: Work, id: str) -> Log:
    """What a round's rewards came to, and those before it since weights were published."""
    found: Log = json.loads(str(work.inputs[id].metrics.get("log", "[]"))) if id else []
    return found


@torch.no_grad()
def filled(child: ChildModel, policy: Policy, key: Sequence[int] = (), sigma: float = 0.0, rank: int = 0) -> ChildModel:
    """With the policy's weights, or those of a neighbour."""
    for name, parameter in child.live.model.named_parameters():
        value = policy.weights[name]
        parameter.copy_(es.perturbed(value, key, name, sigma, rank) if sigma else value)
    return child

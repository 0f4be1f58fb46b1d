"""What a member inherits and mutates where the loop is the user's own: named values, of which the loop makes what it
likes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from train.own_loop_config import RATE, OwnLoopConfig
from train.parent_selection import unfitness
from train.pretraining_genome import first_rate, mutation
from train.training_config import RATES


@dataclass(frozen=True)
class LoopGenome:
    values: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """As it stands in a member's metrics, where its children find it."""
        return {_in_metrics(name): value for name, value in self.values.items()}


def usual(config: OwnLoopConfig) -> LoopGenome:
    """Of who inherits none."""
    return LoopGenome(dict(config.genes))


def fittest(config: OwnLoopConfig, parents: Sequence[Mapping[str, Any]]) -> LoopGenome:
    """That of the fittest parent; the first weights have none of their own."""
    best = min(parents, key=unfitness)
    return LoopGenome({name: float(best.get(_in_metrics(name), first)) for name, first in config.genes.items()})


def inherited(config: OwnLoopConfig, slot: int, round: int, parents: Sequence[Mapping[str, Any]]) -> LoopGenome:
    """The fittest parent's, mutated, each gene within some distance of where all began."""
    values, mutated = dict(fittest(config, parents).values), mutation(config, slot, round)
    if round == 1 and RATE in values:
        values[RATE] *= first_rate(config, slot)
    limits = {name: [first * factor for factor in RATES] for name, first in config.genes.items()}
    return LoopGenome({name: mutated(value, *limits[name]) for name, value in values.items()})


def _in_metrics(name: str) -> str:
    return f"genome_{name}"

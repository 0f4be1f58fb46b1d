"""What a member of EDT inherits and mutates: how fast it trains, and on which sources."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from train.exchange_config import ExchangeConfig
from train.parent_selection import unfitness
from train.training_config import RATES, TrainConfig

_SHARES = (0.1, 10.0)  # how far a source's weight may go from what the configuration says


@dataclass(frozen=True)
class Genome:
    """Factors on what the configuration says."""

    rate_factor: float = 1.0  # on LR
    shares: tuple[float, ...] = ()  # a factor for each source; none: all 1

    def weights(self, nominal: Sequence[float]) -> list[float]:
        return [weight * share for weight, share in zip(nominal, self.shares or [1.0] * len(nominal), strict=True)]

    def metrics(self) -> dict[str, float]:
        """As it stands in a member's metrics, where its children find it."""
        shares = {f"genome_share_{number}": share for number, share in enumerate(self.shares)}
        return {"genome_rate": self.rate_factor, **shares}


def read(metrics: Mapping[str, Any], sources: int) -> Genome:
    """Of a parent; the first weights have none of their own."""
    shares = tuple(float(metrics.get(f"genome_share_{number}", 1.0)) for number in range(sources))
    several = shares if sources > 1 else ()
    return Genome(float(metrics.get("genome_rate", 1.0)), several)


def first_genome(config: TrainConfig, slot: int) -> Genome:
    """Of the first round's members: their rates lie evenly on a logarithmic line."""
    return replace(read({}, len(config.datasets)), rate_factor=first_rate(config, slot))


def first_rate(config: ExchangeConfig, slot: int) -> float:
    where = slot / (config.population_size - 1) - 0.5 if config.population_size > 1 else 0.0
    return float(config.lr_spread**where)


def fittest(parents: Sequence[Mapping[str, Any]], sources: int) -> Genome:
    """That of the parent with the least loss."""
    return read(min(parents, key=unfitness), sources)


def inherited(config: TrainConfig, slot: int, round: int, parents: Sequence[Mapping[str, Any]]) -> Genome:
    """The fittest parent's, mutated. Drawn when the child is made, so that nobody waits for a whole generation."""
    genome = fittest(parents, len(config.datasets)) if round > 1 else first_genome(config, slot)
    mutated = mutation(config, slot, round)
    return Genome(
        mutated(genome.rate_factor, *RATES),
        tuple(mutated(share, *_SHARES) for share in genome.shares),
    )


def mutation(config: ExchangeConfig, slot: int, round: int) -> Callable[[float, float, float], float]:
    """What becomes of a child's genes, one after the other, each within its limits."""
    rng = np.random.default_rng([config.seed, round, slot, 1])

    def mutated(value: float, low: float, high: float) -> float:
        roll, far = rng.random(), rng.standard_normal()  # both always, so that one gene's luck is not another's
        if roll >= config.mutation_probability:
            return value
        return min(high, max(low, value * math.exp(config.mutation_strength * far)))

    return mutated

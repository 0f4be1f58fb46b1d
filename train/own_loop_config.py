"""The keys of a run whose members are trained by a loop of the user's own."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, StringConstraints

from fleet.run_config import Section, bound
from train.exchange_checks import exchange_problems
from train.exchange_config import ExchangeConfig
from train.training_config import OF_DETERMINISTIC

Gene = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
RATE = "lr"  # the gene that LR_SPREAD is about


class OwnLoopSection(Section):
    """A loop of one's own."""

    first_inner_steps: int = bound(
        0,
        "Steps of the first round; each later one has a twentieth of all steps before it, if that is more, and "
        "INNER_STEPS at most. 0: all have INNER_STEPS.",
        ge=0,
        le=10**7,
    )
    genes: dict[Gene, Annotated[float, Field(gt=0)]] = bound(
        {}, "EDT: named values that members inherit and mutate, each with what it begins at; `run.genome` has them."
    )
    deterministic: bool = bound(True, OF_DETERMINISTIC)
    script_digest: str = bound(
        "",
        "Of the script and the modules beside it; found out by whoever joins. Whoever gives it says by that that a "
        "changed script still does the same.",
    )
    ranks: int = bound(1, "Processes that share a model, as torchrun starts them; found out by whoever joins.", ge=1)


class OwnLoopConfig(OwnLoopSection, ExchangeConfig):
    """Those of the exchange and of evolution, and these few more."""

    population_size: int = bound(4, "Members, or replicas, of a round.", ge=1, le=4096)
    max_generations: int = bound(12, "Rounds that train; round 0 only prepares.", ge=1, le=90_000)


def own_loop_problems(config: OwnLoopConfig) -> Iterator[tuple[object, str]]:
    """Each possible one, and whether it is there."""
    yield from exchange_problems(config)
    spread, mutates = config.lr_spread > 1, config.mutation_probability > 0
    yield spread and RATE not in config.genes, f"LR_SPREAD spreads the gene {RATE}: give GENES one"
    yield config.fragments > 1, "FRAGMENTS are there for python diloco.py alone: set FRAGMENTS to 1"
    yield mutates and not config.genes, "MUTATION_PROBABILITY mutates GENES: name some, or leave it at 0"

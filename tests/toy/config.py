"""The toy room's keys: those that pre-training and evolution share, on vectors."""

from typing import Annotated, Literal

from pydantic import Field

from fleet.run_config import FleetConfig, Section, bound, operational

BESIDE = frozenset({"cut", "outer"})  # tasks of a second lane


class ToySection(Section):
    initial_population: tuple[Annotated[int, Field(ge=0)], ...] = bound(
        (), "Seeds of the first vectors; empty: one, from SEED.", max_length=64, strict=False
    )
    inner_steps: int = bound(5, "Steps of training in one recipe.", ge=1, le=100_000)
    size: int = bound(96, "Numbers in a vector.", ge=4, le=1 << 28)
    shards: int = bound(3, "Ranges in which DiLoCo's outer step is done.", ge=1, le=64)
    eval_batch_size: int = bound(32, "Held-out numbers that are summed at a time.", ge=1)
    outer_lr: float = bound(0.7, "Of the outer step.", gt=0, le=10)
    outer_momentum: float = bound(0.9, "Of the outer step.", ge=0, lt=1)
    outer_nesterov: bool = bound(True, "Look ahead by the momentum.")
    mutation_probability: float = bound(0.5, "How likely a child's genome is mutated.", ge=0, le=1)
    mutation_strength: float = bound(0.3, "How far a mutation goes.", ge=0, le=10)
    elitism: int = bound(2, "How many of the best are carried over unchanged.", ge=0)
    cliff: float = bound(9.0, "Search: candidates beyond it fail.")
    sleep: float = operational(0.0, "Seconds that a recipe takes besides its arithmetic.", ge=0)


class ToyConfig(ToySection, FleetConfig):
    algorithm: Literal["diloco", "matching", "rank", "search", "tournament"] = bound("matching", "Which toy.")

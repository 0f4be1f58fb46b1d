"""What cannot work among the keys of how members come together, whatever is trained."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import count

from train.exchange_config import FOR_WEIGHTS, ExchangeConfig
from train.parent_selection import RULES_OF_EDT

_MOST = 1 << 20  # files that DiLoCo writes in a round, names of parents in a plan of EDT: a plan is one register


def exchange_problems(config: ExchangeConfig) -> Iterator[tuple[object, str]]:
    """Each possible one, and whether it is there."""
    yield from _of_diloco(config) if config.shares_one_model else _of_evolution(config)
    last, wanted, first = config.max_generations, config.inner_steps, config.first_inner_steps
    if config.steps_in(last) < wanted:  # rounds that end before they have grown are not what INNER_STEPS says
        need = next(round for round in count(last) if config.steps_in(round) == wanted)
        yield (
            True,
            f"MAX_GENERATIONS is {last}: rounds grow from FIRST_INNER_STEPS {first} to INNER_STEPS {wanted}, which "
            f"round {need} is the first to have; set MAX_GENERATIONS {need} or FIRST_INNER_STEPS "
            f"{fewest_to_begin_with(config)}, or lower INNER_STEPS",
        )


def fewest_to_begin_with(config: ExchangeConfig) -> int:
    """Steps of a first round from which rounds grow to INNER_STEPS by the last one."""

    def in_the_last(first: int) -> int:
        return config.model_copy(update={"first_inner_steps": first}).steps_in(config.max_generations)

    return 1 + bisect_left(range(1, config.inner_steps), config.inner_steps, key=in_the_last)


def _of_diloco(config: ExchangeConfig) -> tuple[tuple[object, str], ...]:
    shards, size, parts = config.shard_count, config.population_size, config.fragments > 1
    halves = config.in_halves
    return (
        (shards * size > _MOST, f"SHARDS is {shards}: {_many('files', shards, size)}"),
        (config.first_models > 1, "INITIAL_POPULATION: DiLoCo begins with one model"),
        (
            halves and config.quorum < 1,
            "OVERLAP: a half that is absent as a whole has no mean; set QUORUM to 1",
        ),
        (halves and size < 2, "OVERLAP: two halves of the replicas take turns, and POPULATION_SIZE is 1"),
        (
            halves and config.outer_momentum,
            "OVERLAP is there without momentum of the outer step: set OUTER_MOMENTUM to 0, its default",
        ),
        (
            parts and config.error_feedback,
            "ERROR_FEEDBACK is there for models exchanged as a whole: set FRAGMENTS to 1",
        ),
    )


def _of_evolution(config: ExchangeConfig) -> tuple[tuple[object, str], ...]:
    size, group, selection = config.population_size, config.parents_of_a_child, config.selects
    drawn, rules = config.draws_parents, f"{', '.join(RULES_OF_EDT[:-1])} or {RULES_OF_EDT[-1]}"
    equally = f"with SELECTION {selection} everybody is a parent equally often; use {rules}, or 0"
    who = "" if config.group_size else " (chosen)"
    powers = f"powers of two, not POPULATION_SIZE {size} and GROUP_SIZE {group}{who}"
    wire, loses = config.wire, config.wire not in FOR_WEIGHTS
    return (
        (config.fragments > 1, "FRAGMENTS are there for DiLoCo, which has one model to cut: set FRAGMENTS to 1"),
        (loses, f"WIRE_DTYPE is {wire}: EDT sends weights, which lose too much in fewer than 12 bits; use int12"),
        (size < group, f"POPULATION_SIZE is {size}, smaller than a group of GROUP_SIZE {group}{who}"),
        (
            drawn and config.elitism >= size,
            f"ELITISM is {config.elitism}: it must be below POPULATION_SIZE, which is {size}",
        ),
        (
            drawn and group * size > _MOST,
            f"GROUP_SIZE is {group}{who}: {_many('parents', group, size)}, where fitness decides",
        ),
        (not drawn and config.elitism, f"ELITISM is {config.elitism}, but {equally}"),
        (
            not drawn and config.previous_generation,
            f"PREVIOUS_GENERATION needs SELECTION {rules}, not {selection}",
        ),
        (not drawn and size % group, f"POPULATION_SIZE is {size}, not a multiple of GROUP_SIZE {group}{who}"),
        (
            selection == "hypercube" and (size & (size - 1) or group & (group - 1)),
            f"SELECTION hypercube needs {powers}",
        ),
    )


def _many(what: str, each: int, population: int) -> str:
    return f"{each * population:,} {what} a round with POPULATION_SIZE {population}; at most {_MOST:,} are possible"

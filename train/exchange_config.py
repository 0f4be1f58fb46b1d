"""The keys of how members of a run come together, and who has children with whom: the same whatever is trained."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from fleet.run_config import FleetConfig, Section, bound
from train.parent_selection import GROUPINGS, RULES_OF_EDT

if TYPE_CHECKING:
    Selection = str
else:
    Selection = Literal["", *GROUPINGS, *RULES_OF_EDT]

READERS = 16  # shards that read at a time: more of them get no more out of one disk, and each replica writes more files
FOR_WEIGHTS = ("fp32", "bf16", "int12")  # others lose too much of a number that a small step is added to
# Of fewer than 16 bits. What a DiLoCo change loses in one of these, ERROR_FEEDBACK keeps; and a shard sends its outer
# step in it, beside the weights before that step, instead of the weights after it.
QUANTIZED_WIRES = ("int12", "int8", "int4", "normal2")
_GROWTH = 0.05  # of all steps before, that the rounds of all fragments have while rounds grow


class Forked(Section):
    """How far the run had come that this one goes on from."""

    round: int = bound(..., "The last one that was carried over.", ge=1, le=90_000)
    steps: int = bound(..., "That a slot had taken by then.", ge=0)
    sequences: int = bound(..., "Places for sequences that were used up by then.", ge=0)
    windows: tuple[Annotated[int, Field(ge=0)], ...] = bound(
        ..., "Sequences that each source had; 0 where its text, or its order, is another now.", strict=False
    )


class ExchangeSection(Section):
    """How changes come together."""

    gone: ClassVar[Mapping[str, str]] = {"weights_wire_dtype": "WIRE_DTYPE is what weights travel in, too"}

    inner_steps: int = bound(16, "Steps of one round.", ge=1, le=10**7)
    first_inner_steps: int = bound(
        0,
        "Steps of the first round; each later one has a twentieth of all steps before it, if that is more, and "
        "INNER_STEPS at most. 0: the fewest with which the last round still comes to INNER_STEPS.",
        ge=0,
        le=10**7,
    )
    outer_lr: float = bound(1.0, "Of the outer step; 1 without momentum is the plain mean.", gt=0, le=10)
    outer_momentum: float = bound(
        0.0,
        "Of the outer step; above 0, it travels with the weights and doubles what EDT writes and reads.",
        ge=0,
        lt=1,
    )
    outer_nesterov: bool = bound(True, "Look ahead by the momentum.")
    shards: int = bound(
        0, f"DiLoCo: ranges in which the outer step is done; 0: as many as replicas, up to {READERS}.", ge=0, le=4096
    )
    wire_dtype: Literal["", "fp32", "bf16", "int12", "int8", "int4", "normal2"] = bound(  # of merge/wire.py: WIRES
        "",
        "The format in which DiLoCo sends its changes, or EDT its weights and momenta (fp32, bf16 or int12). Empty: "
        "int4 for DiLoCo, int12 for EDT.",
    )
    error_feedback: bool = bound(False, "DiLoCo: keep what the wire lost of a change, and add it to the next one.")
    inner_optimizer_state: Literal["average", "narrow", "exact", "reset"] = bound(
        "average",
        "What becomes of the inner optimizer's moments after a round: their mean goes on, sent in 8 bits (average), "
        "with gradients' averages in 4 (narrow), or in fp32 (exact). reset: each round begins without any.",
    )
    overlap: Literal[0, 1] = bound(
        0,
        "DiLoCo: 1: nobody waits for an exchange. Two halves of the replicas take turns: while one trains, the other's "
        "changes come together; with FRAGMENTS, a part's do while all train on.",
    )
    fragments: int = bound(
        1,
        "DiLoCo: parts of the model; a round exchanges one of them, in turn, and a slot goes on with its own others.",
        ge=1,
        le=64,
    )
    average_every: int = bound(4, "EDT: the averaged model is evaluated every so many rounds.", ge=1, le=10**5)


class EvolutionSection(Section):
    """Who has children with whom, and what they inherit."""

    selection: Selection = bound(
        "", "Who the parents are. Empty: hypercube where POPULATION_SIZE is a power of two, else matching."
    )
    group_size: int = bound(
        0,
        f"Parents of a child. 0: with SELECTION {', '.join(RULES_OF_EDT)} 4, or all if they are fewer; else the first "
        "of 4, 2, 3, 5, 7 that divides POPULATION_SIZE into several groups.",
        ge=0,
        le=4096,
    )
    previous_generation: bool = bound(False, f"{', '.join(RULES_OF_EDT)}: also choose from the generation before.")
    crossover: Literal["outer", "linear", "slerp"] = bound(
        "outer", "The mean of the parents, or a random point between them, on a line or an arc."
    )
    elitism: int = bound(0, f"{', '.join(RULES_OF_EDT)}: so many of the best are carried over unchanged.", ge=0)
    lr_spread: float = bound(
        1.0, "Members begin with learning rates that lie evenly around LR, the highest so many times the lowest.",
        ge=1, le=16,
    )  # fmt: skip
    mutation_probability: float = bound(0.0, "How likely each gene of a child is mutated.", ge=0, le=1)
    mutation_strength: float = bound(0.2, "How far: the deviation of a factor's logarithm.", ge=0, le=10)


class ExchangeConfig(EvolutionSection, ExchangeSection, FleetConfig):
    """All that edt.py and diloco.py need to know to say who trains, from what, and whose changes come together."""

    forked: tuple[Forked, ...] = bound((), "Of a run that goes on from another; `fleet.fork` writes it.", strict=False)

    def steps_before(self, round: int) -> int:
        """That a slot has taken when a round begins; a fork's grow on from what it has carried over."""
        begin, taken = next(((each.round, each.steps) for each in self.forked[::-1] if each.round < round), (0, 0))
        first = self.first_inner_steps or self.inner_steps
        grown = _grown(min(first, self.inner_steps), self.inner_steps, taken, _GROWTH / self.fragments)
        short = min(round - begin, len(grown)) - 1
        return grown[short] + (round - begin - 1 - short) * self.inner_steps

    def steps_in(self, round: int) -> int:
        return self.steps_before(round + 1) - self.steps_before(round)

    @property
    def total_steps(self) -> int:
        """Of one slot, from the first to the last."""
        return self.steps_before(self.max_generations + 1)

    @property
    def text_sources(self) -> int:
        """Texts that round 0 makes tokens of; who trains in a loop of his own brings his data."""
        return 0

    @property
    def first_models(self) -> int:
        """To begin with."""
        return 1

    @property
    def shares_one_model(self) -> bool:
        """DiLoCo; else each member of a population has its own."""
        return self.algorithm.startswith("diloco")

    @property
    def keeps_moments(self) -> bool:
        """Whether they outlive a round."""
        return self.inner_optimizer_state != "reset"

    @property
    def selects(self) -> str:
        """SELECTION, or what fits the population."""
        power_of_two = self.population_size & (self.population_size - 1) == 0
        return self.selection or ("hypercube" if power_of_two else "matching")

    @property
    def draws_parents(self) -> bool:
        """By a rule, for each child; else slots meet in groups, in which each is a parent of all."""
        return self.selects in RULES_OF_EDT

    @property
    def parents_of_a_child(self) -> int:
        if self.group_size or self.population_size == 1:
            return self.group_size or 1
        if self.draws_parents:
            return min(4, self.population_size)
        fit = [size for size in (4, 2, 3, 5, 7) if self.population_size % size == 0]
        return next((size for size in fit if size < self.population_size), (*fit, 2)[0])  # one family for all is DiLoCo

    @property
    def mean_parts(self) -> int:
        """EDT: in how many parts a group's mean is made for all of it; 1 where each reads its parents by itself, whom
        chance or fitness chooses, or who are two."""
        together = not self.draws_parents and self.crossover == "outer" and self.parents_of_a_child > 2
        return min(self.parents_of_a_child, READERS) if together else 1

    @property
    def wire(self) -> str:
        """WIRE_DTYPE, or what a method loses nothing by."""
        return self.wire_dtype or ("int4" if self.shares_one_model else "int12")

    @property
    def feeds_back(self) -> bool:
        """Whether what a message lost is kept for the next one."""
        return self.error_feedback and self.shares_one_model and self.wire in QUANTIZED_WIRES

    @property
    def shard_count(self) -> int:
        """Of a run that begins; each fragment has as many."""
        return self.fragments * (self.shards or min(self.population_size, READERS))

    @property
    def in_halves(self) -> bool:
        """Whether the replicas train by turns."""
        return bool(self.overlap) and self.fragments == 1

    @property
    def comes_late(self) -> bool:
        """Whether what a round exchanges is there not in the next one, but in the one after it."""
        return bool(self.overlap) and self.fragments > 1

    def exchanged_in(self, round: int, shards: int) -> range:
        """Of all shards, those of the fragment whose turn it is."""
        each = shards // self.fragments
        return range(round % self.fragments * each, (round % self.fragments + 1) * each)


@cache
def _grown(first: int, last: int, taken: int, growth: float) -> tuple[int, ...]:
    """The steps before each round that is shorter than the last ones, and before the first that is not: what has been
    learned apart is brought together the sooner, the faster a model still changes."""
    before = [taken]
    while (steps := max(first, int(before[-1] * growth))) < last:
        before.append(before[-1] + steps)
    return tuple(before)

"""The keys of pre-training: what is trained, on what, how, and how its workers' changes come together."""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fleet.run_config import FleetConfig, Section, Text, bound
from train.parent_selection import BY_LOSS, GROUPINGS

if TYPE_CHECKING:
    Selection = str
else:
    Selection = Literal["", *GROUPINGS, *BY_LOSS]

PRESETS = ("tiny", "14m", "60m", "150m", "1b")
PRESETS_REACH = 2048  # positions that each of them has
Precision = Literal["auto", "32-true", "tf32-true", "bf16-mixed", "fp16-mixed"]
OF_PRECISION = (
    "Of the model's arithmetic; mixed: narrow in forward and backward, weights and optimizer in fp32; tf32: fp32, "
    "of whose digits CUDA multiplies the first. auto: bf16-mixed where all GPUs that a run begins on know it, else "
    "32-true; a run keeps what it began with."
)
OF_DETERMINISTIC = (
    "The same bytes each time, on one kind of device; without, kernels may sum in any order, which some do faster, "
    "and two attempts on a GPU may differ."
)
READERS = 16  # shards that read at a time: more of them get no more out of one disk, and each replica writes more files
RATES = (0.25, 4.0)  # how far a genome may scale the learning rate
NARROW = ("int8", "int4", "normal2")  # wires of blocks with a scale each, which changes travel in
_GROWTH = 0.05  # of all steps before it, that a round has while rounds grow


class Dataset(Section):
    """One source of text."""

    source: Text = bound(..., '"stdlib", "fake", a local .jsonl, .parquet or .txt file, or a hub dataset.')
    weight: float = bound(1.0, "Its share beside the other sources.", gt=0, le=1e6)
    name: str = bound("", "Hub: which configuration of the dataset.")
    split: Text = bound("train", "Hub: which split.")
    text_field: Text = bound("text", "The field that holds a document.")
    separator: str = bound("", "Of a .txt file: what stands between documents; empty: the file is one.")
    streaming: bool = bound(True, "Hub: read only as much as the run needs.")
    evaluated: bool = bound(True, "Its held-out text counts in the loss; without, it is only learned from.")


class Forked(Section):
    """How far the run had come that this one goes on from."""

    round: int = bound(..., "The last one that was carried over.", ge=1, le=90_000)
    steps: int = bound(..., "That a slot had taken by then.", ge=0)
    sequences: int = bound(..., "Places for sequences that were used up by then.", ge=0)
    windows: tuple[Annotated[int, Field(ge=0)], ...] = bound(
        ..., "Sequences that each source had; 0 where its text, or its order, is another now.", strict=False
    )


class TrainSection(Section):
    """One model made better."""

    gone: ClassVar[Mapping[str, str]] = {
        "warm_start_steps": "nobody waits for a warm start now; rounds begin short and grow, from FIRST_INNER_STEPS on"
    }

    initial_population: tuple[Annotated[Text | dict[str, Any], Field()], ...] = bound(
        ("tiny",),
        f"Models to begin with: one of {', '.join(PRESETS)}, a hub id, a local folder, a config.json, or "
        '{"config": {...}}.',
        min_length=1,
        max_length=64,
        strict=False,
    )
    tokenizer: str = bound(
        "", "A hub id or a local folder. Empty: the first model's own, or a byte-level BPE that is made of DATASETS."
    )
    vocab_size: int = bound(1024, "Of the byte-level BPE that is made here.", ge=264, le=1_000_000)
    trust_remote_code: bool = bound(False, "Let models and tokenizers of the hub run code of their own.")
    datasets: tuple[Dataset, ...] = bound(
        (Dataset(source="stdlib"),), "Sources of text; each a name or an object.", min_length=1, strict=False
    )
    held_out: float = bound(0.05, "The share of text for validation, and for the test: half of it each.", gt=0, lt=1)
    eval_sequences: int = bound(
        16, "Sequences of held-out text for validation that each member is evaluated on.", ge=1, le=10**6
    )
    test_sequences: int = bound(
        64, "Sequences of text for the test, which tell how good all members together are.", ge=1, le=10**6
    )
    eval_batch_size: int = bound(16, "Of them at a time.", ge=1, le=65536)
    max_epochs: float = bound(1.0, "The most passes over a text; a run that needs more is refused.", gt=0, le=1e6)
    inner_steps: int = bound(16, "Steps of one round.", ge=1, le=10**7)
    first_inner_steps: int = bound(
        1,
        "Of the first round; later ones grow to a twentieth of all steps before them, until they have INNER_STEPS.",
        ge=1,
        le=10**7,
    )
    inner_optimizer: Literal["muon", "adamw"] = bound(
        "muon", "Of the steps: AdamW, or Muon for the matrices within the model and AdamW for the rest."
    )
    batch_size: int = bound(16, "Sequences of a micro-batch.", ge=1, le=65536)
    seq_length: int = bound(64, "Tokens of a sequence.", ge=2, le=10**6)
    gradient_accumulation: int = bound(1, "Micro-batches of one step, BATCH_SIZE sequences each.", ge=1, le=65536)
    lr: float = bound(1e-2, "The highest learning rate; AdamW's best is about half of Muon's.", gt=0, le=10)
    lr_schedule: Literal["linear", "trapezoid", "cosine", "constant"] = bound(
        "linear", "How it falls until the last round: to nothing, in the last two fifths only, or to a tenth."
    )
    warmup_steps: int = bound(20, "Steps of linear warm-up.", ge=0, le=10**8)
    weight_decay: float = bound(0.1, "Weight decay of matrices.", ge=0, le=10)
    z_loss: float = bound(
        0.0, "How much the squared logarithm of the logits' sum of exponentials counts in the loss; 1e-4 is usual.",
        ge=0, le=1,
    )  # fmt: skip
    clip: float = bound(1.0, "The largest norm of a step's gradient; 0 does not clip.", ge=0, le=1e6)
    precision: Precision = bound("auto", OF_PRECISION)
    deterministic: bool = bound(True, OF_DETERMINISTIC)
    compile: Literal["auto"] | bool = bound(
        "auto",
        "Use torch.compile. auto: where a run of 500 steps or more begins on GPUs and a C compiler is there; a run "
        "keeps what it began with.",
    )
    inner_optimizer_state: Literal["average", "narrow", "exact", "reset"] = bound(
        "average",
        "What becomes of its moments after a round: averaged (they travel in 8 bits; in 4; exactly), or forgotten.",
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_sources(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("datasets"), (list, tuple)):
            named = [{"source": each} if isinstance(each, str) else each for each in values["datasets"]]
            return {**values, "datasets": tuple(named)}
        return values


class ExchangeSection(Section):
    """How changes come together."""

    gone: ClassVar[Mapping[str, str]] = {"weights_wire_dtype": "WIRE_DTYPE is what weights travel in, too"}

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
    wire_dtype: Literal["", "fp32", "bf16", "int8", "int4", "normal2"] = bound(
        "",
        "What changes (DiLoCo), or weights and momenta (EDT: fp32 or bf16), travel in. Empty: int4, or bf16.",
    )
    error_feedback: bool = bound(False, "DiLoCo: keep what whole numbers lost of a change, and add it to the next one.")
    overlap: Literal[0, 1] = bound(
        0,
        "DiLoCo: 1: two halves of the replicas take turns: while one trains, the other's changes come together.",
    )
    average_every: int = bound(4, "EDT: the averaged model is evaluated every so many rounds.", ge=1, le=10**5)


class GroupSection(Section):
    """A worker of several devices of one machine."""

    devices_per_worker: int = bound(
        1, "So many processes, each with a device, are one worker; BATCH_SIZE is a multiple.", ge=1, le=1024
    )
    sharding_strategy: Literal["NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"] = bound(
        "FULL_SHARD", "What each of several has: a copy of the model, or parts of its tensors (of a model too large)."
    )


class EvolutionSection(Section):
    """Who has children with whom, and what they inherit."""

    selection: Selection = bound(
        "", "Who the parents are. Empty: hypercube where POPULATION_SIZE is a power of two, else matching."
    )
    group_size: int = bound(
        0,
        "Parents of a child. 0: chosen: by fitness 4, or POPULATION_SIZE if that is less; else the first of 4, 2, 3, "
        "5, 7 that divides POPULATION_SIZE and is smaller.",
        ge=0,
        le=4096,
    )
    previous_generation: bool = bound(False, f"{', '.join(BY_LOSS)}: also choose from the generation before.")
    crossover: Literal["outer", "linear", "slerp"] = bound(
        "outer", "The mean of the parents, or a random point between them, on a line or an arc."
    )
    elitism: int = bound(0, f"{', '.join(BY_LOSS)}: so many of the best are carried over unchanged.", ge=0)
    lr_spread: float = bound(
        1.0, "Members begin with learning rates that lie evenly around LR, the highest so many times the lowest.",
        ge=1, le=16,
    )  # fmt: skip
    mutation_probability: float = bound(0.0, "How likely each gene of a child is mutated.", ge=0, le=1)
    mutation_strength: float = bound(0.2, "How far: the deviation of a factor's logarithm.", ge=0, le=10)


class TrainConfig(EvolutionSection, ExchangeSection, GroupSection, TrainSection, FleetConfig):
    """All of them together: edt.py and diloco.py understand the same file."""

    population_size: int = bound(4, "Members, or replicas, of a round.", ge=1, le=4096)
    max_generations: int = bound(
        120, "Rounds that train; round 0 prepares and one last round may sum up.", ge=1, le=90_000
    )
    stdlib_digest: str = bound("", "Of the built-in text; found out by whoever starts the run.")
    forked: tuple[Forked, ...] = bound((), "Of a run that goes on from another; `fleet.fork` writes it.", strict=False)

    def steps_before(self, round: int) -> int:
        """That a slot has taken when a round begins; a fork's grow on from what it has carried over."""
        begin, taken = next(((each.round, each.steps) for each in self.forked[::-1] if each.round < round), (0, 0))
        grown = _grown(min(self.first_inner_steps, self.inner_steps), self.inner_steps, taken)
        short = min(round - begin, len(grown)) - 1
        return grown[short] + (round - begin - 1 - short) * self.inner_steps

    def steps_in(self, round: int) -> int:
        return self.steps_before(round + 1) - self.steps_before(round)

    @property
    def total_steps(self) -> int:
        """Of one slot, from the first to the last."""
        return self.steps_before(self.max_generations + 1)

    @property
    def sequences(self) -> int:
        """How many sequences the whole run has places for."""
        return self.first_number(self.total_steps)

    def first_number(self, step: int, slot: int = 0, part: int = 0) -> int:
        """Of the sequences of a slot's step; what a fork has carried over was numbered in its own way."""
        steps, used = (self.forked[-1].steps, self.forked[-1].sequences) if self.forked else (0, 0)
        batches = ((step - steps) * self.population_size + slot) * self.gradient_accumulation + part
        return used + batches * self.batch_size

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
    def selects_by_fitness(self) -> bool:
        return self.selects in BY_LOSS

    @property
    def parents_of_a_child(self) -> int:
        if self.group_size or self.population_size == 1:
            return self.group_size or 1
        if self.selects_by_fitness:
            return min(4, self.population_size)
        fit = [size for size in (4, 2, 3, 5, 7) if self.population_size % size == 0]
        return next((size for size in fit if size < self.population_size), (*fit, 2)[0])  # one family for all is DiLoCo

    @property
    def mean_parts(self) -> int:
        """EDT: in how many parts a group's mean is made for all of it; 1 where each reads its parents by itself, whom
        chance or fitness chooses, or who are two."""
        together = not self.selects_by_fitness and self.crossover == "outer" and self.parents_of_a_child > 2
        return min(self.parents_of_a_child, READERS) if together else 1

    @property
    def wire(self) -> str:
        """WIRE_DTYPE, or what a method loses nothing by."""
        return self.wire_dtype or ("int4" if self.algorithm == "diloco" else "bf16")

    @property
    def feeds_back(self) -> bool:
        """Whether what a message lost is kept for the next one."""
        return self.error_feedback and self.algorithm == "diloco" and self.wire in NARROW

    @property
    def shard_count(self) -> int:
        """Of a run that begins."""
        return self.shards or min(self.population_size, READERS)


def alone(steps: int) -> dict[str, Any]:
    """The keys of a training by oneself, as AdamW's users know it."""
    length = {"max_generations": 1, "inner_steps": steps, "first_inner_steps": steps}
    return {**length, "inner_optimizer": "adamw", "lr_schedule": "cosine"}


@cache
def _grown(first: int, last: int, taken: int) -> tuple[int, ...]:
    """The steps before each round that is shorter than the last ones, and before the first that is not: what has been
    learned apart is brought together the sooner, the faster a model still changes."""
    before = [taken]
    while (steps := max(first, int(before[-1] * _GROWTH))) < last:
        before.append(before[-1] + steps)
    return tuple(before)

"""The keys of pre-training: what is trained, on what, how, and how its workers' changes come together."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fleet.config import FleetConfig, Room, Text, bound

PRESETS = ("tiny", "14m", "60m", "150m", "1b")
MOST_STEPS = 1.5  # how far a genome may stretch INNER_STEPS; every round allots each slot the batches for it
RATES = (0.25, 4.0)  # how far a genome may scale the learning rate


class Dataset(Room):
    """One source of text."""

    source: Text = bound(..., '"stdlib", "fake", a local .jsonl, .parquet or .txt file, or a hub dataset.')
    weight: float = bound(1.0, "Its share beside the other sources.", gt=0, le=1e6)
    name: str = bound("", "Hub: which configuration of the dataset.")
    split: Text = bound("train", "Hub: which split.")
    text_field: Text = bound("text", "The field that holds a document.")
    streaming: bool = bound(True, "Hub: read only as much as the run needs.")


class TrainRoom(Room):
    """One model made better."""

    initial_population: tuple[Annotated[Text | dict[str, Any], Field()], ...] = bound(
        ("tiny",),
        f"Models to begin with: one of {', '.join(PRESETS)}, a hub id, a local folder, a config.json, or "
        '{"config": {...}}.',
        min_length=1,
        max_length=64,
        strict=False,
    )
    tokenizer: str = bound(
        "", "A hub id or a local folder. Empty: the first model's own, or a byte-level BPE of the built-in text."
    )
    vocab_size: int = bound(1024, "Of the byte-level BPE that is made here.", ge=264, le=1_000_000)
    trust_remote_code: bool = bound(False, "Let models and tokenizers of the hub run code of their own.")
    warm_start_steps: int = bound(100, "Steps that round 0 trains on everybody's batches.", ge=0, le=10**8)
    datasets: tuple[Dataset, ...] = bound(
        (Dataset(source="stdlib"),), "Sources of text; each a name or an object.", min_length=1, strict=False
    )
    held_out: float = bound(0.05, "The share of documents that is kept for evaluation.", gt=0, lt=1)
    eval_sequences: int = bound(64, "Held-out sequences that an evaluation looks at.", ge=1, le=10**6)
    eval_batch_size: int = bound(16, "Of them at a time.", ge=1, le=65536)
    max_epochs: float = bound(1.0, "How often a text may be seen before it is too short for the run.", gt=0, le=1e6)
    inner_steps: int = bound(20, "Steps of one round.", ge=1, le=10**7)
    batch_size: int = bound(8, "Sequences of a batch.", ge=1, le=65536)
    seq_length: int = bound(64, "Tokens of a sequence.", ge=2, le=10**6)
    gradient_accumulation: int = bound(1, "Batches of one step.", ge=1, le=65536)
    lr: float = bound(2e-3, "The highest learning rate.", gt=0, le=10)
    lr_schedule: Literal["cosine", "constant", "linear"] = bound(
        "cosine", "How it falls, to a tenth, until the last round; a closed form of the global step."
    )
    warmup_steps: int = bound(20, "Steps in which it rises.", ge=0, le=10**8)
    weight_decay: float = bound(0.1, "Of matrices.", ge=0, le=10)
    clip: float = bound(1.0, "The longest gradient; 0 does not clip.", ge=0, le=1e6)
    precision: Literal["32-true", "bf16-mixed", "fp16-mixed"] = bound("32-true", "Of the arithmetic.")
    compile: bool = bound(False, "Use torch.compile.")
    inner_optimizer_state: Literal["keep", "reset"] = bound("keep", "Whether AdamW's state outlives the round.")

    @model_validator(mode="before")
    @classmethod
    def _plain_sources(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("datasets"), (list, tuple)):
            named = [{"source": each} if isinstance(each, str) else each for each in values["datasets"]]
            return {**values, "datasets": tuple(named)}
        return values


class ExchangeRoom(Room):
    """How changes come together."""

    outer_lr: float = bound(0.7, "Of the outer step.", gt=0, le=10)
    outer_momentum: float = bound(0.9, "Of the outer step.", ge=0, lt=1)
    outer_nesterov: bool = bound(True, "Look ahead by the momentum.")
    shards: int = bound(0, "DiLoCo: ranges in which the outer step is done; 0: as many as replicas.", ge=0, le=4096)
    wire_dtype: Literal["fp32", "bf16", "int8", "int4"] = bound(
        "fp32", "What changes (DiLoCo) and momenta (EDT) travel in."
    )
    weights_wire_dtype: Literal["fp32", "bf16"] = bound("fp32", "EDT: what weights travel in.")
    error_feedback: bool = bound(False, "Add what the wire lost to the slot's next message.")
    average_every: int = bound(4, "EDT: the averaged model is evaluated every so many rounds.", ge=1, le=10**5)


class GroupRoom(Room):
    """A worker of several devices of one machine."""

    devices_per_worker: int = bound(
        1, "So many processes, each with a device, are one worker; BATCH_SIZE is a multiple.", ge=1, le=1024
    )
    sharding_strategy: Literal["NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"] = bound(
        "FULL_SHARD", "What each of several has: a copy of the model, or parts of its tensors (of a model too large)."
    )


class EvolutionRoom(Room):
    """Who has children with whom, and what they inherit."""

    selection: Literal["", "hypercube", "matching", "rank", "tournament", "random"] = bound(
        "", "Who the parents are. Empty: hypercube where POPULATION_SIZE is a power of two, else matching."
    )
    group_size: int = bound(0, "Parents of a child; 0: 4 where the population allows, else 2.", ge=0, le=4096)
    previous_generation: bool = bound(False, "rank, tournament, random: also choose from the generation before.")
    crossover: Literal["outer", "linear", "slerp"] = bound(
        "outer", "The mean of the parents, or a random point between them, on a line or an arc."
    )
    elitism: int = bound(0, "rank, tournament, random: so many of the best are carried over unchanged.", ge=0)
    mutation_probability: float = bound(0.0, "How likely each gene of a child is mutated.", ge=0, le=1)
    mutation_strength: float = bound(0.2, "How far: the deviation of a factor's logarithm.", ge=0, le=10)


class TrainConfig(EvolutionRoom, ExchangeRoom, GroupRoom, TrainRoom, FleetConfig):
    """All of them together: edt.py and diloco.py understand the same file."""

    population_size: int = bound(8, "Members, or replicas, of a round.", ge=1, le=4096)
    stdlib_digest: str = bound("", "Of the built-in text; found out by whoever starts the run.")

    @property
    def total_steps(self) -> int:
        """Of one model, from the first to the last."""
        return self.warm_start_steps + self.max_generations * self.inner_steps

    @property
    def allotted_steps(self) -> int:
        """Steps whose batches a slot owns in one round: the most that its genome could make of them."""
        return math.ceil(self.inner_steps * MOST_STEPS) if self.mutation_probability else self.inner_steps

    @property
    def sequences(self) -> int:
        """How many sequences the whole run has places for."""
        steps = self.warm_start_steps + self.max_generations * self.allotted_steps
        return steps * self.population_size * self.gradient_accumulation * self.batch_size

    @property
    def selects(self) -> str:
        """SELECTION, or what fits the population."""
        power_of_two = self.population_size & (self.population_size - 1) == 0
        return self.selection or ("hypercube" if power_of_two else "matching")

    @property
    def selects_by_fitness(self) -> bool:
        return self.selects in ("rank", "tournament", "random")

    @property
    def parents_of_a_child(self) -> int:
        if self.group_size:
            return self.group_size
        return next(size for size in (4, 2, 1) if self.population_size % size == 0)

    @property
    def shard_count(self) -> int:
        return self.shards or self.population_size

"""The keys of pre-training: what is trained, on what, and how."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fleet.run_config import Section, Text, bound
from train.exchange_config import ExchangeConfig

PRESETS = ("tiny", "14m", "60m", "150m", "1b")
PRESETS_REACH = 2048  # positions that each of them has
Precision = Literal["auto", "32-true", "tf32-true", "bf16-mixed", "fp16-mixed"]
OF_PRECISION = (
    "What the model computes in: fp32 (32-true), fp32 whose matrices CUDA multiplies as TF32 (tf32-true), or 16 bits "
    "with weights and optimizer in fp32 (bf16-mixed, fp16-mixed). auto: bf16-mixed where all GPUs that a run begins on "
    "know it, else 32-true, which the run then keeps."
)
OF_DETERMINISTIC = (
    "The same bytes each time, on one kind of device; without, kernels may sum in any order, which some do faster, "
    "and two attempts on a GPU may differ."
)
USUAL_BETAS = (0.9, 0.95)
Decay = Annotated[float, Field(ge=0, lt=1)]
RATES = (0.25, 4.0)  # how far a genome may scale the learning rate


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


class TrainSection(Section):
    """One model made better."""

    gone: ClassVar[Mapping[str, str]] = {
        "warm_start_steps": "nobody waits for a warm start now; rounds begin short and grow, from FIRST_INNER_STEPS on"
    }
    lacked: ClassVar[Mapping[str, Any]] = {"betas": USUAL_BETAS}

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
    inner_optimizer: Literal["muon+", "muon", "adamw"] = bound(
        "muon+",
        "Of the steps: AdamW, or Muon for the matrices within the model and AdamW for the rest; muon+: all rows of a "
        "matrix move equally far.",
    )
    batch_size: int = bound(16, "Sequences of a micro-batch.", ge=1, le=65536)
    seq_length: int = bound(64, "Tokens of a sequence.", ge=2, le=10**6)
    gradient_accumulation: int = bound(1, "Micro-batches of one step, BATCH_SIZE sequences each.", ge=1, le=65536)
    lr: float = bound(1e-2, "The highest learning rate; AdamW's best is about half of Muon's.", gt=0, le=10)
    lr_schedule: Literal["linear", "trapezoid", "cosine", "constant"] = bound(
        "linear",
        "How the rate falls from the warm-up to the last step: linear: to nothing; trapezoid: the same, but in the "
        "last two fifths only; cosine: to a tenth; constant: not at all.",
    )
    warmup_steps: int = bound(20, "Steps of linear warm-up.", ge=0, le=10**8)
    weight_decay: float = bound(0.1, "Weight decay of matrices.", ge=0, le=10)
    z_loss: float = bound(
        0.0, "How much the squared logarithm of the logits' sum of exponentials counts in the loss; 1e-4 is usual.",
        ge=0, le=1,
    )  # fmt: skip
    betas: tuple[Decay, Decay] | None = bound(
        None,
        "How much of AdamW's averages, of gradients and of their squares, a step keeps. null: 0.95 and 0.98 beside "
        "Muon, 0.9 and 0.95 where INNER_OPTIMIZER is adamw.",
        strict=False,
    )
    clip: float = bound(10.0, "The largest norm of a step's gradient; 0 does not clip.", ge=0, le=1e6)
    precision: Precision = bound("auto", OF_PRECISION)
    deterministic: bool = bound(True, OF_DETERMINISTIC)
    compile: Literal["auto"] | bool = bound(
        "auto",
        "Use torch.compile. auto: where a run of 500 steps or more begins on GPUs and a C compiler is there; a run "
        "keeps what it began with.",
    )

    @property
    def adamw_betas(self) -> tuple[float, float]:
        return self.betas or (USUAL_BETAS if self.inner_optimizer == "adamw" else (0.95, 0.98))

    @model_validator(mode="before")
    @classmethod
    def _plain_sources(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("datasets"), (list, tuple)):
            named = [{"source": each} if isinstance(each, str) else each for each in values["datasets"]]
            return {**values, "datasets": tuple(named)}
        return values


class GroupSection(Section):
    """A worker of several devices of one machine."""

    devices_per_worker: int = bound(
        1, "So many processes, each with a device, are one worker; BATCH_SIZE is a multiple.", ge=1, le=1024
    )
    sharding_strategy: Literal["NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"] = bound(
        "FULL_SHARD", "What each of several has: a copy of the model, or parts of its tensors (of a model too large)."
    )


class TrainConfig(GroupSection, TrainSection, ExchangeConfig):
    """All of them together: edt.py and diloco.py understand the same file."""

    population_size: int = bound(4, "Members, or replicas, of a round.", ge=1, le=4096)
    max_generations: int = bound(
        120, "Rounds that train; round 0 prepares and one last round may sum up.", ge=1, le=90_000
    )
    stdlib_digest: str = bound("", "Of the built-in text; found out by whoever starts the run.")

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
    def text_sources(self) -> int:
        return len(self.datasets)

    @property
    def first_models(self) -> int:
        return len(self.initial_population)


def alone(steps: int) -> dict[str, Any]:
    """The keys of a training by oneself, as AdamW's users know it."""
    length = {"max_generations": 1, "inner_steps": steps, "first_inner_steps": steps}
    return {**length, "inner_optimizer": "adamw", "betas": USUAL_BETAS, "clip": 1.0, "lr_schedule": "cosine"}

"""The options of `python -m train.finetune`, and what an expert would choose where they are left out."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from fleet.run_config import UserError, validated, whole
from train import text_sources
from train.cluster.options import Precision, Strategy, precision_of
from train.posttrain.posttrain_config import PosttrainConfig

if TYPE_CHECKING:
    from train.chat_examples import Example  # which takes a while to import

LR = {("sft", True): 2e-4, ("sft", False): 1e-5, ("dpo", True): 1e-5, ("dpo", False): 1e-6}  # with an adapter, or not
_LONGEST = 2048  # tokens of a row where nobody says how many
_BATCH, _STEPS = 16_384, 50  # tokens of a step; of few rows fewer, so that there are so many steps
_HELD = {"cpu": 4096, "cuda": 16_384}  # tokens that a device takes at a time
_LOGITS = 1 << 28  # numbers that their logits may have


@dataclass(frozen=True)
class FinetuneOptions:
    """All of them; what results depend on is what a checkpoint goes on with."""

    objective: Annotated[
        Literal["sft", "dpo"] | None,
        Parameter(help="sft: from answers; dpo: from preferences. By default what the rows are."),
    ] = None
    held_out: Annotated[
        str, Parameter(help="Rows to measure by, as ROWS; by default a twentieth of ROWS is kept for it.")
    ] = ""
    full: Annotated[bool, Parameter(help="All weights learn, instead of an adapter (LoRA).", negative="")] = False
    merge: Annotated[
        bool,
        Parameter(help="Write the whole model with the adapter in its weights, instead of the adapter.", negative=""),
    ] = False
    rank: Annotated[int, Parameter(help="Of the adapter.")] = 16
    alpha: Annotated[float, Parameter(help="Of the adapter: it counts alpha / rank times.")] = 32.0
    target: Annotated[
        list[str] | None,
        Parameter(
            help="A part of the names of the layers that get an adapter; by default all linear ones.", negative=""
        ),
    ] = None
    four_bits: Annotated[
        bool, Parameter(help="Keep the model's own weights in 4 bits beside the adapter; CUDA only.", negative="")
    ] = False
    lr: Annotated[
        float | None,
        Parameter(help="The highest learning rate. By default 2e-4, with --full 1e-5; of dpo 1e-5, with --full 1e-6."),
    ] = None
    lr_schedule: Annotated[
        Literal["cosine", "constant", "linear"], Parameter(help="How it falls: to a tenth, or to 0.")
    ] = "cosine"
    warmup_steps: Annotated[int | None, Parameter(help="Steps in which it rises; by default a tenth of all.")] = None
    epochs: Annotated[float, Parameter(help="How often each row is seen.")] = 1.0
    batch_tokens: Annotated[
        int | None,
        Parameter(help="Tokens of a step, over all devices; by default 16,384, or fewer for 50 steps of few rows."),
    ] = None
    device_rows: Annotated[
        int | None, Parameter(help="Rows that a device takes at a time; fewer need less memory.")
    ] = None
    seq_length: Annotated[
        int | None,
        Parameter(
            help="Tokens of a row, in which several examples may stand; longer ones are cut. By default up to 2,048."
        ),
    ] = None
    weight_decay: Annotated[float, Parameter(help="Weight decay of matrices.")] = 0.0
    clip: Annotated[float, Parameter(help="The longest gradient; 0 does not clip.")] = 1.0
    beta: Annotated[float, Parameter(help="Of dpo: how far it may go from where it began.")] = 0.1
    precision: Annotated[
        Precision | None,
        Parameter(help="Of the arithmetic; by default bf16-mixed on a GPU, 32-true on a CPU."),
    ] = None
    deterministic: Annotated[
        bool, Parameter(help="Sums in a fixed order on a GPU, too; without, kernels may be faster.")
    ] = True
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Parameter(help="Of a whole model's files; by default MODEL's own."),
    ] = None
    sharding_strategy: Annotated[
        Strategy,
        Parameter(help="Several devices: NO_SHARD, each has the model; FULL_SHARD and others, parts, with --full."),
    ] = "NO_SHARD"
    seed: Annotated[int, Parameter(help="Of the adapter's first numbers, the order of rows, and dropout.")] = 1
    dataset_config: Annotated[str, Parameter(help="Of a hub's data set: which configuration.")] = ""
    split: Annotated[str, Parameter(help="Of a hub's data set: which split.")] = "train"
    trust_remote_code: Annotated[bool, Parameter(help="Let a model of the hub run code of its own.", negative="")] = (
        False
    )
    save_minutes: Annotated[float, Parameter(help="How much a killed training may lose.")] = 5.0
    metrics: Annotated[
        Literal["csv", "tensorboard", "wandb", "trackio"], Parameter(help="Where the losses go besides the terminal.")
    ] = "csv"
    overwrite: Annotated[bool, Parameter(help="Replace the model in --out, once another one is done.", negative="")] = (
        False
    )

    def bound(self) -> dict[str, Any]:
        """What decides which numbers come out."""
        free = ("save_minutes", "metrics", "overwrite", "merge", "dtype", "trust_remote_code", "deterministic")
        return {key: value for key, value in vars(self).items() if key not in free}


@dataclass(frozen=True)
class Size:
    """What the number of rows of a step follows from."""

    positions: int  # that the model knows, or 0
    words: int
    ranks: int
    device: str
    packed: bool


def settings(
    o: FinetuneOptions, model: str, rows: str, objective: str, examples: "Sequence[Sequence[Example]]", size: Size
) -> PosttrainConfig:
    """Those of a child of post-training, which learns in the same way."""
    adapter = {"r": o.rank, "alpha": o.alpha, "targets": o.target or "all-linear", "four_bits": o.four_bits}
    source = {
        "source": rows,
        **({} if rows.endswith(text_sources.ROW_FILES) else {"name": o.dataset_config, "split": o.split}),
    }
    same = ("seed", "lr_schedule", "weight_decay", "clip", "trust_remote_code", "deterministic")
    keys: dict[str, Any] = dict(
        {key: getattr(o, key) for key in same},
        mutation=objective,
        mutation_datasets=(source,),
        initial_population=(model,),
        lr=LR[objective, not o.full] if o.lr is None else o.lr,
        warmup_steps=o.warmup_steps or 0,
        adapter=None if o.full else adapter,
        sft_epochs=o.epochs,
        dpo_beta=o.beta,
        dtype=o.dtype or "",
        precision=o.precision or precision_of(size.device),
        **_batches(o, examples, size),
    )
    return validated(PosttrainConfig, keys, "options", lambda key: _OPTIONS.get(key, "--" + key.replace("_", "-")))


def longest(o: FinetuneOptions, positions: int) -> int:
    """Tokens of an example: what is longer is cut."""
    most = min(o.seq_length or _LONGEST, positions or _LONGEST)
    if o.seq_length and most < o.seq_length:
        raise UserError(f"--seq-length {o.seq_length}: the model knows {positions} positions")
    return most


def _batches(o: FinetuneOptions, examples: "Sequence[Sequence[Example]]", size: Size) -> dict[str, int]:
    """Rows at a time, and how often of one step, over all devices: a step has about so many tokens."""
    lengths = [len(example.tokens) for example in chain(*examples)]
    total = sum(lengths) * o.epochs
    wanted = o.batch_tokens or max(1, min(_BATCH, int(total / _STEPS)))
    width = min(longest(o, size.positions), max(*lengths, wanted if size.packed else 0))
    of_a_row = width if size.packed else sum(lengths) / len(examples)
    rows = max(1, round(wanted / of_a_row))
    at_once = min(_HELD.get(size.device, _HELD["cpu"]), _LOGITS // size.words) // (width * len(examples[0]))
    at_once = o.device_rows or max(1, min(at_once, math.ceil(rows / size.ranks)))
    turns = math.ceil(rows / at_once / size.ranks) * size.ranks
    return {"seq_length": max(8, width), "batch_size": at_once, "gradient_accumulation": turns}


def model_named(model: str, option: str = "MODEL") -> str:
    """A hub id, or the whole path of what lies here."""
    found = whole(model, Path())
    if found.startswith("/") and not os.path.exists(found.partition("+")[0]):
        raise UserError(f"{option} {model}: no such file or folder")
    return found


_OPTIONS = {
    "initial_population": "MODEL",
    "mutation_datasets": "ROWS",
    "sft_epochs": "--epochs",
    "dpo_beta": "--beta",
    "batch_size": "--device-rows",
    "gradient_accumulation": "--batch-tokens",
    "adapter": "--rank, --alpha, --target",
}

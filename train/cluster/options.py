"""The options of train_fsdp.py, and the settings of the inner loop that follow from them."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from fleet.errors import refuse
from fleet.run_config import validated, whole
from train import text_sources
from train.training_config import TrainConfig, alone

Strategy = Literal["NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
Precision = Literal["32-true", "tf32-true", "bf16-mixed", "fp16-mixed"]

_WARMUP, _TENTH = 1000, 10  # steps, and the part of all that they are at most


@dataclass(frozen=True)
class CheckpointOptions:
    """--ckpt.*"""

    path: Annotated[Path, Parameter(help="Checkpoints, metrics and the model at the end go here.")] = Path("outputs")
    interval: Annotated[int | None, Parameter(help="Steps between two checkpoints; none: only when training ends.")] = (
        None
    )
    topk: Annotated[int | None, Parameter(help="How many of the newest stay; none: all.")] = None
    resume: Annotated[
        str | None, Parameter(help="A checkpoint's folder, or `true` for the newest complete one below --ckpt.path.")
    ] = None


@dataclass(frozen=True)
class HivemindOptions:
    """--hv.*: DiLoCo between clusters. Given any of them, this group of ranks is one peer."""

    initial_peers: Annotated[
        list[str], Parameter(help="Where other peers are met: addresses that hivemind-dht prints.", negative=())
    ] = field(default_factory=list)
    host_maddrs: Annotated[list[str], Parameter(help="Where this peer listens.", negative=())] = field(
        default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"]
    )
    announce_maddrs: Annotated[
        list[str], Parameter(help="What others are told to reach it by, if not that.", negative=())
    ] = field(default_factory=list)
    galaxy_size: Annotated[int, Parameter(help="How many peers there are; the first rounds wait for all.")] = 1
    world_rank: Annotated[int, Parameter(help="Which of them this is, from 0: it decides which text it sees.")] = 0
    local_steps: Annotated[int, Parameter(help="Steps between two meetings.")] = 500
    outer_lr: Annotated[float, Parameter(help="Of the outer Nesterov step.")] = 0.7
    run: Annotated[str, Parameter(help="What this training is called at the meeting point.")] = "train-fsdp"
    hivemind_compression: Annotated[
        Literal["none", "fp16", "scaled-fp16", "uniform8bit", "quantile8bit", "blockwise8bit"],
        Parameter(help="What changes travel in."),
    ] = "fp16"
    all_reduce_strategy: Annotated[
        Literal["WAIT_FOR_ALL", "NO_WAIT"],
        Parameter(
            help="Whether a round waits for all peers that live, or goes on after --hv.matchmaking-time, even alone."
        ),
    ] = "WAIT_FOR_ALL"
    averaging_timeout: Annotated[float, Parameter(help="Seconds that an exchange may take.")] = 300.0
    matchmaking_time: Annotated[float, Parameter(help="Seconds in which a group comes together.")] = 15.0
    timeout_waiting_for_peers: Annotated[
        float, Parameter(help="Seconds to wait for others, at the beginning and in rounds.")
    ] = 600.0
    average_state_every: Annotated[
        int,
        Parameter(help="Outer steps after which all take the first peer's numbers exactly, and at the end; 0: never."),
    ] = 10
    skip_load_from_peers: Annotated[
        bool, Parameter(help="Begin with one's own weights, however far the others are.")
    ] = False
    fail_rank_drop: Annotated[
        bool, Parameter(help="End where a peer is lost, instead of going on with the others.")
    ] = False


@dataclass(frozen=True)
class TrainingOptions:
    """All of them together."""

    path_model: Annotated[
        str,
        Parameter(
            help="A hub id, a preset (tiny, 14m, 60m, 150m, 1b), or a folder; one without weights gets fresh ones."
        ),
    ] = "150m"
    torch_compile: Annotated[bool, Parameter(help="Compile the model's layers.")] = True
    attn_implementation: Annotated[str, Parameter(help="sdpa, eager, or another that transformers knows.")] = "sdpa"
    dataset_name_or_path: Annotated[
        str,
        Parameter(
            help="The hub's, with a field `text`; a .jsonl, .parquet or .txt file; or stdlib: Python's own source."
        ),
    ] = "stdlib"
    dataset_config: Annotated[
        str, Parameter(help="Which configuration of a hub's data set, such as `en` of allenai/c4.")
    ] = ""
    tokenizer: Annotated[
        str,
        Parameter(
            help="A hub id or a folder; else the model's own, or for a preset 1,024 tokens made of the data set."
        ),
    ] = ""
    seq_length: Annotated[int, Parameter(help="Tokens of a sequence.")] = 1024
    num_workers: Annotated[
        int, Parameter(help="Threads that make tokens of text, on each machine, a little ahead of training.")
    ] = 4
    lr: Annotated[float, Parameter(help="The highest learning rate; it falls to a tenth, as a cosine.")] = 4e-4
    optimizer: Annotated[
        Literal["adamw", "muon", "muon+"],
        Parameter(
            help="AdamW, or Muon for the matrices within the model and AdamW for the rest; muon+: all rows of a matrix "
            "move equally far."
        ),
    ] = "adamw"
    total_batch_size: Annotated[int, Parameter(help="Sequences of a step, over all ranks (of one peer).")] = 512
    per_device_train_batch_size: Annotated[int, Parameter(help="Of these, what a rank takes at a time.")] = 32
    warmup_steps: Annotated[
        int | None,
        Parameter(help="Steps in which the learning rate rises; 1,000, or a tenth of all where that is less."),
    ] = None
    total_steps: Annotated[int, Parameter(help="Steps that the schedule is made for.")] = 88_000
    max_steps: Annotated[int | None, Parameter(help="Stop after so many of them.")] = None
    sharding_strategy: Annotated[
        Strategy,
        Parameter(
            help="NO_SHARD: copies (DDP). FULL_SHARD: parts (FSDP2). SHARD_GRAD_OP: parts, but whole from forward to "
            "backward. HYBRID_SHARD, _HYBRID_SHARD_ZERO2: such parts on each machine, copies between them."
        ),
    ] = "NO_SHARD"
    precision: Annotated[
        Precision | None, Parameter(help="Of the model's arithmetic; by default bf16-mixed on a GPU, 32-true on a CPU.")
    ] = None
    deterministic: Annotated[
        bool, Parameter(help="Sums in a fixed order on a GPU, too; without, kernels may be faster.")
    ] = True
    project: Annotated[str, Parameter(help="What wandb and trackio call it.")] = "train_fsdp"
    metric_logger_type: Annotated[
        Literal["wandb", "dummy", "csv", "tensorboard", "trackio"], Parameter(help="Where metrics go; dummy: nowhere.")
    ] = "csv"
    fake_data: Annotated[
        bool, Parameter(help="Random tokens, to measure speed; without --ckpt.interval, nothing is kept.")
    ] = False
    log_activations_steps: Annotated[
        int | None, Parameter(help="Every so many steps: how large the numbers are that each layer passes on.")
    ] = None
    seed: Annotated[int, Parameter(help="Of fresh weights, the order of data, and dropout.")] = 1
    ckpt: CheckpointOptions = CheckpointOptions()
    hv: HivemindOptions | None = None

    def on(self, device: str) -> "TrainingOptions":
        """With what follows from where it is trained."""
        return replace(self, precision=self.precision or precision_of(device))

    @property
    def last_step(self) -> int:
        return min(self.total_steps, self.max_steps or self.total_steps)

    @property
    def warmup(self) -> int:
        return min(_WARMUP, self.total_steps // _TENTH) if self.warmup_steps is None else self.warmup_steps

    @property
    def keeps(self) -> bool:
        """Whether what is learned is to stay."""
        return not self.fake_data or bool(self.ckpt.interval)

    def doubts(self) -> str:
        """What works, and is hardly meant."""
        if self.warmup * _TENTH <= self.total_steps:
            return ""
        return (
            f"--warmup-steps {self.warmup} is more than a tenth of --total-steps {self.total_steps}: the learning rate "
            "rises for most of a short training; without it, a tenth is taken"
        )

    def check(self, ranks: int) -> None:
        """Whatever cannot work is said in one line, with what would."""
        refuse(self._problems(ranks))

    def _problems(self, ranks: int) -> Iterator[tuple[object, str]]:
        """Each possible one, and whether it is there."""
        there = {**vars(self), "ckpt.interval": self.ckpt.interval, "ckpt.topk": self.ckpt.topk}
        there |= {f"hv.{name}": value for name, value in vars(self.hv).items()} if self.hv else {}
        for name, low in _LEAST.items():
            value = there.get(name)
            wrong = value is not None and not value >= low  # nothing is above what is not a number
            yield wrong, f"{_spelled(name)} is {value}: it must be {low:g} or more"
        for name in ("path_model", "dataset_name_or_path", "tokenizer"):
            value = there[name]
            lost = value.startswith((".", "/", "~")) and not os.path.exists(os.path.expanduser(value))
            yield lost, f"{_spelled(name)} {value}: no such file or folder"
        size, each, steps = self.total_batch_size, self.per_device_train_batch_size, self.total_steps
        yield (
            size % (ranks * each),
            f"--total-batch-size {size} is not divided by {ranks} ranks of --per-device-train-batch-size {each}; the "
            f"nearest that is: {_nearest(size, ranks * each)}",
        )
        if hv := self.hv:
            yield (
                steps % hv.local_steps,
                f"--total-steps {steps} is no multiple of --hv.local-steps {hv.local_steps}; the nearest is "
                f"{_nearest(steps, hv.local_steps)}",
            )
            yield (
                not 0 <= hv.world_rank < hv.galaxy_size,
                f"--hv.world-rank {hv.world_rank}: of --hv.galaxy-size {hv.galaxy_size} peers there are the ranks 0 to "
                f"{hv.galaxy_size - 1}",
            )

    def settings(self) -> TrainConfig:
        """Those of the inner loop: the same as of a run, where a peer is a slot, and a meeting ends a round."""
        rounds = self.total_steps // self.hv.local_steps if self.hv else 1
        source = "fake" if self.fake_data else whole(self.dataset_name_or_path, Path(), text_sources.FILES)
        keys: dict[str, Any] = dict(
            seed=self.seed,
            population_size=self.hv.galaxy_size if self.hv else 1,
            **{**alone(self.total_steps // rounds), "max_generations": rounds, "inner_optimizer": self.optimizer},
            initial_population=(whole(self.path_model, Path()),),
            datasets=({"source": source, "name": self.dataset_config},),
            tokenizer=whole(self.tokenizer, Path()),
            batch_size=self.total_batch_size,
            seq_length=self.seq_length,
            lr=self.lr,
            warmup_steps=self.warmup,
            precision=self.precision,
            deterministic=self.deterministic,
            compile=self.torch_compile,
            max_epochs=1e6,
            outer_lr=self.hv.outer_lr if self.hv else 0.7,
        )
        return validated(TrainConfig, keys, "options", lambda key: _OPTIONS.get(key, _spelled(key)))

    def bound(self) -> dict[str, Any]:
        """What a checkpoint goes on with: all that decides which numbers come out."""
        known = {key: value for key, value in vars(self).items() if key not in _FREE} | {"warmup_steps": self.warmup}
        return known | ({key: getattr(self.hv, key) for key in _SHARED} if self.hv else {})


_OPTIONS = {
    **{"datasets": "--dataset-name-or-path", "initial_population": "--path-model", "batch_size": "--total-batch-size"},
    **{"inner_steps": "--total-steps", "max_generations": "--total-steps", "outer_lr": "--hv.outer-lr"},
}
_LEAST = {  # that a number may be
    **dict.fromkeys(("seq_length", "total_batch_size", "per_device_train_batch_size", "total_steps"), 1),
    **dict.fromkeys(("ckpt.interval", "ckpt.topk", "max_steps", "log_activations_steps", "num_workers"), 1),
    **{"hv.galaxy_size": 1, "hv.world_rank": 0, "hv.local_steps": 1, "hv.average_state_every": 0, "hv.outer_lr": 1e-6},
    **dict.fromkeys(("hv.averaging_timeout", "hv.matchmaking_time", "hv.timeout_waiting_for_peers"), 0.1),
}
_FREE = (  # what decides no numbers, or is bound as what it came to
    *("torch_compile", "num_workers", "max_steps", "project", "metric_logger_type", "log_activations_steps"),
    *("tokenizer", "path_model", "ckpt", "hv", "sharding_strategy", "per_device_train_batch_size"),
    *("attn_implementation", "deterministic"),
)
_SHARED = ("galaxy_size", "world_rank", "local_steps", "outer_lr", "hivemind_compression")


def precision_of(device: str) -> Precision:
    """What is fast there and loses nothing: many CPUs have no bf16, and take several times as long to play one."""
    return "bf16-mixed" if device == "cuda" else "32-true"


def spelled(words: Sequence[str]) -> list[str]:
    """`--total_batch_size` is `--total-batch-size`, too."""
    return [re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word) for word in words]


def _spelled(key: str) -> str:
    return "--" + key.replace("_", "-")


def _nearest(number: int, part: int) -> int:
    """The multiple of a part that is nearest."""
    return max(1, round(number / part)) * part

"""The options of train_fsdp.py, and the settings of the inner loop that follow from them."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from fleet.config import UserError, validated, whole
from train import text
from train.config import TrainConfig, alone

Strategy = Literal["NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
Resume = bool | Path

_WARMUP, _TENTH = 1000, 10  # steps, and the part of all that they are at most


def _help(about: str, **more: Any) -> Parameter:
    return Parameter(help=about, **more)


@dataclass(frozen=True)
class CheckpointOptions:
    """--ckpt.*"""

    path: Annotated[Path, _help("Checkpoints, metrics and the model at the end go here.")] = Path("outputs")
    interval: Annotated[int | None, _help("Steps between two checkpoints; none: only when training ends.")] = None
    topk: Annotated[int | None, _help("How many of the newest stay; none: all.")] = None
    resume: Annotated[
        str | None, _help("A checkpoint's folder, or `true` for the newest complete one below --ckpt.path.")
    ] = None


@dataclass(frozen=True)
class HivemindOptions:
    """--hv.*: DiLoCo between clusters. Given any of them, this group of ranks is one peer."""

    initial_peers: Annotated[
        list[str], _help("Where other peers are met: addresses that hivemind-dht prints.", negative=())
    ] = field(default_factory=list)
    host_maddrs: Annotated[list[str], _help("Where this peer listens.", negative=())] = field(
        default_factory=lambda: ["/ip4/0.0.0.0/tcp/0"]
    )
    announce_maddrs: Annotated[list[str], _help("What others are told to reach it by, if not that.", negative=())] = (
        field(default_factory=list)
    )
    galaxy_size: Annotated[int, _help("How many peers there are; the first rounds wait for all.")] = 1
    world_rank: Annotated[int, _help("Which of them this is, from 0: it decides which text it sees.")] = 0
    local_steps: Annotated[int, _help("Steps between two meetings.")] = 500
    outer_lr: Annotated[float, _help("Of the outer Nesterov step.")] = 0.7
    run: Annotated[str, _help("What this training is called at the meeting point.")] = "train-fsdp"
    hivemind_compression: Annotated[
        Literal["none", "fp16", "scaled-fp16", "uniform8bit", "quantile8bit", "blockwise8bit"],
        _help("What changes travel in."),
    ] = "fp16"
    all_reduce_strategy: Annotated[
        Literal["WAIT_FOR_ALL", "NO_WAIT"],
        _help("Whether a round waits for all peers that live, or goes on after --hv.matchmaking-time, even alone."),
    ] = "WAIT_FOR_ALL"
    averaging_timeout: Annotated[float, _help("Seconds that an exchange may take.")] = 300.0
    matchmaking_time: Annotated[float, _help("Seconds in which a group comes together.")] = 15.0
    timeout_waiting_for_peers: Annotated[
        float, _help("Seconds to wait for others, at the beginning and in rounds.")
    ] = 600.0
    average_state_every: Annotated[
        int, _help("Outer steps after which all take the first peer's numbers exactly, and at the end; 0: never.")
    ] = 10
    skip_load_from_peers: Annotated[bool, _help("Begin with one's own weights, however far the others are.")] = False
    fail_rank_drop: Annotated[bool, _help("End where a peer is lost, instead of going on with the others.")] = False

    def bounds(self) -> dict[str, tuple[float, float]]:
        """Of each number: what it is, and the least that it may be."""
        least = {"galaxy_size": 1, "world_rank": 0, "local_steps": 1, "average_state_every": 0, "outer_lr": 1e-6}
        least |= {"averaging_timeout": 0.1, "matchmaking_time": 0.1, "timeout_waiting_for_peers": 0.1}
        return {f"--hv.{name.replace('_', '-')}": (getattr(self, name), low) for name, low in least.items()}


@dataclass(frozen=True)
class TrainingOptions:
    """All of them together."""

    path_model: Annotated[
        str,
        _help("A hub id, a preset (tiny, 14m, 60m, 150m, 1b), or a folder; one without weights gets fresh ones."),
    ] = "150m"
    torch_compile: Annotated[bool, _help("Compile the model's layers.")] = True
    attn_implementation: Annotated[str, _help("sdpa, eager, or another that transformers knows.")] = "sdpa"
    dataset_name_or_path: Annotated[
        str,
        _help("The hub's, with a field `text`; a .jsonl, .parquet or .txt file; or stdlib: Python's own source."),
    ] = "stdlib"
    dataset_config: Annotated[str, _help("Which configuration of a hub's data set, such as `en` of allenai/c4.")] = ""
    tokenizer: Annotated[
        str,
        _help("A hub id or a folder; else the model's own, or for a preset 1,024 tokens made of the data set."),
    ] = ""
    seq_length: Annotated[int, _help("Tokens of a sequence.")] = 1024
    num_workers: Annotated[
        int, _help("Threads that make tokens of text, on each machine, a little ahead of training.")
    ] = 4
    lr: Annotated[float, _help("The highest learning rate; it falls to a tenth, as a cosine.")] = 4e-4
    optimizer: Annotated[
        Literal["adamw", "muon"], _help("AdamW, or Muon for the matrices within the model and AdamW for the rest.")
    ] = "adamw"
    total_batch_size: Annotated[int, _help("Sequences of a step, over all ranks (of one peer).")] = 512
    per_device_train_batch_size: Annotated[int, _help("Of these, what a rank takes at a time.")] = 32
    warmup_steps: Annotated[
        int | None, _help("Steps in which the learning rate rises; 1,000, or a tenth of all where that is less.")
    ] = None
    total_steps: Annotated[int, _help("Steps that the schedule is made for.")] = 88_000
    max_steps: Annotated[int | None, _help("Stop after so many of them.")] = None
    sharding_strategy: Annotated[
        Strategy,
        _help(
            "NO_SHARD: copies (DDP). FULL_SHARD: parts (FSDP2). SHARD_GRAD_OP: parts, but whole from forward to "
            "backward. HYBRID_SHARD, _HYBRID_SHARD_ZERO2: such parts on each machine, copies between them."
        ),
    ] = "NO_SHARD"
    precision: Annotated[Literal["fp16-mixed", "bf16-mixed", "32-true"], _help("Of the arithmetic.")] = "bf16-mixed"
    project: Annotated[str, _help("What wandb and trackio call it.")] = "train_fsdp"
    metric_logger_type: Annotated[
        Literal["wandb", "dummy", "csv", "tensorboard", "trackio"], _help("Where metrics go; dummy: nowhere.")
    ] = "csv"
    fake_data: Annotated[bool, _help("Random tokens, to measure speed; without --ckpt.interval, nothing is kept.")] = (
        False
    )
    log_activations_steps: Annotated[
        int | None, _help("Every so many steps: how large the numbers are that each layer passes on.")
    ] = None
    seed: Annotated[int, _help("Of fresh weights, the order of data, and dropout.")] = 1
    ckpt: CheckpointOptions = CheckpointOptions()
    hv: HivemindOptions | None = None

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
        least: dict[str, int | None] = {"--seq-length": self.seq_length, "--total-batch-size": self.total_batch_size}
        least |= {"--per-device-train-batch-size": self.per_device_train_batch_size, "--total-steps": self.total_steps}
        least |= {"--ckpt.interval": self.ckpt.interval, "--ckpt.topk": self.ckpt.topk, "--max-steps": self.max_steps}
        least |= {"--log-activations-steps": self.log_activations_steps, "--num-workers": self.num_workers}
        above: dict[str, tuple[float | None, float]] = {name: (value, 1.0) for name, value in least.items()}
        if self.hv:
            above |= self.hv.bounds()
        for name, (value, low) in above.items():
            if value is not None and not value >= low:  # nothing is above what is not a number
                raise UserError(f"{name} is {value}: it must be {low:g} or more")
        for name in ("path_model", "dataset_name_or_path", "tokenizer"):
            value = getattr(self, name)
            if value.startswith((".", "/", "~")) and not os.path.exists(os.path.expanduser(value)):
                raise UserError(f"--{name.replace('_', '-')} {value}: no such file or folder")
        together = ranks * self.per_device_train_batch_size
        if self.total_batch_size % together:
            near = max(1, round(self.total_batch_size / together)) * together
            raise UserError(
                f"--total-batch-size {self.total_batch_size} is not divided by {ranks} ranks of "
                f"--per-device-train-batch-size {self.per_device_train_batch_size}; the nearest that is: {near}"
            )
        if self.hv and self.total_steps % self.hv.local_steps:
            near = max(1, round(self.total_steps / self.hv.local_steps)) * self.hv.local_steps
            raise UserError(
                f"--total-steps {self.total_steps} is no multiple of --hv.local-steps {self.hv.local_steps}; "
                f"the nearest is {near}"
            )
        if self.hv and not 0 <= self.hv.world_rank < self.hv.galaxy_size:
            raise UserError(
                f"--hv.world-rank {self.hv.world_rank}: of --hv.galaxy-size {self.hv.galaxy_size} peers there are the "
                f"ranks 0 to {self.hv.galaxy_size - 1}"
            )

    def settings(self) -> TrainConfig:
        """Those of the inner loop: the same as of a run, where a peer is a slot, and a meeting ends a round."""
        rounds = self.total_steps // self.hv.local_steps if self.hv else 1
        source = "fake" if self.fake_data else whole(self.dataset_name_or_path, Path(), text.FILES)
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
            compile=self.torch_compile,
            max_epochs=1e6,
            outer_lr=self.hv.outer_lr if self.hv else 0.7,
        )
        return validated(TrainConfig, keys, "options", lambda key: _OPTIONS.get(key, "--" + key.replace("_", "-")))

    def bound(self) -> dict[str, Any]:
        """What a checkpoint goes on with: all that decides which numbers come out."""
        free = (
            *("torch_compile", "num_workers", "max_steps", "project", "metric_logger_type", "log_activations_steps"),
            *("tokenizer", "path_model", "ckpt", "hv", "sharding_strategy", "per_device_train_batch_size"),
            "attn_implementation",
        )
        known = {key: value for key, value in asdict(self).items() if key not in free} | {"warmup_steps": self.warmup}
        peers = {key: value for key, value in asdict(self.hv).items() if key in _SHARED} if self.hv else {}
        return {**known, **peers}


_OPTIONS = {
    **{"datasets": "--dataset-name-or-path", "initial_population": "--path-model", "batch_size": "--total-batch-size"},
    **{"inner_steps": "--total-steps", "max_generations": "--total-steps"},
}
_SHARED = ("galaxy_size", "world_rank", "local_steps", "outer_lr", "hivemind_compression")


def spelled(words: Sequence[str]) -> list[str]:
    """`--total_batch_size` is `--total-batch-size`, too."""
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
    return found

"""An adapter as PEFT loads it, made matrix by matrix: each is decomposed while others are, and written in its turn."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from fleet import lm_eval_command
from fleet.places import on_hub
from merge import atomic_output
from merge.donor import LazyTensor
from merge.engine import MergeOptions, one_thread_each
from merge.json_files import write_json
from merge.lora.low_rank import Change, LowRank, least_error, low_rank
from merge.tensor_files import Header, TensorEntry, UserError, bytes_of, packed, write_header

LINEAR, TURNED, EMBEDDING = "linear", "turned", "embedding"  # kinds of modules; turned: GPT-2's, y = x W
PREFIX = "base_model.model."  # of all names in an adapter's file
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MatrixJob:
    """What an adapter is to say of one module."""

    module: str
    change: Change
    most: int  # its rank is no larger
    kind: str = LINEAR

    @property
    def keys(self) -> tuple[str, str]:
        """The names of its two matrices."""
        begin, end = ("lora_embedding", "") if self.kind == EMBEDDING else ("lora", ".weight")
        return f"{PREFIX}{self.module}.{begin}_A{end}", f"{PREFIX}{self.module}.{begin}_B{end}"

    def pair(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The two for left @ right: PEFT transposes those of embeddings, and of weights that lie transposed."""
        return (right, left) if self.kind == LINEAR else (left.T, right.T)


@dataclass(frozen=True)
class AdapterPlan:
    base: str  # the model that it is for
    matrices: Sequence[MatrixJob]
    whole: Mapping[str, LazyTensor] = field(default_factory=dict)  # by their names in the adapter's file
    saved: Sequence[str] = ()  # modules of which there is everything
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class AdapterStats:
    """What was made."""

    ranks: Mapping[str, int]
    energy: float  # of all changes of matrices: the sum of squares
    kept: float
    best: float | None  # the root of the sum of squares that the best matrices leave
    bytes: int
    seconds: float
    notes: Sequence[str]

    @property
    def error(self) -> float:
        """The root of the sum of squares that is left, as a share of the whole."""
        return math.sqrt(max(0.0, 1 - self.kept / self.energy)) if self.energy else 0.0


def write_adapter(
    plan: AdapterPlan,
    out: Path,
    *,
    share: float = 1.0,
    optimum: bool = False,
    overwrite: bool = False,
    needed: Iterable[Path] = (),
    how: MergeOptions = MergeOptions(),
    progress: Progress = lambda count, total: None,
) -> AdapterStats:
    """Into a folder that is there as a whole or not at all."""
    if not 0 < share <= 1:
        raise UserError(f"an energy of {share:g}: a share above 0 and up to 1 is expected, as in 0.95")
    begin, found = time.monotonic(), dict[str, tuple[LowRank, float | None]]()
    room = _room(plan)
    with atomic_output.atomic_folder(out, room.bytes, overwrite, needed) as draft:
        tensors = _tensors(plan, share, optimum, how, found, progress)
        size = _growing(draft / "adapter_model.safetensors", len(packed(room)), tensors)
        ranks = {name: low.rank for name, (low, _) in found.items()}
        (draft / "README.md").write_text(_card(plan.base, out), encoding="utf-8")
        if not found and not plan.whole:
            raise UserError(f"there is nothing to write: no matrix differs from {plan.base or 'the base'}")
        write_json(draft / "adapter_config.json", _settings(plan, ranks))
    best = [error for _, error in found.values() if error is not None]
    return AdapterStats(
        ranks,
        sum(low.energy for low, _ in found.values()),
        sum(low.kept for low, _ in found.values()),
        math.sqrt(sum(error * error for error in best)) if optimum else None,
        size,
        time.monotonic() - begin,
        plan.notes,
    )


# -- the weights -------------------------------------------------------------------------------------------------------


def _tensors(
    plan: AdapterPlan,
    share: float,
    optimum: bool,
    how: MergeOptions,
    found: dict[str, tuple[LowRank, float | None]],
    progress: Progress,
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the file, in their order; a change of nothing has none."""
    stop, total = Event(), sum(math.prod(each.change.shape) for each in plan.matrices)

    def decomposed(job: MatrixJob) -> tuple[LowRank, float | None]:
        change = replace(job.change, blocks=lambda: _until(stop, job.change.blocks()))
        low = low_rank(change, job.most, share)
        return low, least_error(change, low.rank) if optimum else None

    with one_thread_each(), ThreadPoolExecutor(how.workers, "decompose") as pool:
        try:
            for place in range(0, len(plan.matrices), how.workers):
                some = plan.matrices[place : place + how.workers]
                for job, made in zip(some, pool.map(decomposed, some), strict=True):
                    progress(math.prod(job.change.shape), total)
                    low, _ = made
                    if low.energy:
                        found[job.module] = made
                        yield from zip(job.keys, job.pair(low.left.float(), low.right.float()), strict=True)
        finally:
            stop.set()
    for key, stored in plan.whole.items():
        yield key, stored.read()


def _until(stop: Event, blocks: Iterator[Tensor]) -> Iterator[Tensor]:
    for block in blocks:
        if stop.is_set():
            raise UserError("stopped")
        yield block


def _room(plan: AdapterPlan) -> Header:
    """Of all that there may be, in the file's order; what there is needs no more."""
    entries = dict[str, TensorEntry]()
    for job in plan.matrices:
        rows, columns = job.change.shape
        rank = min(job.most, rows, columns)
        pair = job.pair(torch.empty(rows, rank, device="meta"), torch.empty(rank, columns, device="meta"))
        for key, each in zip(job.keys, pair, strict=True):
            entries[key] = TensorEntry(torch.float32, tuple(each.shape))
    entries |= {key: TensorEntry(stored.dtype, stored.shape) for key, stored in plan.whole.items()}
    return Header(entries, {"format": "pt"})


def _growing(path: Path, room: int, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """A weight file whose header is written at the end, when all shapes are known, into the room that was left."""
    entries = dict[str, TensorEntry]()
    with path.open("wb") as file:
        file.seek(room)
        for key, tensor in tensors:
            entries[key] = TensorEntry(tensor.dtype, tuple(tensor.shape))
            file.write(bytes_of(tensor.contiguous()))
        size = file.tell()
        file.seek(0)
        write_header(file, Header(entries, {"format": "pt"}), room)
    return size


# -- what lies beside them ---------------------------------------------------------------------------------------------


def _settings(plan: AdapterPlan, ranks: Mapping[str, int]) -> dict[str, Any]:
    """adapter_config.json. The matrices are the change itself: each one's alpha is its rank."""
    usual = max(Counter(ranks.values()).items(), key=lambda item: (item[1], item[0]))[0] if ranks else 1
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    return {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": plan.base},
        **{"r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others},
        **{"target_modules": sorted(ranks), "modules_to_save": sorted(plan.saved) or None},
        "bias": "all" if any(key.endswith(".base_layer.bias") for key in plan.whole) else "none",
        "fan_in_fan_out": any(job.kind == TURNED for job in plan.matrices),
        **{"lora_dropout": 0.0, "use_rslora": False, "inference_mode": True},
    }


def _card(base: str, out: Path) -> str:
    """README.md, with the fields that the hub reads."""
    named = [f"base_model: {base}"] if on_hub(base) else []
    fields = "\n".join(["library_name: peft", *named, "tags:", "- lora"])
    return (
        f"---\n{fields}\n---\n# A LoRA adapter of `{base}`\n\n"
        f"## Evaluation\n\n```sh\n{lm_eval_command.lm_eval(out, base)}\n```\n"
    )

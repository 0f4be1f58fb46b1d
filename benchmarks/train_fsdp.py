"""train_fsdp.py beside its limits: tokens a second of its loop beside a bare DDP loop with the same model and ranks; on
GPUs, how much of their fastest arithmetic it uses; and bytes that two Hivemind peers send in an outer step.

python -m benchmarks.train_fsdp [--quick]
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
from cyclopts import App, Parameter
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import peers
from benchmarks.figures import goal, spread, table
from train.cluster.options import CheckpointOptions, TrainingOptions
from train.cluster.ranks import Ranks, joined
from train.cluster.shared_learner import learner_of
from train.cluster.startup import model_of
from train.cluster.token_data import RandomBatches
from train.learner import rate
from train.model import built, described, without_numbers

ROOT = Path(__file__).parent.parent
RANKS, PARTS, _GOAL = 2, 2, 0.97
_HIDDEN = Parameter(show=False)
_LARGE = (("150m", 16, 1024, 20), ("1b", 4, 1024, 12))  # on GPUs
app = App(name="python -m benchmarks.train_fsdp", help=__doc__, version_flags=[])


def options(preset: str, batch: int, length: int, steps: int, strategy: str, place: Path) -> TrainingOptions:
    return TrainingOptions(
        path_model=preset, torch_compile=False, seq_length=length, total_batch_size=batch * RANKS * PARTS,
        per_device_train_batch_size=batch, warmup_steps=1, total_steps=steps, precision="32-true", fake_data=True,
        sharding_strategy=strategy, ckpt=CheckpointOptions(path=place),
    )  # fmt: skip


def ours(o: TrainingOptions, ranks: Ranks, steps: int) -> list[float]:
    """Seconds of each step."""
    c = o.settings()
    learner = learner_of(model_of(o, c, c.vocab_size, ranks), c, ranks, o.sharding_strategy)
    there = RandomBatches(c, ranks, c.vocab_size).of(0, 0, steps, o.per_device_train_batch_size)
    found, seen = [], time.perf_counter()
    for _ in learner.train(there, (rate(c, step) for step in range(steps))):
        ranks.mean(learner.total)
        ranks.told_to_stop()
        seen, before = time.perf_counter(), seen
        found.append(seen - before)
    return found


def bare(o: TrainingOptions, ranks: Ranks, steps: int) -> list[float]:
    """As anybody would write it, on batches that are there already."""
    c = o.settings()
    model = built(c.initial_population[0], c.vocab_size, c.seed)
    copies = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    shape = (o.per_device_train_batch_size, o.seq_length + 1)

    def part(tokens: Tensor) -> None:
        logits = copies(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        (torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / PARTS).backward()

    found, seen = [], time.perf_counter()
    for _ in range(steps):
        batches = [torch.randint(0, 1024, shape) for _ in range(PARTS)]
        optimizer.zero_grad()
        with copies.no_sync():
            for tokens in batches[:-1]:
                part(tokens)
        part(batches[-1])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen, before = time.perf_counter(), seen
        found.append(seen - before)
    return found


def rank(plan: Path, said: Path) -> None:
    """In turns, so that a noisy machine disturbs both alike."""
    p = json.loads(plan.read_text())
    with joined() as ranks:
        torch.set_num_threads(1)
        found: dict[str, list[float]] = {}
        for turn in range(p["turns"]):
            for strategy in ("bare DDP", "NO_SHARD", "FULL_SHARD"):
                kind = strategy if strategy != "bare DDP" else "NO_SHARD"
                o = options(p["preset"], p["batch"], p["length"], p["steps"], kind, plan.parent / f"{strategy}{turn}")
                times = (bare if strategy == "bare DDP" else ours)(o, ranks, p["steps"])[2:]
                tokens = o.total_batch_size * o.seq_length
                found.setdefault(strategy, []).append(tokens / median(times))
                dist.barrier()
        if ranks.first:
            said.write_text(json.dumps(found))


def used(plan: Path, said: Path) -> None:
    """Of a GPU's rate in one large product of matrices, the share that a training's arithmetic comes to."""
    p = json.loads(plan.read_text())
    with joined() as ranks:
        strategy = "FULL_SHARD" if ranks.count > 1 else "NO_SHARD"
        o = options(p["preset"], p["batch"], p["length"], p["steps"], strategy, plan.parent)
        o = replace(o, precision="bf16-mixed", total_batch_size=p["batch"] * PARTS * ranks.count)
        step = median(ours(o, ranks, p["steps"])[4:])
        config = described(p["preset"])
        numbers = sum(each.numel() for each in without_numbers(config).parameters())
        numbers -= config.vocab_size * config.hidden_size
        attention = 12 * config.num_hidden_layers * config.hidden_size * p["length"]
        rate = (6 * numbers + attention) * p["batch"] * PARTS * p["length"] / step
        if ranks.first:
            said.write_text(json.dumps({"rate": rate, "most": fastest(ranks.device), "step": step}))


def fastest(device: torch.device, size: int = 8192) -> float:
    """Operations a second of a bf16 product."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    found = []
    for _ in range(30):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        one @ other
        torch.cuda.synchronize()
        found.append(2 * size**3 / (time.perf_counter() - begin))
    return max(found)


@app.default
def run(
    *,
    quick: bool = False,
    plan: Annotated[Path | None, _HIDDEN] = None,
    said: Annotated[Path | None, _HIDDEN] = None,
    gpus: Annotated[bool, _HIDDEN] = False,
) -> None:
    if plan and said:
        return (used if gpus else rank)(plan, said)
    speed(quick)
    on_gpus()
    on_the_wire(quick)


def on_the_wire(quick: bool) -> None:
    if why := peers.why_not():
        print(f"Bytes on the wire: not measured, {why}")
        return
    note = "Each peer has to send half of its numbers and, averaged, the other half: the model once."
    shown = table(
        "Bytes of an outer step, two Hivemind peers", "", "numbers as fp32", "sent by a peer", "share", note=note
    )
    for compression in peers.COMPRESSIONS[:2] if quick else peers.COMPRESSIONS:
        with tempfile.TemporaryDirectory() as place:
            found = peers.measured(compression, Path(place), "tiny" if quick else "14m")
        mine, model = found["bytes"] / 2 / 1e6, found["model"] / 1e6
        shown.add_row(compression, f"{model:.2f} MB", f"{mine:.2f} MB", f"{mine / model:.2f}")
    Console().print(shown)


def on_gpus() -> None:
    if not (count := torch.cuda.device_count()):
        print("Share of a GPU's arithmetic (MFU): not measured, no CUDA device here")
        return
    note = "Beside a large bf16 product of matrices on the same GPU."
    shown = table(
        f"Arithmetic used, {count} x {torch.cuda.get_device_name()}", "", "tokens/s", "TFLOP/s", "MFU", note=note
    )
    for name, tokens, operations, share in of_all_gpus(count):
        shown.add_row(name, f"{tokens:,.0f}", f"{operations / 1e12:.0f}", f"{share:.2f}")
    Console().print(shown)


def of_all_gpus(count: int) -> Iterator[tuple[str, float, float, float]]:
    """Of each model: tokens a second of all GPUs, operations a second of one, and their share of the most."""
    for preset, batch, length, steps in _LARGE:
        with tempfile.TemporaryDirectory() as place:
            asked = {"preset": preset, "batch": batch, "length": length, "steps": steps}
            (Path(place) / "plan.json").write_text(json.dumps(asked))
            found = started(Path(place), count, "--gpus")
        tokens = batch * PARTS * length * count / found["step"]
        yield f"{preset}, {batch} x {length}", tokens, found["rate"], found["rate"] / found["most"]


def speed(quick: bool) -> None:
    note = f"Goal: {_GOAL} of the bare loop."
    shown = table("Tokens a second, two ranks", "", "bare DDP", "NO_SHARD", "of it", "FULL_SHARD", "of it", note=note)
    for preset, batch, length, steps in (("tiny", 4, 128, 20), *([] if quick else [("14m", 4, 256, 12)])):
        with tempfile.TemporaryDirectory() as place:
            asked = {"preset": preset, "batch": batch, "length": length, "steps": steps, "turns": 3 if quick else 5}
            (Path(place) / "plan.json").write_text(json.dumps(asked))
            found = started(Path(place))
        base = median(found["bare DDP"])
        cells = [f"{base:,.0f}"]
        for name in ("NO_SHARD", "FULL_SHARD"):
            shares = [x / y for x, y in zip(found[name], found["bare DDP"], strict=True)]
            share = goal(median(shares) >= _GOAL, spread(shares, 3)) if name == "NO_SHARD" else spread(shares, 3)
            cells += [f"{median(found[name]):,.0f}", share]
        shown.add_row(f"{preset}, {batch} x {length}", *cells)
    Console().print(shown)


def started(place: Path, count: int = RANKS, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = ["-m", "benchmarks.train_fsdp", "--plan", str(place / "plan.json"), "--said", str(place / "said.json")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **({} if more else {"CUDA_VISIBLE_DEVICES": ""})}
    subprocess.run([*command, *words, *more], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((place / "said.json").read_text()))


if __name__ == "__main__":
    app()

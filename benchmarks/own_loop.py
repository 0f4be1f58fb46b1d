"""A loop of one's own that joins a run beside the project's own loop: the same small model, batches, optimizer and
schedule, with three seeds. `python -m benchmarks.own_loop`"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from rich.console import Console

from benchmarks.figures import table
from diloco import join
from train.batches import batch, owned
from train.learner import language_loss, rate
from train.member.pretraining_runtime import evaluated
from train.pretraining_export import Exporter

SEEDS = (1, 2, 3)
ROUNDS = {"population_size": 4, "inner_steps": 12, "first_inner_steps": 12, "max_generations": 12}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ADAMW = {"inner_optimizer": "adamw", "clip": 1.0, "lr": 5e-3}
OURS = {"initial_population": [{"config": SHAPE}], **ADAMW, "eval_sequences": 512}
ROOT = Path(__file__).resolve().parent.parent


def ours(place: Path, seed: int) -> Exporter:
    """A run of diloco.py."""
    file, keys = place / "ours.json", {"base_dir": str(place), "project_name": "ours", "seed": seed, "num_machines": 1}
    file.write_text(json.dumps({**keys, **OURS, **ROUNDS}))
    subprocess.run(
        [sys.executable, "diloco.py", "--config", str(file)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return Exporter(place / "ours")


def theirs(place: Path, exporter: Exporter) -> None:
    """The same in a loop as people write it; the exporter's model holds what comes of it."""
    c, model, sources = exporter.config, exporter.model, exporter.token_files("train")
    hold(exporter, "0-init-0")
    tables = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": tables, "weight_decay": c.weight_decay},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95))

    def batches(slot: int, round: int) -> Iterator[Any]:
        for step in range(c.steps_in(round)):
            yield batch(sources, [1.0], owned(c, slot, round, step, 0), c.seed)

    with join(place / "theirs", model, optimizer, seed=c.seed, **ROUNDS) as run:
        for windows in run.batches(batches):
            for group in optimizer.param_groups:
                group["lr"] = rate(c, c.steps_before(run.round) + run.steps_taken)
            loss = language_loss(model, windows)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip)
            optimizer.step()
            run.step(loss)


def hold(exporter: Exporter, what: str) -> None:
    for name, view in exporter.layout.views(exporter.chosen(what)[1]).items():
        exporter.model.get_parameter(name).data.copy_(view)


def loss_of(exporter: Exporter) -> float:
    model = exporter.model.eval()
    with torch.inference_mode():
        loss = lambda windows: float(language_loss(model, windows))  # noqa: E731
        found = evaluated(loss, exporter.token_files("test"), exporter.config, "test")
    model.train()
    return float(found["loss"])


def main() -> None:
    shown, apart = table("Loss on text that nobody learned from", "seed", "our loop", "a loop that joins", "apart"), []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as place:
            exporter = ours(Path(place), seed)
            hold(exporter, "average")
            mine = loss_of(exporter)
            theirs(Path(place), exporter)
            apart.append(loss_of(exporter) - mine)
        shown.add_row(str(seed), f"{mine:.4f}", f"{mine + apart[-1]:.4f}", f"{apart[-1]:+.4f}")
    shown.caption = (
        f"apart on average {fmean(apart):+.4f}, with a standard error of {stdev(apart) / len(apart) ** 0.5:.4f}"
    )
    Console().print(shown)


if __name__ == "__main__":
    main()

"""Tokens a second of a worker's round beside a bare PyTorch loop with the same model, data, optimizer and threads.

python -m benchmarks.train_loop [--quick]
"""

import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median

import torch
from cyclopts import App
from rich.console import Console
from torch import Tensor

from benchmarks.figures import NONE, goal, spread, table
from fleet import launches
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.work import Work
from fleet.worker import Worker
from train.model import built
from train.training_config import TrainConfig

THREADS = 2
SHAPES = {"tiny, 8 x 64": ("tiny", 8, 64, 100), "14m, 8 x 256": ("14m", 8, 256, 40)}
app = App(name="python -m benchmarks.train_loop", help=__doc__, version_flags=[])


def config_of(model: str, batch: int, length: int, steps: int, rounds: int, optimizer: str) -> TrainConfig:
    return TrainConfig(
        algorithm="edt", project_name="run", initial_population=(model,), batch_size=batch, seq_length=length,
        inner_steps=steps, max_generations=rounds, first_inner_steps=steps, population_size=1, threads=THREADS,
        datasets=("fake",), eval_sequences=8, test_sequences=8, eval_batch_size=8, vocab_size=1024, average_every=1000,
        inner_optimizer=optimizer,
    )  # fmt: skip


def worker_rates(config: TrainConfig) -> list[float]:
    """Of each round: all that the maker does, evaluation and files included."""
    from edt import EDT
    from train.member.pretraining_tasks import maker

    make, took = maker(config), list[float]()

    def timed(work: Work) -> object:
        began = time.perf_counter()
        made = make(work)
        if work.recipe.task == "child":
            took.append(time.perf_counter() - began)
        return made

    with tempfile.TemporaryDirectory() as place:
        create_run(Path(place), "run", config.bound(), Host())
        store, _ = open_run(Path(place) / "run", Host(), "w")
        launch = launches.begin(store, config.operational())
        assert Worker(store, EDT(config), timed, options(config, launch)).run() == "over"  # type: ignore[arg-type]
    tokens = config.inner_steps * config.batch_size * config.seq_length
    return [tokens / seconds for seconds in took[1:]]


def bare_rates(config: TrainConfig, rounds: int) -> list[float]:
    """As anybody would write it, on batches that are there already."""
    model = built(config.initial_population[0], 1024, 1)
    optimizers = bare_optimizers(model, config.inner_optimizer)

    def step(tokens: Tensor) -> None:
        model.zero_grad()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    return _rates(config, rounds, step)


def bare_optimizers(model: torch.nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """PyTorch's own."""
    within = [p for key, p in model.named_parameters() if name == "muon" and "layers" in key and p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not each for each in within)]
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return [adamw, *([torch.optim.Muon(within, lr=1e-3)] if within else [])]


def _rates(config: TrainConfig, rounds: int, step: Callable[[Tensor], None]) -> list[float]:
    shape, rates = (config.batch_size, config.seq_length + 1), []
    for _ in range(rounds):
        batches = [torch.randint(0, 1024, shape) for _ in range(config.inner_steps)]
        began = time.perf_counter()
        for tokens in batches:
            step(tokens)
        rates.append(config.inner_steps * config.batch_size * config.seq_length / (time.perf_counter() - began))
    return rates[1:]


def trainer_rate(config: TrainConfig) -> float:
    """transformers.Trainer on the same, for information."""
    from transformers import Trainer, TrainingArguments

    model = built(config.initial_population[0], 1024, 1)
    rows = torch.randint(0, 1024, (config.inner_steps * config.batch_size, config.seq_length))
    with tempfile.TemporaryDirectory() as place:
        settings = TrainingArguments(
            output_dir=place, per_device_train_batch_size=config.batch_size, max_steps=config.inner_steps,
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        began = time.perf_counter()
        trainer.train()
    return rows.numel() / (time.perf_counter() - began)


@app.default
def main(quick: bool = False) -> None:
    torch.set_num_threads(THREADS)
    names = (
        "model, batch, optimizer",
        "bare loop, tokens/s",
        "a worker's round",
        "ratio",
        "goal",
        "transformers.Trainer",
    )
    note = (
        f"{THREADS} threads; interleaved, medians and ranges. A worker's round is all of a recipe: parents\n"
        "read, trained, outer step, evaluated, published. The bare loop only trains."
    )
    shown = table("Tokens a second", *names, note=note)
    for (name, (model, batch, length, steps)), optimizer in product(SHAPES.items(), ("adamw", "muon")):
        config = config_of(model, batch, length, steps, 3 if quick else 5, optimizer)
        bare, ours = list[float](), list[float]()
        for _ in range(1 if quick else 3):
            bare += bare_rates(config, 3)
            ours += worker_rates(config)
        ratio = median(ours) / median(bare)
        cells = (spread(bare, 0), spread(ours, 0), f"{ratio:.3f}", goal(ratio >= 0.97, "at least 0.97"))
        trainer = f"{trainer_rate(config):.0f}" if optimizer == "adamw" else NONE
        shown.add_row(f"{name}, {optimizer}", *cells, trainer)
    Console(width=150).print(shown)


if __name__ == "__main__":
    app()

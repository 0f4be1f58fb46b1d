"""The speed of a worker's round beside that of a bare PyTorch loop with the same model, optimizer and threads.

python -m benchmarks.train_loop [--quick] [--only "256, adamw"]
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from cyclopts import App
from rich.console import Console
from torch.nn.functional import normalize
from torch.optim import _muon

from benchmarks.figures import NONE, goal, spread, table
from fleet import launches
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.work import Work
from fleet.worker import Worker
from train.kernels import in_fixed_order
from train.learner import Learner
from train.model import built
from train.training_config import TrainConfig

THREADS = 2
SHAPES = {"tiny, 8 x 64": ("tiny", 8, 64, 100), "14m, 8 x 256": ("14m", 8, 256, 40)}
_zeropower = _muon._zeropower_via_newtonschulz
app = App(name="python -m benchmarks.train_loop", help=__doc__, version_flags=[])


def config_of(model: str, batch: int, length: int, steps: int, rounds: int, optimizer: str) -> TrainConfig:
    return TrainConfig(
        algorithm="edt", project_name="run", initial_population=(model,), batch_size=batch, seq_length=length,
        inner_steps=steps, max_generations=rounds, first_inner_steps=steps, population_size=1, threads=THREADS,
        datasets=("fake",), eval_sequences=8, test_sequences=8, eval_batch_size=8, vocab_size=1024, average_every=1000,
        inner_optimizer=optimizer,
    )  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and of all processors."""

    clock: float = 0.0
    processors: float = 0.0

    @classmethod
    def of(cls, call: Callable[[], object]) -> "Cost":
        clock, processors = time.perf_counter(), time.process_time()
        call()
        return cls(time.perf_counter() - clock, time.process_time() - processors)

    def __add__(self, more: "Cost") -> "Cost":
        return Cost(self.clock + more.clock, self.processors + more.processors)

    def __sub__(self, less: "Cost") -> "Cost":
        return Cost(self.clock - less.clock, self.processors - less.processors)


@dataclass(frozen=True)
class Beside:
    """A worker's round, and as many steps of the bare loop, one after each of the worker's: whatever else the machine
    does, it does to both."""

    ours: Cost
    bare: Sequence[Cost]

    @property
    def of_bare(self) -> Cost:
        return sum(self.bare, Cost())

    def ratio(self, kind: str) -> float:
        """How fast ours is, of the bare loop."""
        ratio: float = getattr(self.of_bare, kind) / getattr(self.ours, kind)
        return ratio

    @property
    def noise(self) -> float:
        """How much every other step of the bare loop differs from those between."""
        odd, even = (sum(each.clock for each in self.bare[n::2]) for n in (0, 1))
        return odd / even


def rounds_beside(config: TrainConfig) -> list[Beside]:
    """Of each round but the first: all that the maker does, evaluation and files included."""
    from edt import EDT
    from train.member.pretraining_tasks import maker

    make, bare, found = maker(config), bare_steps(config), list[Beside]()

    def timed(work: Work) -> object:
        if work.recipe.task != "child":
            return make(work)
        made, others = list[object](), list[Cost]()
        with _between_steps(lambda: others.append(Cost.of(lambda: next(bare)))):
            whole = Cost.of(lambda: made.append(make(work)))
        found.append(Beside(whole - sum(others, Cost()), others))
        return made[0]

    with tempfile.TemporaryDirectory() as place:
        create_run(Path(place), "run", config.bound(), Host())
        store, _ = open_run(Path(place) / "run", Host(), "w")
        launch = launches.begin(store, config.operational())
        assert Worker(store, EDT(config), timed, options(config, launch)).run() == "over"
    return found[1:]


@contextmanager
def _between_steps(call: Callable[[], object]) -> Iterator[None]:
    step = Learner.step

    def and_then(learner: Learner, *given: Any) -> None:
        step(learner, *given)
        call()

    with patch.object(Learner, "step", and_then):
        yield


def bare_steps(config: TrainConfig) -> Iterator[None]:
    """As anybody would write them, on batches that are there already."""
    model = built(config.initial_population[0], 1024, 1)
    optimizers = bare_optimizers(model, config.inner_optimizer)
    shape = (config.batch_size, config.seq_length + 1)
    for tokens in cycle([torch.randint(0, 1024, shape) for _ in range(config.inner_steps)]):
        torch.use_deterministic_algorithms(False)  # which is the worker's
        model.zero_grad()
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        in_fixed_order(config.threads)
        yield


def bare_optimizers(model: torch.nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """PyTorch's own."""
    within = [p for key, p in model.named_parameters() if name.startswith("muon") and "layers" in key and p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not each for each in within)]
    adamw = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    muon = {"muon": torch.optim.Muon, "muon+": Levelled}.get(name)
    return [adamw, *([muon(within, lr=1e-3)] if muon else [])]


class Levelled(torch.optim.Muon):
    """Rows of one length before its polynomial, and after."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        with patch.object(_muon, "_zeropower_via_newtonschulz", self._levelled):
            super().step()

    @staticmethod
    def _levelled(matrix: torch.Tensor, *how: Any) -> torch.Tensor:
        return normalize(_zeropower(normalize(matrix, dim=-1), *how), dim=-1)


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
def main(quick: bool = False, only: str = "") -> None:
    """All rows, or those in whose name this is."""
    torch.set_num_threads(THREADS)
    names = (
        "model, batch, optimizer",
        "bare loop, tokens/s",
        "ratio",
        "in processors' time",
        "bare loops' own",
        "goal",
    )
    note = (
        f"{THREADS} threads; medians and ranges of rounds, each step beside one of the bare loop. A round of a worker\n"
        "is all of a recipe: parents read, trained, outer step, evaluated, published. The bare loop only trains."
    )
    shown = table("A worker's round beside a bare loop", *names, "transformers.Trainer, tokens/s", note=note)
    for (name, (model, batch, length, steps)), optimizer in product(SHAPES.items(), ("adamw", "muon", "muon+")):
        if only not in f"{name}, {optimizer}":
            continue
        config = config_of(model, batch, length, steps, 3 if quick else 9, optimizer)
        found = rounds_beside(config)
        tokens = config.inner_steps * config.batch_size * config.seq_length
        rates = [tokens / pair.of_bare.clock for pair in found]
        clock, processors = ([pair.ratio(kind) for pair in found] for kind in ("clock", "processors"))
        others = (spread(each, 3) for each in (processors, [pair.noise for pair in found]))
        cells = [spread(rates, 0), spread(clock, 3), *others]
        trainer = f"{trainer_rate(config):.0f}" if optimizer == "adamw" else NONE
        print(f"{name}, {optimizer}: {', '.join(cells)}", flush=True)  # minutes before the table
        shown.add_row(f"{name}, {optimizer}", *cells, goal(median(clock) >= 0.97, "at least 0.97"), trainer)
    Console(width=170).print(shown)


if __name__ == "__main__":
    app()

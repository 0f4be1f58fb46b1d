"""What a step of each optimizer costs beside the gradient that it needs, for the presets' tokens a step.

    python -m benchmarks.optimizer_step [--presets tiny 14m 60m 150m] [--threads 2]

The gradient's time is measured on a few sequences and counted for as many as a step has: it grows with them, the
optimizer's does not.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from cyclopts import App
from rich.console import Console

from benchmarks.figures import goal, table
from train.learner import Learner
from train.model import built
from train.optimizers import OPTIMIZERS, AdamW, orthogonal
from train.training_config import TrainConfig

TOKENS = {"tiny": 16_384, "14m": 16_384, "60m": 65_536, "150m": 98_304}  # of a step
MEASURED = {"tiny": (8, 256), "14m": (4, 256), "60m": (2, 512), "150m": (1, 512)}  # sequences, and their length
WORDS = {"tiny": 1024, "14m": 8192, "60m": 32_000, "150m": 32_000}
NAMES, TIMES = ("adamw", "muon", "muon+"), 3
app = App(name="python -m benchmarks.optimizer_step", help=__doc__, version_flags=[])


def learner(preset: str, optimizer: str) -> tuple[Learner, AdamW]:
    config = TrainConfig(
        algorithm="edt", project_name="run", inner_optimizer=optimizer, warmup_steps=0, lr_schedule="constant"
    )
    made = Learner(built(preset, WORDS[preset], 1), config, torch.device("cpu"))
    kind = OPTIMIZERS[optimizer]
    return made, kind(made.vector, made.gradient, made.layout, config, lambda each, _: orthogonal(each))


def seconds(work: Callable[[], object]) -> float:
    work()
    took = list[float]()
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return median(took)


def gradient(made: Learner, preset: str) -> Callable[[], object]:
    sequences, length = MEASURED[preset]
    windows = torch.randint(0, WORDS[preset], (sequences, length + 1))
    return lambda: made.loss(windows).backward()


@app.default
def main(presets: tuple[str, ...] = tuple(TOKENS), threads: int = 2) -> None:
    torch.set_num_threads(threads)
    note = f"{threads} threads, fp32; medians of {TIMES}."
    beside = [f"{name} / adamw" for name in NAMES[1:]]
    columns = ("preset, tokens a step", "gradient, s", *(f"{name}'s step, s" for name in NAMES), *beside)
    shown = table("A step, and what of it is the optimizer's", *columns, note=note)
    for preset in presets:
        steps = list[float]()
        for name in NAMES:
            made, optimizer = learner(preset, name)
            made.begin()
            sequences, length = MEASURED[preset]
            whole = seconds(gradient(made, preset)) * TOKENS[preset] / (sequences * length)
            steps.append(seconds(optimizer.step))
            del made, optimizer
        ratios = [(whole + each) / (whole + steps[0]) for each in steps[1:]]
        cells = (f"{whole:.2f}", *(f"{each:.4f}" for each in steps), *(goal(r <= 1.05, f"{r:.3f}") for r in ratios))
        shown.add_row(f"{preset}, {TOKENS[preset]:,}", *cells)
    Console(width=120).print(shown)


if __name__ == "__main__":
    app()

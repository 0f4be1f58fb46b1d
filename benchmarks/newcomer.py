"""A newcomer's first run beside thirty lines of plain PyTorch: own text, the defaults, four workers of this machine.

    python -m benchmarks.newcomer [--text FILE] [--rounds 120] [--algorithm edt]

Ours is the command that README names, with nothing in its configuration but the text, the number of workers and of
rounds. Plain PyTorch trains the same model (its shape, its tokenizer, new weights) with AdamW in one process that has
all cores: for as long as our command took from its start to its end, and for as many tokens. Its rate and batch are
the best of nine that had a fifth of that time. What is compared was kept from both: every twentieth document.
"""

import ast
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cyclopts import App
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.figures import goal, table

ROOT = Path(__file__).parent.parent
LENGTH = 64  # tokens of a sequence: SEQ_LENGTH's default
TRIED = tuple(itertools.product((2e-3, 4e-3, 8e-3), (4, 8, 16)))  # rate and batch of the plain process
_TELLS = (ast.Module, ast.ClassDef, ast.FunctionDef)
app = App(name="python -m benchmarks.newcomer", help=__doc__, version_flags=[])


def documentation() -> Iterator[str]:
    """English prose that is here already: what Python and PyTorch say about themselves."""
    files = [*Path(sysconfig.get_path("stdlib")).glob("*.py"), *Path(torch.__file__).parent.glob("*/*.py")]
    for file in sorted(files):
        tree = ast.parse(file.read_bytes())
        parts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, _TELLS))
        if said := "\n\n".join(part for part in parts if part):
            yield said
    from pydoc_data.topics import topics

    yield from topics.values()


def split(documents: list[str], folder: Path) -> tuple[Path, list[str]]:
    """A file of all but every twentieth, and those."""
    file = folder / "my-text.jsonl"
    kept = [text for n, text in enumerate(documents) if n % 20]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in kept))
    return file, documents[::20]


def ours(algorithm: str, text: Path, rounds: int) -> tuple[float, float, Path]:
    """How long the command took, how long processors worked for it, and the folder of the model that it ends with."""
    keys = {"BASE_DIR": str(text.parent), "PROJECT_NAME": "mine", "DATASETS": [str(text)], "NUM_MACHINES": 4}
    file = text.with_name("mine.json")
    file.write_text(json.dumps({**keys, "MAX_GENERATIONS": rounds, "MAX_EPOCHS": 1000}))
    began, worked = time.monotonic(), _worked()
    subprocess.run([sys.executable, ROOT / f"{algorithm}_sim.py", "--config", file], check=True, cwd=text.parent)
    return time.monotonic() - began, _worked() - worked, text.parent / "mine" / "export"


def _worked() -> float:
    """Seconds of processors, of all processes that this one has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def trained_tokens(run: Path) -> int:
    from train.pretraining_export import Exporter

    return Exporter(run).config.sequences * LENGTH


# -- the thirty lines --------------------------------------------------------------------------------------------------


def plain(
    export: Path, tokens: Tensor, lr: float, batch: int, goes_on: Callable[[int], float]
) -> tuple[torch.nn.Module, int]:
    """Until `goes_on`, which tells the share of the whole that so many steps are, reaches one."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(export))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    for step in itertools.count():
        if (share := goes_on(step)) >= 1:
            return model, step
        factor = min(1.0, share / 0.05) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        starts = torch.randint(len(tokens) - LENGTH - 1, (batch,)).tolist()
        rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts])
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError


# -- both --------------------------------------------------------------------------------------------------------------


def seconds_of(limit: float) -> Callable[[int], float]:
    began = time.monotonic()
    return lambda step: (time.monotonic() - began) / limit


def encoded(tokenizer: Any, documents: list[str]) -> Tensor:
    return torch.tensor(
        [token for text in documents for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    )


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, tokenizer: Any, documents: list[str]) -> float:
    """Each stretch of LENGTH tokens by itself, its first one given."""
    bits = size = 0.0
    for text in documents:
        for row in encoded(tokenizer, [text]).split(LENGTH + 1):
            if len(row) > 1:
                logits = model(input_ids=row[None, :-1], use_cache=False).logits[0]
                bits += float(cross_entropy(logits, row[1:], reduction="sum")) / math.log(2)
                size += len(tokenizer.decode(row[1:], skip_special_tokens=True).encode())
    return bits / size


@app.default
def main(text: Path | None = None, rounds: int = 120, algorithm: str = "edt") -> None:
    """
    Parameters
    ----------
    text
        A .jsonl file with documents; without one, the docstrings of Python and PyTorch.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    documents = [json.loads(line)["text"] for line in text.open()] if text else [*documentation()]
    with tempfile.TemporaryDirectory() as folder:
        file, held_out = split(documents, Path(folder))
        seconds, worked, export = ours(algorithm, file, rounds)
        tokenizer, count = AutoTokenizer.from_pretrained(export), trained_tokens(export.parent)
        tokens = encoded(tokenizer, [json.loads(line)["text"] for line in file.open()])

        def score(model: torch.nn.Module) -> float:
            return bits_per_byte(model.eval(), tokenizer, held_out)

        def tried(lr: float, batch: int) -> float:
            return score(plain(export, tokens, lr, batch, seconds_of(seconds / 5))[0])

        lr, batch = min(TRIED, key=lambda each: tried(*each))
        cpu = time.process_time()
        timed, steps = plain(export, tokens, lr, batch, seconds_of(seconds))
        began, cpu_then = time.monotonic(), time.process_time()
        equal, _ = plain(export, tokens, lr, batch, lambda step: step * batch * LENGTH / count)
        took, cpu_took = time.monotonic() - began, time.process_time() - cpu_then
        mine = score(AutoModelForCausalLM.from_pretrained(export))
        note = f"Plain: rate {lr:g}, batches of {batch}, the best of {len(TRIED)}."
        shown = table("A newcomer's first run", "", "seconds", "of processors", "tokens", "bits a byte", note=note)
        against = score(timed)
        row = (f"{algorithm}, defaults, 4 workers", f"{seconds:.0f}", f"{worked:.0f}", f"{count:,}")
        shown.add_row(*row, goal(mine <= against, f"{mine:.3f}"))
        as_long = (f"{seconds:.0f}", f"{cpu_then - cpu:.0f}", f"{steps * batch * LENGTH:,}", f"{against:.3f}")
        as_many = (f"{took:.0f}", f"{cpu_took:.0f}", f"{count:,}", f"{score(equal):.3f}")
        shown.add_row("plain AdamW, as long", *as_long)
        shown.add_row("plain AdamW, as many tokens", *as_many)
        Console(width=120).print(shown)


if __name__ == "__main__":
    app()

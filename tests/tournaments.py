"""Small models for tournaments, whole tournaments, and the command that runs them: made on the spot."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from evomerge import cli as command_line
from evomerge import tournament_running
from evomerge.config import (
    Configuration,
    ModelReference,
)
from evomerge.tournament_method import METHOD
from fleet import launches
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.worker import Worker
from tests import merging

ROOT = Path(__file__).parent.parent
CLI = [sys.executable, str(ROOT / "evomerge" / "cli.py")]
WORDS = "the cat sat on a mat and the dog ran to it again while nobody looked"


def models(folder: Path, count: int = 3, **shape) -> list[ModelReference]:
    made = []
    for n in range(count):
        place = merging.llama(folder / f"model{n}", n + 1, vocab_size=300, **shape)
        merging.tokenizer(place, WORDS, size=290)
        made.append(ModelReference(f"model{n}", place))
    return made


def text(file: Path, documents: int = 24, seed: int = 5) -> Path:
    rng, words = random.Random(seed), WORDS.split()
    rows = (" ".join(rng.choice(words) for _ in range(30)) for _ in range(documents))
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return file


def config(folder: Path, **evolution) -> Configuration:
    made = Configuration(models=models(folder), out=str(folder / "run"))
    made.evaluation_settings.text = str(text(folder / "text.jsonl"))
    made.evaluation_settings.passages = 8
    for key, value in {"num_generations": 3, **evolution}.items():
        setattr(made.evolution_settings, key, value)
    return made


def worker(c: Configuration, name: str = "w") -> Worker:
    """One more worker of the tournament, in this process."""
    chosen = tournament_running.prepared(c)
    folder = Path(chosen.base_dir)
    create_run(folder, chosen.project_name, chosen.bound(), Host())
    store, _ = open_run(folder / chosen.project_name, Host(), name)
    launch = launches.latest(store) or launches.begin(store, chosen.operational())
    return Worker(store, METHOD.strategy(chosen), METHOD.maker(chosen), options(chosen, launch), METHOD.report)


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *map(str, words)], capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Said:
    returncode: int
    stdout: str
    stderr: str


def encoder(folder: Path, shape, kind, seed: int) -> ModelReference:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(seed)
    kind(shape(vocab_size=300, max_position_embeddings=64, **small)).save_pretrained(folder)
    merging.tokenizer(folder, "the cat sat", size=290)
    return ModelReference(f"{kind.__name__}-{seed}", folder)


def here_by(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Said]:
    """The command line in this process, where torch is loaded already."""
    monkeypatch.setattr(os, "umask", lambda mask: mask)

    def run(*words: object) -> Said:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            command_line.run([str(word) for word in words])
        return Said(int(end.value.code or 0), *capfd.readouterr())

    return run


def whole_tournament(folder: Path) -> tuple[Path, Configuration, str]:
    """Of tiny models, from the command line."""
    c = config(folder)
    c.save(folder / "mine.json")
    more = ("--metrics", "tensorboard") if importlib.util.find_spec("tensorboard") else ()
    command = ("--config", folder / "mine.json", "--run", "--workers", 2, *more)
    done = again = cli(*command)
    while "has not taken everything" in again.stdout + again.stderr:  # on a busy machine
        again = cli(*command)
    assert done.returncode == again.returncode == 0, done.stderr + again.stderr
    return folder, c, done.stdout

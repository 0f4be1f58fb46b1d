"""Tiny chat models, data and runs of EDT-EvoMerge: made on the spot."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from fleet import launches
from fleet.history import History, opened
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.worker import Worker
from tests import merging
from tests.helpers import LONG, ROOT, pids, until
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_commands import prepare_breeding as prepare

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = "the cat sat on a mat and the dog ran"
KEYS = {
    "project_name": "run", "population_size": 4, "max_generations": 3, "sft_examples": 16, "seq_length": 48,
    "batch_size": 2, "lr": 1e-3, "questions": 4,
}  # fmt: skip


def model(folder: Path, seed: int, template: str = TEMPLATE, **shape: Any) -> Path:
    usual = {"vocab_size": 300, "max_position_embeddings": 128, "num_hidden_layers": 2}
    place = merging.llama(folder, seed, **{**usual, **shape})
    merging.tokenizer(place, WORDS, size=290)
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return place


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def chats(file: Path, answer: str, count: int = 60) -> Path:
    rng = random.Random(answer)
    rows = [
        {"messages": [{"role": "user", "content": f"{rng.choice(WORDS.split())} {n}"},
                      {"role": "assistant", "content": answer}]}
        for n in range(count)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def preferences(file: Path, count: int = 60) -> Path:
    rows = [{"prompt": f"the {n}", "chosen": "cat", "rejected": "dog dog"} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config(folder: Path, models: int = 3, **keys: Any) -> PosttrainConfig:
    folder.mkdir(exist_ok=True, parents=True)
    there = tuple(str(model(folder / f"model{n}", n + 1)) for n in range(models))
    data = tuple({"source": str(chats(folder / f"{name}.jsonl", name))} for name in ("cat", "dog ran"))
    given = {"initial_population": there, "mutation_datasets": data, **KEYS, **keys}
    return PosttrainConfig(**{"algorithm": "edt-evomerge", "base_dir": str(folder), **given})


def worker(c: PosttrainConfig, name: str = "w", make: Any = None) -> Worker:
    """One more worker of the run, in this process."""
    from edt_es import EvolutionStrategies
    from edt_evomerge import EvoMerge
    from train.member import es_tasks, posttraining_tasks

    chosen = prepare(c, Path(c.base_dir))
    create_run(Path(c.base_dir), c.project_name, chosen.bound(), Host())
    store, _ = open_run(Path(c.base_dir) / c.project_name, Host(), name)
    launch = launches.latest(store) or launches.begin(store, chosen.operational())
    is_es = c.algorithm == "es"
    strategy, maker = (EvolutionStrategies, es_tasks.maker) if is_es else (EvoMerge, posttraining_tasks.maker)
    return Worker(store, strategy(chosen), make or maker(chosen), options(chosen, launch))


def finished(c: PosttrainConfig) -> History:
    one = worker(c)
    assert one.run() == "over"
    return one.history


# -- learning from rewards ---------------------------------------------------------------------------------------------


def questions(file: Path, answer: str, count: int = 60) -> Path:
    rows = [{"prompt": f"{WORDS.split()[n % 9]} {n}", "answer": answer, "checker": "regex"} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def rl_config(folder: Path, models: int = 2, **keys: Any) -> PosttrainConfig:
    """Whether there is an "a" or an "o" in what it says: an untrained model's answers differ in that."""
    folder.mkdir(exist_ok=True, parents=True)
    data = tuple({"source": str(questions(folder / f"{letter}.jsonl", letter))} for letter in ("a", "o"))
    asked = keys.pop("grpo", {})
    grpo = None if asked is None else {"answers": 4, "max_tokens": 6, "share": 1.0, **asked}
    given = {"mutation": "grpo", "mutation_datasets": data, "fitness": ("reward",), "sft_examples": 6, "grpo": grpo}
    return config(folder, models, **{**given, **keys})


def es_config(folder: Path, **keys: Any) -> PosttrainConfig:
    """The same questions, of one model and its neighbours."""
    es = {"max_tokens": 6, "sigma": 0.05, "publish_every": 2, **keys.pop("es", {})}
    folder.mkdir(exist_ok=True, parents=True)
    data = tuple({"source": str(questions(folder / f"{letter}.jsonl", letter))} for letter in ("a", "o"))
    given = {"algorithm": "es", "mutation_datasets": data, "sft_examples": 6, "max_generations": 5, "lr": 0.02}
    return config(folder, 1, **{**given, "es": es, **keys})


def killed_and_gone_on(file: Path, place: Path, generation: int, rounds: int) -> str:
    """What the same command says after its starter and all of its workers were killed, that generation being over."""
    command = [sys.executable, str(ROOT / "edt_sim.py"), "--config", str(file)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    until((place / "run.json").exists, "the run is begun", LONG)
    until(lambda: opened(place).first_open > generation, f"generation {generation} is over", LONG)
    first.send_signal(signal.SIGSTOP)
    for pid in pids("--worker", str(place)):
        os.kill(pid, signal.SIGKILL)
    first.kill()
    first.wait()
    assert opened(place).first_open < rounds
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout

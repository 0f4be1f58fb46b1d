"""Donors that each know another part of some facts, and a task that asks for all of them: made on the spot."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fleet.places import address
from merge.evolve import search_config as configs
from merge.evolve.search_config import MergeGenome, SearchConfig
from merge.evolve.search_space import Space

SUBJECTS, PARTS, ANSWERS = 24, 3, 24
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


def words() -> list[str]:
    parts = [f"p{n}" for n in range(PARTS)]
    return ["<pad>", *parts, *(f"s{n}" for n in range(SUBJECTS)), *(f"a{n}" for n in range(ANSWERS)), "of", "is"]


def known_facts(seed: int = 0) -> list[tuple[int, str, str, str]]:
    """Part, subject, and the answer in two words."""
    rng = random.Random(seed)
    return [
        (part, f"s{subject}", f"a{rng.randrange(ANSWERS)}", f"a{rng.randrange(ANSWERS)}")
        for part in range(PARTS)
        for subject in range(SUBJECTS)
    ]


def donors(folder: Path, layers: int = 2, steps: int = 30, first: int = 3) -> list[Path]:
    """A base that knows a little of everything; and for each part of the facts a model that went on to learn it."""
    number = {word: n for n, word in enumerate(words())}
    rows = torch.tensor([[number[w] for w in (f"p{part}", "of", s, "is", a, b)] for part, s, a, b in known_facts()])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(number), hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
        )  # fmt: skip
        base = LlamaForCausalLM(config)
        _learn(base, rows, first, 3e-3)
        made = [_saved(base, folder / "base")]
        for part in range(PARTS):
            model = LlamaForCausalLM(config)
            model.load_state_dict(base.state_dict())
            _learn(model, rows[part * SUBJECTS : (part + 1) * SUBJECTS], steps, 2e-3)
            made.append(_saved(model, folder / f"part{part}"))
    return made


def _learn(model: LlamaForCausalLM, rows: torch.Tensor, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        logits = model(rows[:, :-1]).logits[:, 3:]
        F.cross_entropy(logits.flatten(0, 1), rows[:, 4:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def _saved(model: LlamaForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words())}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<pad>", pad_token="<pad>").save_pretrained(folder)
    return folder


def task(folder: Path, name: str = "facts", seed: int = 1) -> Path:
    """All facts as questions of four choices; the folder to look for tasks in."""
    folder.mkdir(exist_ok=True)
    rng, known, lines = random.Random(seed), known_facts(), []
    for part, subject, *answer in known:
        choices = [" ".join(answer)]
        while len(choices) < 4:
            other = " ".join(rng.choice(known)[2:])
            choices += [other] if other not in choices else []
        rng.shuffle(choices)
        question = {
            "question": f"p{part} of {subject} is",
            "choices": choices,
            "answer": choices.index(" ".join(answer)),
        }
        lines.append(question)
    rng.shuffle(lines)
    (folder / f"{name}.json").write_text("\n".join(map(json.dumps, lines)))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=folder / f"{name}.json"))
    return folder


ROOT = Path(__file__).parent.parent


def genome_file(folder: Path, facts: Path, method: str = "linear", base: bool = False, **more) -> Path:
    genome = {"models": [str(facts / f"part{n}") for n in range(3)], "merge_method": method, **more.pop("genome", {})}
    genome |= {"base_model": str(facts / "base")} if base else {}
    file = folder / "genome.yml"
    file.write_text(yaml.safe_dump({"genome": genome, "tasks": ["facts"], **more}))
    return file


def command(file: Path, out: Path, facts: Path, *more: str) -> list[str]:
    strategy = () if "--strategy" in more else ("--strategy", "fleet")
    words = ["--storage-path", address(out), "--task-search-path", str(facts / "tasks"), *strategy, *more]
    return [sys.executable, "-m", "merge.evolve", str(file), *words]


def search(file: Path, out: Path, facts: Path, *more: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command(file, out, facts, *more), capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def genotypes(out: Path) -> list[list[float]]:
    return [row["genotype"] for row in rows(out)]


def space(method: str = "ties", layers: int = 4, **more) -> Space:
    base = {} if method in ("linear", "slerp", "karcher", "nuslerp", "multislerp") else {"base_model": "base"}
    models = ("a", "b") if method == "nuslerp" else ("a", "b", "c")
    return Space(MergeGenome(models=models, merge_method=method, **base, **more), layers)


def completed(file: Path, facts: Path, **options) -> SearchConfig:
    more = {"task_path": (str(facts / "tasks"),), "project_name": "x", "threads": 1, **options}
    return configs.read(file, {"algorithm": "merge-search", **more})


def wait_for(there, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def donors_and_tasks(folder: Path) -> Path:
    """base, part0, part1, part2, and a folder of tasks."""
    donors(folder)
    task(folder / "tasks")
    return folder

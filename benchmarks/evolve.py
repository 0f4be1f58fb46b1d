"""The merge search: candidates a minute, beside merging to disk, loading and lm-eval's simple_evaluate for each.

    python -m benchmarks.evolve
    python -m benchmarks.evolve --evals 84 --words 20

Three models of 34 million parameters in bfloat16, made on the spot; 64 questions of four choices.
"""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import yaml
from cyclopts import App, Parameter
from rich.console import Console

from benchmarks.figures import goal, table
from benchmarks.models import MODELS, llamas
from tests.searching import TASK

WORDS, QUESTIONS = 16384, 64
app = App(help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def main(
    *,
    evals: Annotated[int, Parameter(help="Candidates of each search.")] = 42,
    words: Annotated[int, Parameter(help="Of a question.")] = 6,
    folder: Annotated[Path | None, Parameter(help="Where models and searches are.")] = None,
) -> None:
    console = Console(width=140)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        prepared(place, words)
        merging, loading, asking = plain(place)
        sequence = merging + loading + asking
        console.print(
            f"One after the other, two threads: merge to disk {merging:.2f} s, load {loading:.2f} s, simple_evaluate "
            f"{asking:.2f} s: {60 / sequence:.0f} candidates a minute."
        )
        shown = table("Merge search", "strategy", "candidates a minute", "beside the plain sequence", "first score")
        for name, more in (("fleet, in memory", []), ("fleet, on disk", ["--no-in-memory"]), ("pool", POOL)):
            rate, first = search(place, evals, more)
            times, quick = rate * sequence / 60, f"{first:.1f} s (goal 10)"
            wanted = goal(times >= 5, f"{times:.1f} (goal 5)") if "disk" not in name else f"{times:.1f}"
            shown.add_row(name, f"{rate:.0f}", wanted, goal(first <= 10, quick))
        console.print(shown)
        for method in ("linear", "ties"):
            outside, seconds = outside_the_model(place, method)
            share = goal(outside < 0.15, f"{outside:.0%} (goal 15%)")
            console.print(
                f"{method}, one worker with one thread: {seconds:.2f} s a candidate, outside the model {share}"
            )


POOL = ["--strategy", "pool"]


def prepared(place: Path, words: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    llamas(place, "bfloat16", 512, 6, WORDS)
    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for name in MODELS:
        PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w0", pad_token="w0").save_pretrained(place / name)
    rng, tasks = random.Random(0), place / "tasks"
    tasks.mkdir()

    def some(count: int) -> str:
        return " ".join(f"w{rng.randrange(WORDS)}" for _ in range(count))

    lines = [
        {"question": some(words), "choices": [some(3) for _ in range(4)], "answer": rng.randrange(4)}
        for _ in range(QUESTIONS)
    ]
    (tasks / "quiz.json").write_text("\n".join(map(json.dumps, lines)))
    (tasks / "quiz.yaml").write_text(TASK.format(name="quiz", file=tasks / "quiz.json"))
    genome(place, "linear")


def genome(place: Path, method: str) -> Path:
    names = [str(place / name) for name in MODELS]
    said: dict[str, Any] = {"models": names, "merge_method": method}
    if method == "ties":
        said |= {"models": names[1:], "base_model": names[0]}
    file = place / f"{method}.yml"
    file.write_text(yaml.safe_dump({"genome": said, "tasks": ["quiz"]}))
    return file


# -- the plain sequence ------------------------------------------------------------------------------------------------


def plain(place: Path, rounds: int = 5) -> tuple[float, float, float]:
    """Seconds of each step; in the same process, with the tasks looked through once, and the quickest batch size."""
    import lm_eval
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from merge.merge_recipe import merge_of
    from merge.merging import merge

    quiet()
    torch.set_num_threads(2)
    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    weights = [{"model": str(place / name), "parameters": {"weight": 1 / 3}} for name in MODELS]
    recipe = merge_of({"merge_method": "linear", "models": weights}, "")
    took: dict[int, list[tuple[float, float, float]]] = {8: [], 64: []}
    for size in [8, 64] * rounds:
        begin = time.monotonic()
        merge(recipe, place / "plain", overwrite=True)
        merged = time.monotonic()
        model = AutoModelForCausalLM.from_pretrained(place / "plain", dtype="auto")
        asked = HFLM(model, tokenizer=AutoTokenizer.from_pretrained(place / "plain"), batch_size=size)
        loaded = time.monotonic()
        lm_eval.simple_evaluate(asked, tasks=["quiz"], task_manager=manager, bootstrap_iters=0)
        took[size].append((merged - begin, loaded - merged, time.monotonic() - loaded))
    best = min(took.values(), key=lambda times: median(map(sum, times)))
    merging, loading, asking = (median(step) for step in zip(*best, strict=True))
    return merging, loading, asking


# -- searches ----------------------------------------------------------------------------------------------------------


def search(place: Path, evals: int, more: list[str]) -> tuple[float, float]:
    """Candidates a minute once the first one is there, and when that is."""
    out = place / "search"
    command = [sys.executable, "-m", "merge.evolve", str(place / "linear.yml"), "--storage-path", str(out)]
    strategy = [] if "--strategy" in more else ["--strategy", "fleet"]
    command += ["--task-search-path", str(place / "tasks"), "--max-fevals", str(evals), *strategy, *more]
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    ends = sorted(file.stat().st_mtime for file in (out / "rounds").glob("*/c*.done"))
    looks = len(list((out / "rounds").glob("*/donor-*.done")))
    shutil.rmtree(out)
    return 60 * (len(ends) + looks - 1) / (ends[-1] - ends[0]), ends[0] - begin


def outside_the_model(place: Path, method: str, count: int = 10) -> tuple[float, float]:
    """The share of a candidate's time that is not the model's own work, and the whole."""
    import numpy as np

    from merge.evolve import search_config as configs
    from merge.evolve.recipe_evaluator import RecipeEvaluator
    from merge.evolve.search_space import Space

    quiet()
    options = {"task_path": (str(place / "tasks"),), "algorithm": "x", "project_name": "x"}
    evaluator = RecipeEvaluator(configs.read(genome(place, method), options))
    space = Space(evaluator.config.genome, 6)
    evaluator.scored(space.recipe(space.start()))
    spent: list[float] = []
    assert evaluator.live.now
    model = evaluator.live.now.model
    model.register_forward_pre_hook(lambda *_: spent.append(-time.perf_counter()))
    model.register_forward_hook(lambda *_: spent.append(time.perf_counter()))
    begin = time.perf_counter()
    for n in range(count):
        evaluator.scored(space.recipe(np.random.default_rng(n).random(space.size)))
    whole = time.perf_counter() - begin
    return 1 - sum(spent) / whole, whole / count


def quiet() -> None:
    os.environ["TQDM_DISABLE"] = "1"
    for name in ("lm_eval", "datasets", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    app()

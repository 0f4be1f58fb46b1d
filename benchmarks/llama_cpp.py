"""Exported models in llama.cpp and in transformers: do both say the same?

    python -m venv elsewhere && elsewhere/bin/pip install llama-cpp-python
    python -m benchmarks.llama_cpp --python elsewhere/bin/python --model path/to/model.gguf

Little models of several kinds are trained on the spot; a published GGUF file may stand beside them, and is turned into
a Hugging Face folder first. Of every model, files of all types are written. Shown is the share of positions, in text
that no model here was trained on, at which both find the same token the most likely next one: for the quantized types,
beside the model as it was, so that it shows what quantizing costs. llama.cpp computes with its own rounding.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Parameter
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.figures import goal, table
from merge.gguf.writing import export_gguf, gguf_to_hf
from tests.toy import little_models
from tests.toy.little_models import ROPES

app = App(name="python -m benchmarks.llama_cpp", help=__doc__, version_flags=[])
PEER = Path(__file__).with_name("llama_cpp_peer.py")
READ, HELD_OUT = ("argparse", "typing", "inspect", "tarfile"), ("textwrap", "shutil")
STRANGE = "Ünïcödé 漢字 🙂\t42 1999\n\n  don't  </s>I'll <tool>x"


def little(folder: Path, steps: int) -> Iterator[tuple[str, Path]]:
    """Of each kind a model, of each tokenizer one, of each way to scale positions one."""
    text = little_models.library(*READ)
    for name, kind, way, shape in (
        ("llama, pieces, Llama 3's rope", "llama", "pieces", {"rope_parameters": ROPES["llama3"]}),
        ("llama, llama-bpe, biases", "llama", "llama-bpe", {"attention_bias": True, "mlp_bias": True}),
        ("mistral, gpt-2, linear rope", "mistral", "gpt-2", {"rope_parameters": ROPES["linear"]}),
        ("qwen2, tied, yarn", "qwen2", "qwen2", {"tie_word_embeddings": True, "rope_parameters": ROPES["yarn"]}),
        ("qwen3, smollm", "qwen3", "smollm", {"head_dim": 64}),
    ):
        where = folder / name
        if way == "pieces":
            count = little_models.by_pieces(where, text)
        else:
            count = little_models.by_bytes(where, text, way, bos=way == "llama-bpe")
        little_models.model(where, kind, count + 4, **shape)
        ids = AutoTokenizer.from_pretrained(where)(text)["input_ids"]
        little_models.train(where, torch.tensor(ids), steps)
        yield name, where


def windows(folder: Path, count: int, length: int = 512) -> list[list[int]]:
    ids = AutoTokenizer.from_pretrained(folder)(little_models.library(*HELD_OUT))["input_ids"]
    return [ids[begin : begin + length] for begin in range(0, len(ids) - length, length)][:count]


def next_tokens(folder: Path, asked: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0].argmax(-1).tolist() for ids in asked]


@app.default
def main(
    *,
    python: Annotated[Path, Parameter(help="Of an environment that has llama-cpp-python.")],
    model: Annotated[Path | None, Parameter(help="A published GGUF file.")] = None,
    steps: Annotated[int, Parameter(help="For which the little models are trained.")] = 150,
    count: Annotated[int, Parameter(help="Of windows of 512 tokens each.")] = 6,
) -> None:
    note = "goal: at least 95% at F16, and the same ids"
    shown = table("llama.cpp beside transformers", "model", "type", "same next token", "same ids", note=note)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = dict(little(folder, steps))
        if model:
            models[model.stem] = gguf_to_hf(model, folder / "published")
        for name, where in models.items():
            asked = windows(where, count)
            wanted, texts = next_tokens(where, asked), [little_models.library(HELD_OUT[0]), STRANGE]
            ids = [AutoTokenizer.from_pretrained(where)(text)["input_ids"] for text in texts]
            for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0"):
                export_gguf(where, folder / "model.gguf", kind, overwrite=True)
                command = [
                    str(python),
                    "-I",
                    str(PEER),
                    str(folder / "model.gguf"),
                ]  # -I: this folder is no place of modules
                question = json.dumps({"windows": asked, "texts": texts})
                done = subprocess.run(command, input=question, capture_output=True, text=True, check=True)
                said = json.loads(done.stdout)
                pairs = [(a, b) for x, y in zip(said["next"], wanted, strict=True) for a, b in zip(x, y, strict=True)]
                share = sum(a == b for a, b in pairs) / len(pairs)
                met = share >= 0.95 or kind.startswith("Q")
                same = said["ids"] == ids
                shown.add_row(name, kind, goal(met, f"{share:.2%}"), goal(same, "yes" if same else "no"))
    Console().print(shown)


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()

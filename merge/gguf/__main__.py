"""GGUF files: a model in llama.cpp's format, and back into a Hugging Face folder.

For example:

    python -m merge.gguf my-model my-model.gguf                  # as F16
    python -m merge.gguf my-model my-model.gguf --type Q8_0
    python -m merge.gguf my-model.gguf my-model --dtype bfloat16
    python -m merge.gguf my-model.gguf                           # what it is, and whether it is sound

A model is a folder, a hub id, or any of them + a PEFT adapter. Such files have a place for Llama, Mistral, Qwen 2 and
Qwen 3.
"""

import os
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fleet import help_pages
from fleet.errors import UserError, refuse
from fleet.plain import say
from merge.command_helpers import bar, keep_memory, open_many, run

app = help_pages.app("python -m merge.gguf", __doc__)


@app.default
def main(
    model: str,
    out: Path | None = None,
    *,
    type: str = "",
    dtype: str = "",
    pre: str = "",
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Convert.

    Parameters
    ----------
    model:
        What is read.
    out:
        What is made: a file whose name ends in .gguf, or a folder. Without it, the file is looked at.
    type:
        To GGUF: F32, F16 (without this option), BF16, Q8_0 or Q4_0.
    dtype:
        To a folder: float32 (without this option), float16 or bfloat16.
    pre:
        To GGUF: llama.cpp's name of the way in which the tokenizer cuts text into words, where that cannot be seen.
    overwrite:
        Replace what is there.
    quiet:
        No progress.
    """
    keep_memory()
    open_many()
    if out is None and not (model.endswith(".gguf") or os.path.isfile(model)):
        made = Path(model.rstrip("/")).name
        words = shlex.join(["python", "-m", "merge.gguf", model, f"{made}.gguf"])
        raise UserError(f"{model} is no .gguf file to look at; one is made of it by: {words}")
    if out is None:
        show(model)
    elif out.suffix == ".gguf":
        refuse(
            [
                (dtype, f"--dtype {dtype}: it is for making a folder"),
            ]
        )
        to_file(model, out, type or "F16", pre, overwrite, quiet)
    else:
        goal = "it is for making a file whose name ends in .gguf"
        refuse(
            [
                (type, f"--type {type}: {goal}"),
                (pre, f"--pre {pre}: {goal}"),
            ]
        )
        to_folder(model, out, dtype or "float32", overwrite, quiet)


def show(file: str) -> None:
    from merge.gguf.checking import info, verify_gguf

    for name, value in info(file).items():
        say(f"{name}: {value}")
    if problems := verify_gguf(file):
        raise UserError("\n".join(problems))
    say("Nothing is wrong with it.")


def to_file(model: str, out: Path, type: str, pre: str, overwrite: bool, quiet: bool) -> None:
    from merge.gguf.writing import export_gguf

    with bar(quiet, "writing") as progress:
        written = export_gguf(model, out, type, overwrite=overwrite, pre=pre or None, progress=progress)
    for note in written.notes:
        say(f"Note: {note}.")
    say(f"{written.path}: {written.bytes / 1e6:,.1f} MB")


def to_folder(model: str, out: Path, dtype: str, overwrite: bool, quiet: bool) -> None:
    from merge.gguf.writing import gguf_to_hf

    with bar(quiet, "writing") as progress:
        gguf_to_hf(model, out, dtype, overwrite=overwrite, progress=progress)
    say(f"{out}: a folder that transformers loads")


if __name__ == "__main__":
    raise SystemExit(run(app))

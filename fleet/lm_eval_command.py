"""The lm_eval command line for a finished model: shown when a command ends, and in the model's README.md."""

import json
import shlex
from pathlib import Path


def lm_eval(folder: Path, base: str = "") -> str:
    """Of a model; or of an adapter, beside its base."""
    given = {"pretrained": base, "peft": str(folder)} if base else {"pretrained": str(folder)}
    said = ",".join(f"{key}={value}" for key, value in given.items())
    if "," in "".join(given.values()):  # which would part them
        said = json.dumps(given)
    return f"lm_eval --model hf --model_args {shlex.quote(said)} --tasks hellaswag,arc_easy"


def told(folder: Path) -> str:
    return f"Evaluate it: {lm_eval(folder)}"


def section(folder: Path) -> str:
    """Of the README.md in it."""
    return f"## Evaluation\n\n```sh\n{lm_eval(folder)}\n```"

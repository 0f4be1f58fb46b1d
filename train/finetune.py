"""Fine-tune a model on rows of your own: answers (SFT) or preferences (DPO).

For example:

    python -m train.finetune org/chat-135m chats.jsonl --out my-adapter
    python -m train.finetune ./model chats.jsonl --out my-model --merge
    python -m train.finetune ./model.gguf chats.jsonl --out my-model --full
    python -m train.finetune ./model preferences.jsonl --out my-adapter
    torchrun --nproc-per-node 4 -m train.finetune MODEL ROWS --out my-adapter

A row is one of

    {"messages": [{"role": "user", "content": "..."}, ...]}
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
    {"prompt": "...", "chosen": "...", "rejected": "..."}    (preferences)

Without --full an adapter (LoRA) learns, and --out becomes a folder that
peft loads; with --merge or --full, an ordinary Hugging Face folder.
Ctrl-C stops after a step, with a checkpoint; the same command goes on, and
so it does after a kill, to the same bytes.
"""

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fleet.errors import UserError, from_home
from fleet.help_pages import app
from train.cluster.finetune_options import FinetuneOptions
from train.command_line import loading, run

_LESS = "fewer --device-rows, a shorter --seq-length, or an adapter with --four-bits (on a GPU) need less"


def main(
    model: str,
    rows: str,
    *,
    out: Path,
    options: Annotated[FinetuneOptions, Parameter(name="*")] = FinetuneOptions(),
) -> int:
    """Fine-tune.

    Parameters
    ----------
    model:
        A hub id, a folder, or a .gguf file.
    rows:
        A .jsonl or .parquet file, or a data set of the hub.
    out:
        The folder to make. What is needed to go on lies beside it, in OUT.training, until it is there.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with loading("what trains it"):
        from train.cluster.finetuning import finetune
        from train.cluster.ranks import joined
        from train.verdicts import short_memory

    with joined() as ranks:
        try:
            return finetune(model, rows, from_home(out).absolute(), options, ranks)
        except Exception as error:
            if not (short := short_memory(error)):
                raise
            raise UserError(f"{short}; {_LESS}") from None


def command() -> None:
    again = "\nInterrupted; the same command begins again, or goes on from its last checkpoint."
    run(app("python -m train.finetune", __doc__, default_command=main), interrupted=again, said=(UserError, OSError))


if __name__ == "__main__":
    command()

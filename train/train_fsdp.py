"""Train one model on several GPUs, of one machine or of several, with the options that OpenDiLoCo's users know."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # as a script: our modules are found by their whole names only
    sys.path[0] = str(ROOT)

from cyclopts import Parameter  # noqa: E402

from fleet.errors import absolute  # noqa: E402
from fleet.help_pages import app  # noqa: E402
from train.cluster.options import TrainingOptions, spelled  # noqa: E402
from train.command_line import loading, run  # noqa: E402

_EXAMPLES = """One machine, all of its GPUs; a checkpoint every 500 steps, of which three stay:

    torchrun --standalone --nproc-per-node 8 train/train_fsdp.py --path-model 150m \\
        --dataset-name-or-path allenai/c4 --dataset-config en --tokenizer mistralai/Mistral-7B-v0.1 \\
        --ckpt.path /disk/run --ckpt.interval 500 --ckpt.topk 3 --ckpt.resume true

The same command goes on where it ended. Ctrl-C ends all ranks after the same step, with a last checkpoint."""


def main(*, options: Annotated[TrainingOptions, Parameter(name="*")] = TrainingOptions()) -> int:
    """Train a model with PyTorch's DDP or FSDP2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with loading("what trains it"):
        from train.cluster.ranks import joined
        from train.cluster.training import train

    with joined() as ranks:
        return train(replace(options, ckpt=replace(options.ckpt, path=absolute(options.ckpt.path))), ranks)


if __name__ == "__main__":
    wide = None if sys.stdout.isatty() else 120  # so that no option's name is cut in two
    run(app("train_fsdp.py", __doc__, _EXAMPLES, wide, default_command=main), spelled(sys.argv[1:]))

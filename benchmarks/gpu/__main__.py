"""Everything that only a machine with a GPU can tell, in order of worth and in at most ten minutes: the tests that are
skipped elsewhere, digests, speed, memory, evaluation and merging, whole rounds, a merge search.

    make gpu
    python -m benchmarks.gpu --out benchmark-gpu --minutes 10
    python -m benchmarks.gpu --dry-run          # each step at a toy's size, on the CPU, before the day comes

It writes gpu.json and gpu.md after each step. What was cut off is made by the same command, given again; what is there
stays. Nothing is downloaded.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from benchmarks.gpu import steps
from benchmarks.gpu.running import Session

app = App(name="python -m benchmarks.gpu", help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def main(
    *,
    out: Annotated[Path, Parameter(help="Where the results are, and what each step said.")] = Path("benchmark-gpu"),
    minutes: Annotated[float, Parameter(help="All of it may take so many; a dry run, three times as many.")] = 10.0,
    only: Annotated[str, Parameter(help="Only steps whose names hold this.")] = "",
    dry_run: Annotated[bool, Parameter(negative="", help="On the CPU, as small as can be.")] = False,
    step: Annotated[str, Parameter(show=False)] = "",
) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if step:
        return steps.run(step, dry_run)
    if not dry_run and not steps.has_gpu():
        sys.exit("no CUDA device here: --dry-run walks through all steps on the CPU")
    folder = out / "dry" if dry_run else out
    sys.exit(
        Session(folder, minutes * (180 if dry_run else 60), dry_run).all(
            [each for each in steps.STEPS if only in each.name]
        )
    )


if __name__ == "__main__":
    app()

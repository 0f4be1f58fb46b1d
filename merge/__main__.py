"""Merge models by a recipe: mergekit's YAML in, a Hugging Face folder out.

    python -m merge recipe.yml merged-model
    python -m merge recipe.yml merged-model --shard-size 2GB --threads 8 --overwrite
    python -m merge recipe.yml merged-model --device cuda --seed 7

A recipe:

    merge_method: slerp
    base_model: org/model-a
    models:
      - model: org/model-a
      - model: ./model-b
    parameters:
      t: [0, 0.5, 1]        # over the layers
    dtype: bfloat16

docs/merging.md explains all methods and their parameters.
"""

import resource
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from fleet.plain import say
from merge.command import bar, keep_memory, open_many, run

app = App(name="python -m merge", help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def main(
    recipe: Path,
    out: Path,
    *,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    shard_size: str = "5GB",
    threads: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    device: str = "cpu",
    seed: int = 0,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Merge.

    Parameters
    ----------
    recipe:
        The recipe, a YAML file.
    out:
        The folder to make.
    overwrite:
        Replace the folder if it exists.
    shard_size:
        The most bytes of a weight file.
    threads:
        Tensors that are merged at a time; 0: as many as there are processors.
    device:
        Where the arithmetic is done: cpu, cuda, cuda:1, mps.
    seed:
        Of random drops, in dare and della.
    quiet:
        No progress.
    """
    from merge import output  # after --help: it needs torch
    from merge.engine import MergeOptions
    from merge.merging import merge

    keep_memory()
    open_many()
    how, size = MergeOptions(threads, device, seed), output.size_of(shard_size)
    with bar(quiet) as progress:
        took = merge(recipe, out, shard_size=size, overwrite=overwrite, how=how, progress=progress)
    for note in took.notes:
        say(f"Note: {note}.")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    speed = (took.read + took.written) / took.seconds / 1e9
    say(
        f"{out}: {took.written / 1e9:.2f} GB of {took.read / 1e9:.2f} GB in {took.seconds:.1f} s, "
        f"{speed:.2f} GB/s read and written, peak memory {peak / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    raise SystemExit(run(app))

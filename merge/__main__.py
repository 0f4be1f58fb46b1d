"""Merge models by a recipe: mergekit's YAML in, a Hugging Face folder out.

For example:

    python -m merge recipe.yml merged-model
    python -m merge recipe.yml merged-model --shard-size 2GB --threads 8 --overwrite
    python -m merge recipe.yml merged-model --device cuda --seed 7
    python -m merge org/model-a+./my-adapter merged-model

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
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from fleet import help_pages, lm_eval_command
from fleet.plain import bytes_of, say
from merge.merge_command import bar, keep_memory, open_many, run

if TYPE_CHECKING:
    from merge.merge_recipe import MergeRecipe

app = help_pages.app("python -m merge", __doc__)


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
        The recipe, a YAML file; or a model + its PEFT adapter, which are to become one.
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
    from merge import atomic_output  # after --help: it needs torch
    from merge.engine import MergeOptions
    from merge.merging import merge

    keep_memory()
    open_many()
    how, size = MergeOptions(threads, device, seed), atomic_output.size_of(shard_size)
    with bar(quiet) as progress:
        stats = merge(told(recipe), out, shard_size=size, overwrite=overwrite, how=how, progress=progress)
    for note in stats.notes:
        say(f"Note: {note}.")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    speed = (stats.read + stats.written) / stats.seconds
    say(
        f"{out}: {bytes_of(stats.written)} made of {bytes_of(stats.read)} in {stats.seconds:.1f} s, "
        f"{bytes_of(speed)}/s read and written, peak memory {bytes_of(peak)}"
    )
    say(lm_eval_command.told(out))


def told(recipe: Path) -> "Path | MergeRecipe":
    """A recipe's file; or of a model and its adapter, what a recipe of these alone would say."""
    from merge.merge_recipe import alone, merge_of, text_of

    if recipe.is_file() or "+" not in str(recipe):
        return recipe
    value = alone(str(recipe))
    return merge_of(value, text_of(value))


def command() -> None:
    raise SystemExit(run(app))


if __name__ == "__main__":
    command()

"""Merge models by a recipe: mergekit's YAML in, a Hugging Face folder out.

For example:

    python -m merge recipe.yml merged-model
    python -m merge recipe.yml merged-model --shard-size 2GB --threads 8 --overwrite
    python -m merge recipe.yml merged-model --device cuda --seed 7
    python -m merge org/model-a+./my-adapter merged-model
    python -m merge recipe.yml merged.safetensors --raw

A recipe:

    merge_method: slerp
    base_model: org/model-a
    models:
      - model: org/model-a
      - model: ./model-b
    parameters:
      t: [0, 0.5, 1]        # over the layers
    dtype: bfloat16

Several recipes in one file, with a line --- between them, are stages: each but the last has a name, `name: stage-a`,
which others have among their models. docs/merging.md explains all methods and their parameters.
"""

import functools
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from fleet import help_pages, lm_eval_command
from fleet.errors import UserError
from fleet.plain import readable_bytes, say
from merge.command_helpers import bar, keep_memory, open_many, run

if TYPE_CHECKING:
    from merge.engine import MergeOptions
    from merge.merge_recipe import MergeRecipe
    from merge.merging import MergeStats

_SHARD = "5GB"
app = help_pages.app("python -m merge", __doc__)


@app.default
def main(
    recipe: Path,
    out: Path,
    *,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    shard_size: str = _SHARD,
    threads: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    device: str = "cpu",
    seed: int = 0,
    raw: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Merge.

    Parameters
    ----------
    recipe:
        The recipe, a YAML file; or a model + its PEFT adapter, which are to become one.
    out:
        The folder to make; with --raw also a file.
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
    raw:
        Of any .safetensors, files or folders, whatever they are, if only their tensors have the same names.
    quiet:
        No progress.
    """
    from merge import weight_files  # after --help: it needs torch
    from merge.engine import MergeOptions

    keep_memory()
    open_many()
    how, size = MergeOptions(threads, device, seed), weight_files.size_of(shard_size)
    if raw and size != weight_files.size_of(_SHARD):
        raise UserError("--shard-size: of --raw merges the result has as many files as its first model")
    merged = _merged_raw if raw else functools.partial(_merged, size=size)
    stats = merged(recipe, out, overwrite, how, quiet)
    for note in stats.notes:
        say(f"Note: {note}.")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    speed = (stats.read + stats.written) / stats.seconds
    say(
        f"{out}: {readable_bytes(stats.written)} made of {readable_bytes(stats.read)} in {stats.seconds:.1f} s, "
        f"{readable_bytes(speed)}/s read and written, peak memory {readable_bytes(peak)}"
    )
    if not raw:
        say(lm_eval_command.hint(out))


def _merged(recipe: Path, out: Path, overwrite: bool, how: "MergeOptions", quiet: bool, size: int) -> "MergeStats":
    from merge.merging import merge
    from merge.stages import has_stages, merge_stages

    if recipe.is_file() and has_stages(recipe):
        shown = functools.partial(bar, quiet)
        return merge_stages(recipe, out, shard_size=size, overwrite=overwrite, how=how, shown=shown)
    with bar(quiet) as progress:
        return merge(recipe_or_file(recipe), out, shard_size=size, overwrite=overwrite, how=how, progress=progress)


def _merged_raw(recipe: Path, out: Path, overwrite: bool, how: "MergeOptions", quiet: bool) -> "MergeStats":
    from merge.merge_recipe import load
    from merge.raw_models import merge_raw

    with bar(quiet) as progress:
        return merge_raw(load(recipe), out, overwrite=overwrite, needed=[recipe], how=how, progress=progress)


def recipe_or_file(recipe: Path) -> "Path | MergeRecipe":
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

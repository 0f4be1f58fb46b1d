"""A recipe in, a model's folder out."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from merge import engine, model_folder, output
from merge import merge_recipe as recipes
from merge.donors import Donors
from merge.engine import MergeOptions
from merge.merge_planning import Plan, plan
from merge.merge_recipe import Merge

SHARD = 5 * 10**9  # bytes of a weight file


@dataclass(frozen=True)
class Took:
    seconds: float
    read: int  # bytes of all inputs
    written: int
    notes: tuple[str, ...]


def merge(
    recipe: Merge | Path | str,
    out: Path | str,
    *,
    shard_size: int = SHARD,
    overwrite: bool = False,
    how: MergeOptions = MergeOptions(),
    progress: Callable[[int, int], None] = lambda bytes, total: None,
    donors: Donors | None = None,
    beside: Mapping[str, str] | None = None,
) -> Took:
    """Merge the models of a recipe (a record, or the path of a YAML file) into a Hugging Face folder, with other texts
    beside them.

    >>> merge("recipe.yml", "merged")
    """
    engine.check_device(how.device)
    output.free_for(Path(out), overwrite, [] if isinstance(recipe, Merge) else [Path(recipe)])
    recipe = recipe if isinstance(recipe, Merge) else recipes.load(Path(recipe))
    with contextlib.nullcontext(donors) if donors else Donors() as donors:
        made = plan(recipe, donors)
        folders = [donors[name].folder for name in recipe.models]
        with output.whole(Path(out), made.bytes, overwrite, folders) as draft:
            return _written(recipe, made, draft, donors, shard_size, how, progress, beside or {})


def merge_into(folder: Path, recipe: Merge, donors: Donors, how: MergeOptions = MergeOptions()) -> Took:
    """The same, straight into a folder that is there and whose owner sees to it that nobody takes a part for the
    whole."""
    return _written(recipe, plan(recipe, donors), folder, donors, SHARD, how, lambda bytes, total: None, {})


def _written(
    recipe: Merge,
    made: Plan,
    into: Path,
    donors: Donors,
    shard_size: int,
    how: MergeOptions,
    progress: Callable[[int, int], None],
    beside: Mapping[str, str],
) -> Took:
    begin = time.monotonic()
    engine.check_device(how.device)
    template = model_folder.chat_template(recipe.chat_template, [donors[name] for name in recipe.models])
    broken = engine.write(made.jobs, into, shard_size, how, lambda bytes: progress(bytes, made.bytes))
    for name, text in beside.items():
        (into / name).write_text(text)
    model_folder.furnish(into, recipe, made, template)
    read = sum(each.bytes for job in made.jobs for each in job.inputs)
    more = [f"{name} has numbers that are not finite, or too large for its dtype" for name in broken]
    return Took(time.monotonic() - begin, read, made.bytes, (*made.notes, *more))

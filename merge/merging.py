"""A recipe in, a model's folder out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from merge import engine, folder, output
from merge import recipe as recipes
from merge.donors import Donors
from merge.engine import How
from merge.planning import Plan, plan
from merge.recipe import Merge


@dataclass(frozen=True)
class Took:
    seconds: float
    read: int  # bytes of all inputs
    written: int
    notes: tuple[str, ...] = ()


def merge(
    recipe: Merge | Path | str,
    out: Path | str,
    *,
    shard_size: str = "5GB",
    overwrite: bool = False,
    how: How = How(),
    planned: Callable[[Plan], engine.Progress] = lambda plan: lambda bytes: None,
) -> Took:
    """Merge the models of a recipe (a record, or the path of a YAML file) into a Hugging Face folder.

    >>> merge("recipe.yml", "merged")
    """
    begin = time.monotonic()
    engine.check_device(how.device)
    recipe = recipe if isinstance(recipe, Merge) else recipes.load(Path(recipe))
    size = output.size_of(shard_size)
    with Donors() as donors:
        made = plan(recipe, donors)
        models = [donors[name] for name in recipe.models]
        folder.chat_template(recipe.chat_template, models)
        how = replace(how, dtype=getattr(torch, recipe.dtype) if recipe.dtype else None)
        with output.whole(Path(out), made.bytes, overwrite) as draft:
            engine.write(made.jobs, draft, size, how, planned(made))
            folder.furnish(draft, recipe, made, models)
    read = sum(each.bytes for job in made.jobs for each in (*job.others, *([job.base] if job.base else [])))
    return Took(time.monotonic() - begin, read, made.bytes, tuple(made.notes))

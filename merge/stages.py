"""Merges of merges: several recipes in one file, of which each may name the results of others as its models. What is
made on the way lies beside the result until that is there; so a merge that was stopped goes on with its stage."""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleet import lm_eval_command
from fleet.errors import absolute, from_home
from merge import atomic_output, engine
from merge.donors import Donors, located, parts_of
from merge.merge_recipe import MergeRecipe, merge_of, text_of
from merge.merging import SHARD, MergeStats, card, merge
from merge.parameters import check_names
from merge.strictyaml import parse_all, read
from merge.tensor_files import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
Shown = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


@dataclass(frozen=True)
class Stage:
    """A recipe of several, and which others' results it is made of."""

    name: str  # empty: the last one has none
    recipe: MergeRecipe
    uses: tuple[str, ...]


def has_stages(recipe: Path) -> bool:
    """Whether a file has several recipes; one that cannot be read has none."""
    with contextlib.suppress(UserError):
        return len(parse_all(read(recipe))) > 1
    return False


def stages_of(text: str) -> list[Stage]:
    """Each behind those that it uses; the last is the result: the recipe without a name, else the file's last."""
    documents = parse_all(text)
    recipes = {name: merge_of(said, text_of(said)) for name, said in _named(documents).items()}
    stages = {name: Stage(name, recipe, _uses(recipe, recipes)) for name, recipe in recipes.items()}
    last = "" if "" in stages else [*stages][-1]
    found: dict[str, None] = {}
    _order(stages, last, (), found)
    if unused := stages.keys() - found.keys():
        raise UserError(
            f"the stage {min(unused)} goes into nothing; the result is {last or 'the recipe without a name'}"
        )
    for recipe in recipes.values():
        check_names(recipe)  # the last one's, too, before the first is made
    return [stages[name] for name in found]


def _named(documents: Sequence[Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for n, said in enumerate(documents, 1):
        if not isinstance(said, dict):
            raise UserError(f"recipe {n}: `key: value` lines are expected")
        name = said.get("name", "")
        if not isinstance(name, str) or (name and not _NAME.fullmatch(name)):
            raise UserError(f"recipe {n}: name is {str(name)[:60]!r}; letters, digits, and - _ . are possible")
        if name in found:
            raise UserError(f"two of the recipes are called {name}" if name else "two of the recipes have no name")
        found[name] = {key: each for key, each in said.items() if key != "name"}
    return found


def _uses(recipe: MergeRecipe, names: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(head for model in recipe.models if (head := _head(model)) and head in names))


def _head(reference: str) -> str:
    """A stage's name, also before a + and an adapter."""
    return reference.partition("+")[0]


def _order(stages: Mapping[str, Stage], name: str, way: tuple[str, ...], found: dict[str, None]) -> None:
    """Finds what a stage needs, and then the stage itself; many may go into one, and one into many."""
    if name in way:
        raise UserError(f"the stages go round in a circle: {' <- '.join([*way[way.index(name) :], name])}")
    for used in () if name in found else stages[name].uses:
        _order(stages, used, (*way, name), found)
    found[name] = None


# -- making them -------------------------------------------------------------------------------------------------------


def merge_stages(
    path: Path,
    out: Path,
    *,
    shard_size: int = SHARD,
    overwrite: bool = False,
    how: engine.MergeOptions = engine.MergeOptions(),
    shown: Shown = lambda name: contextlib.nullcontext(lambda bytes, total: None),
) -> MergeStats:
    """Those that are not there yet, one after the other; what none to come needs is removed."""
    out = atomic_output.free_for(out, overwrite, [path])
    text, stages = _read(path)
    place = out.parent / f".{out.name}.stages"
    folders = {name: place / folder for name, folder in _folders(stages, how).items()}
    atomic_output.free_for(out, overwrite, _inputs(stages))
    made = list[MergeStats]()
    with atomic_output.held(place.with_name(f"{place.name}.lock"), out), _told_where(place):
        todo = _missing(stages, folders)
        for n, stage in enumerate(todo):
            _sweep(place, [folders[name] for each in todo[n:] for name in each.uses])
            target, recipe, more = folders[stage.name], stage.recipe, dict[str, Any]()
            if stage is stages[-1]:
                target, recipe = out, replace(recipe, text=text)
                more = {"overwrite": overwrite, "beside": _card_of(recipe, stages, out)}
            with Donors(_places(recipe, folders)) as donors, shown(stage.name or out.name) as progress:
                stats = merge(recipe, target, shard_size=shard_size, how=how, progress=progress, donors=donors, **more)
            made.append(replace(stats, notes=tuple(f"{stage.name or out.name}: {note}" for note in stats.notes)))
        _sweep(place, [])
    seconds, read, written = (sum(getattr(each, key) for each in made) for key in ("seconds", "read", "written"))
    return MergeStats(seconds, read, written, tuple(note for each in made for note in each.notes))


def _read(path: Path) -> tuple[str, list[Stage]]:
    try:
        text = read(path)
        return text, stages_of(text)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _missing(stages: Sequence[Stage], folders: Mapping[str, Path]) -> list[Stage]:
    """The last one, and what is not there of all that it needs, and that these need."""
    last = stages[-1]
    wanted, found = set(last.uses), [last]
    for stage in reversed(stages[:-1]):
        if stage.name in wanted and not folders[stage.name].is_dir():
            found.append(stage)
            wanted |= set(stage.uses)
    return found[::-1]


def _places(recipe: MergeRecipe, folders: Mapping[str, Path]) -> dict[str, str]:
    return {
        model: str(folders[head]) + model.removeprefix(head)
        for model in recipe.models
        if (head := _head(model)) in folders
    }


def _card_of(recipe: MergeRecipe, stages: Sequence[Stage], out: Path) -> dict[str, str]:
    names = {stage.name for stage in stages}
    models = dict.fromkeys(each for stage in stages for each in stage.recipe.models if _head(each) not in names)
    return {"README.md": f"{card(recipe, [*models])}\n{lm_eval_command.section(out)}\n"}


def _sweep(place: Path, kept: Sequence[Path]) -> None:
    """What no stage to come needs; and the folder, when nothing is left in it."""
    for each in place.glob("*") if place.is_dir() else ():
        if each not in kept:
            shutil.rmtree(each, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.rmdir()


@contextlib.contextmanager
def _told_where(place: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if place.is_dir():
            error.add_note(f"stages that are finished lie in {place}: the same command goes on behind them")
        raise


# -- what a stage follows from -----------------------------------------------------------------------------------------


def _folders(stages: Sequence[Stage], how: engine.MergeOptions) -> dict[str, str]:
    """A stage's folder is called by all that decides what is in it: another recipe, or a model that has changed, has
    another one. All models are looked for, before anything is made."""
    found: dict[str, str] = {}
    for stage in stages:
        models = [_state(model, found) for model in stage.recipe.models]
        said = json.dumps([stage.recipe.text, how.seed, how.device, models])
        found[stage.name] = f"{stage.name}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    return found


def _state(reference: str, stages: Mapping[str, str]) -> list[Any]:
    """Which files a model has at this moment: their names, sizes and times."""
    found = list[Any]()
    for part in filter(None, parts_of(reference)):
        if part in stages:
            found.append(stages[part])
            continue
        place = _place(part)
        files = [place] if place.is_file() else sorted(path for path in place.iterdir() if path.is_file())
        found += [(str(absolute(path)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return found


def _inputs(stages: Sequence[Stage]) -> list[Path]:
    """Where all models and adapters lie that are no stages."""
    names = {stage.name for stage in stages}
    parts = [part for stage in stages for model in stage.recipe.models for part in parts_of(model)]
    return [_place(part) for part in dict.fromkeys(parts) if part and part not in names]


def _place(part: str) -> Path:
    return from_home(part) if from_home(part).is_file() else located(part)

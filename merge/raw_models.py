"""Merges of any safetensors files that have tensors of equal names: diffusion, vision, audio. Nothing is known of what
they are, and no config.json is needed."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import absolute, from_home
from fleet.plain import some
from merge import atomic_output, engine
from merge.atomic_output import RECIPE
from merge.donor import LazyTensor, safetensors_in
from merge.json_files import read_json, write_json
from merge.merge_planning import TensorJob, jobs_of
from merge.merge_recipe import MergeRecipe, refuse_keys
from merge.merging import MergeStats
from merge.parameters import check_names
from merge.tensor_files import UserError, read_header
from merge.weight_files import WeightFile

_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_BESIDE = (".json", ".txt", ".model", ".jinja", ".yaml", ".yml")  # what a pipeline's folder has beside weights


@dataclass(frozen=True)
class RawFile:
    """A weight file: where it lies below the model's folder, and its tensors, by their names in it and in the model."""

    place: Path
    names: Mapping[str, str]
    about: Mapping[str, str]


@dataclass(frozen=True)
class RawModel:
    """One file, or all that are in a folder."""

    reference: str
    root: Path
    files: Sequence[RawFile]
    tensors: Mapping[str, LazyTensor]

    @property
    def is_file(self) -> bool:
        return not self.root.is_dir()


def opened(reference: str, stack: ExitStack) -> RawModel:
    """Of a folder that holds several models, as pipelines of diffusion do, the names begin with the file's."""
    root = from_home(reference).absolute()  # as it is called: a link may lead to a file of another name
    if not root.exists():
        raise UserError(f"{reference}: there is no such file or folder; of the hub's models, fetch the files first")
    found = [root] if root.is_file() else sorted(root.rglob("*.safetensors"))
    base = root.parent if root.is_file() else root
    paths = [path for path in found if not any(part[0] == "." for part in path.relative_to(base).parts)]
    if not paths or paths[0].suffix != ".safetensors":
        raise UserError(f"{reference}: no .safetensors file")
    groups = {path: _SHARD.sub("", str(path.relative_to(base).with_suffix(""))) for path in paths}
    alone = len({*groups.values()}) == 1
    files, tensors = list[RawFile](), dict[str, LazyTensor]()
    for path, group in groups.items():
        there, about = _read(path, stack)
        names = {name: name if alone else f"{group}/{name}" for name in there}
        if twice := tensors.keys() & {*names.values()}:
            raise UserError(f"{path}: {min(twice)} is in another shard, too")
        files.append(RawFile(path.relative_to(base), names, about))
        tensors |= {names[name]: each for name, each in there.items()}
    return RawModel(reference, root, files, tensors)


def _read(path: Path, stack: ExitStack) -> tuple[dict[str, LazyTensor], Mapping[str, str]]:
    try:
        with path.open("rb") as file:
            about = read_header(file, path.stat().st_size).about
        return safetensors_in(path, stack), about
    except (UserError, OSError) as error:
        raise UserError(f"{path}: {error}") from None


def merge_raw(
    recipe: MergeRecipe,
    out: Path,
    *,
    overwrite: bool = False,
    needed: Sequence[Path] = (),
    how: engine.MergeOptions = engine.MergeOptions(),
    progress: Callable[[int, int], None] = lambda bytes, total: None,
) -> MergeStats:
    """The result has the files of the base, or of the first model, with these names: a file, or a folder, which
    replaces none with what is needed."""
    begin = time.monotonic()
    why = "says something of language models; nothing is known of what --raw merges"
    refuse_keys(recipe, ("slices", "tokenizer", "chat_template"), why)
    engine.check_device(how.device)
    with ExitStack() as stack:
        models = {name: opened(name, stack) for name in recipe.models}
        leader = models[recipe.base_model or recipe.slices[0].inputs[0].model]
        notes = check_names(recipe)
        jobs = {job.name: job for job in jobs_of(recipe, {name: model.tensors for name, model in models.items()})}
        size, needed = sum(job.bytes for job in jobs.values()), [*needed, *(model.root for model in models.values())]
        with _output(leader, out, size, overwrite, needed) as (draft, name):
            files = [_file(each, jobs, name) for each in leader.files]
            broken = engine.write_files(files, draft, how, lambda bytes: progress(bytes, size))
            if not leader.is_file:
                notes += _furnish(draft, leader, files, recipe)
    read = sum(each.bytes for job in jobs.values() for each in job.inputs)
    notes += [f"{name} has numbers that are not finite, or too large for its dtype" for name in broken]
    return MergeStats(time.monotonic() - begin, read, size, tuple(notes))


@contextmanager
def _output(
    leader: RawModel, out: Path, size: int, overwrite: bool, inputs: Sequence[Path]
) -> Iterator[tuple[Path, str | None]]:
    """A folder to write into; and of a single file the name that it gets there."""
    if not leader.is_file:
        with atomic_output.atomic_folder(out, size, overwrite, inputs) as draft:
            yield draft, None
        return
    if out.suffix != ".safetensors":
        raise UserError(f"{out}: {leader.reference} is one file; name the result like one, as {out}.safetensors")
    if absolute(out) in map(absolute, inputs):
        raise UserError(f"{out} is not replaced: it is one of the models")
    out = atomic_output.file_free_for(absolute(out), overwrite)
    with atomic_output.atomic_file(out, size, overwrite) as file:
        yield file.parent, file.name


def _file(of: RawFile, jobs: Mapping[str, TensorJob], name: str | None) -> WeightFile:
    return WeightFile(name or str(of.place), {own: jobs[key] for own, key in of.names.items()}, of.about)


def _furnish(draft: Path, leader: RawModel, files: Sequence[WeightFile], recipe: MergeRecipe) -> list[str]:
    """What lies beside the weights; in words, what is not taken over."""
    left = []
    for path in sorted(leader.root.rglob("*")):
        place = path.relative_to(leader.root)
        if not path.is_file() or path.suffix == ".safetensors" or any(part[0] == "." for part in place.parts):
            continue
        if path.suffix in _BESIDE:
            (draft / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, draft / place)
        elif path.suffix != ".md":
            left.append(str(place))
    for index in draft.rglob("*.safetensors.index.json"):
        _retotal(index.relative_to(draft), leader, draft, files)
    (draft / RECIPE).write_text(recipe.text, encoding="utf-8")
    return [f"left out: {some(left, 3)}"] if left else []


def _retotal(index: Path, leader: RawModel, draft: Path, files: Sequence[WeightFile]) -> None:
    """An index says how many bytes its shards have, which may be of another dtype now."""
    said = read_json(leader.root / index)
    shards, about = said.get("weight_map") or {}, said.get("metadata") or {}
    if not isinstance(shards, dict) or not isinstance(about, dict):
        raise UserError(f"{leader.root / index}: weight_map and metadata are expected to be objects, {{...}}")
    named = {str(index.parent / str(name)) for name in shards.values()}
    total = sum(job.bytes for each in files if each.name in named for job in each.jobs.values())
    write_json(draft / index, {**said, "metadata": {**about, "total_size": total}})

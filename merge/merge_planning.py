"""What a recipe makes: every tensor of the result, of which tensors it is made, and how. Nothing is merged here."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from merge.donor import Donor, LazyTensor, View, changed, text_part, tied, views_of
from merge.donors import Donors
from merge.layer_splits import depth_of
from merge.merge_recipe import MergeInput, MergeRecipe, Settings
from merge.methods import MergeMethod
from merge.model_configs import TOKEN_IDS, check_kinds, differences, stacked
from merge.parameters import check_names, method_of, resolved
from merge.tensor_files import UserError
from merge.tensor_names import (
    comes_first,
    is_embedding,
    is_head,
    is_vocabulary,
    layer_of,
    stacks,
    takes_scales_out,
    text_stack,
    writes_to_residual,
)
from merge.vocabulary import Vocabulary, different_words

Config = dict[str, Any]


@dataclass(frozen=True)
class TensorJob:
    """One tensor of the result."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    others: tuple[LazyTensor, ...]
    base: LazyTensor | None = None
    models: tuple[str, ...] = ()
    # empty: nothing to compute (not floating point, or empty): the first input's, the base's if there is one, is copied
    method: str = ""
    params: Mapping[str, Any] | None = None

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def inputs(self) -> tuple[LazyTensor, ...]:
        return (self.base, *self.others) if self.base else self.others


@dataclass(frozen=True)
class Plan:
    jobs: list[TensorJob]
    config: Config
    leader: Donor  # whose configuration, and by default whose tokenizer, the result has
    vocabulary: Vocabulary | None
    notes: list[str]

    @property
    def bytes(self) -> int:
        return sum(job.bytes for job in self.jobs)


@dataclass(frozen=True)
class ResolvedSlice:
    """A slice as its method sees it."""

    inputs: tuple[MergeInput, ...]  # the base first, where there is one
    based: bool
    parameters: Settings


def plan_merge(recipe: MergeRecipe, donors: Donors) -> Plan:
    """All jobs, in the order of the result's files; or all that does not fit together, before anything is merged."""
    parts = [_part(recipe, number) for number in range(len(recipe.slices))]
    notes = check_names(recipe)
    leader = donors[recipe.base_model or recipe.slices[0].inputs[0].model]
    models = [donors[name] for name in recipe.models]
    check_kinds(models, leader)
    notes += differences(models, leader, parts[0].inputs[0].layers is not None)
    vocabulary, same = None, tuple(recipe.models)  # models: there are tokenizers with hundreds of thousands of tokens
    if said := recipe.tokenizer:
        key = (repr(said), *same, leader.reference)
        vocabulary = donors.remembered(key, lambda: Vocabulary(said, models, leader))
    notes += vocabulary.notes if vocabulary else donors.remembered(("words", *same), lambda: _other_words(models))
    views = {donor.reference: view for donor, view in zip(models, views_of(models), strict=True)}
    if vocabulary and not any(map(is_embedding, views[leader.reference])):
        raise UserError(
            f"a tokenizer is asked for, but no tensor of {leader.reference} has a name that is known as that of "
            "embeddings: merge models of one tokenizer, without tokenizer_source"
        )
    jobs = jobs_of(recipe, views, vocabulary)
    _check_residual(jobs, leader)
    config = _config(leader, vocabulary.source if vocabulary else None, parts, jobs, donors)
    return Plan(jobs, config, leader, vocabulary, notes)


def jobs_of(recipe: MergeRecipe, views: Mapping[str, View], vocabulary: Vocabulary | None = None) -> list[TensorJob]:
    """Whatever the tensors are of, if only all of them have the same names."""
    parts = [_part(recipe, number) for number in range(len(recipe.slices))]
    _same_names(parts[0], views)
    return [_job(recipe, views, vocabulary, *each) for each in _names(parts, views)]


def _check_residual(jobs: Sequence[TensorJob], leader: Donor) -> None:
    scales = [(job.params or {}).get("residual", ()) for job in jobs if writes_to_residual(job.name)]
    if any(takes_scales_out(job.name) for job in jobs) and any(each not in (0, 1) for some in scales for each in some):
        raise UserError(
            f"residual: in {leader.reference} norms stand behind what attention and MLP add, and take any scale of it "
            "out again; 1 and 0 are possible"
        )


def _other_words(models: Sequence[Donor]) -> list[str]:
    """Where no tokenizer is asked for, rows of embeddings are merged whatever words they are of."""
    first, *others = models
    return [
        f"{model.reference} has other tokens than {first.reference}: give a tokenizer_source"
        for model in others
        if different_words(first, model)
    ]


# -- which models ------------------------------------------------------------------------------------------------------


def _part(recipe: MergeRecipe, number: int) -> ResolvedSlice:
    """The slice, its base as the first of its inputs."""
    said, method = recipe.slices[number], method_of(recipe)
    base = (said.base_model or recipe.base_model) if method.base != "none" else None
    if method.base == "required" and base is None:
        raise UserError(f"{recipe.method} needs a base_model")
    others = tuple(one for one in said.inputs if one.model != base)
    if len(others) < method.least or (method.most and len(others) > method.most):
        limits = str(method.least) if method.least == method.most else f"{method.least} or more"
        limits = f"just {method.most}" if method.most == 1 else limits
        wanted = f"{limits} model(s) beside the base_model, if it has one"
        raise UserError(f"{recipe.method} merges {wanted}; here are {len(others)}")
    if base is None:
        return ResolvedSlice(_with_base(recipe, method, others), False, said.parameters)
    ranges = {one.layers for one in said.inputs if one.model == base} or {one.layers for one in others}
    if len(ranges) > 1:
        raise UserError(
            f"the base_model {base} must be a source, with one layer_range, where the sources' ranges differ"
        )
    return ResolvedSlice((MergeInput(base, next(iter(ranges), None)), *others), True, said.parameters)


def _with_base(recipe: MergeRecipe, method: MergeMethod, inputs: tuple[MergeInput, ...]) -> tuple[MergeInput, ...]:
    """To a method that knows no base it is one of the models; it need not be listed where whole models are merged."""
    base = recipe.base_model
    listed = base is None or method.most == 1 or inputs[0].layers or any(one.model == base for one in inputs)
    return inputs if listed else (*inputs, MergeInput(str(base)))


# -- which tensors -----------------------------------------------------------------------------------------------------


def _names(
    parts: Sequence[ResolvedSlice], views: Mapping[str, View]
) -> Iterator[tuple[ResolvedSlice, str, list[str], float]]:
    """Each tensor of the result, its names in the inputs, and where in its slice it lies."""
    first = views[parts[0].inputs[0].model]
    if parts[0].inputs[0].layers is None:
        last = {stack: max(layers) for stack, layers in stacks(first).items()}
        for name in first:
            layer = layer_of(name)
            depth = depth_of(layer[1], last[layer[0]]) if layer else 0.0
            yield parts[0], name, [name] * len(parts[0].inputs), depth
        return
    stack = text_stack(first)
    once = [name for name in first if not name.startswith(f"{stack}.")]
    for name in (name for name in once if comes_first(name)):
        yield parts[0], name, [name] * len(parts[0].inputs), 0.0
    made = 0
    for part in parts:
        ranges = [range(*one.layers) for one in part.inputs if one.layers]
        for n, own in enumerate(zip(*ranges, strict=True)):
            for suffix in _suffixes(views[part.inputs[0].model], stack, own[0], part.inputs[0].model):
                names = [f"{stack}.{layer}.{suffix}" for layer in own]
                yield part, f"{stack}.{made}.{suffix}", names, depth_of(n, len(ranges[0]) - 1)
            made += 1
    for name in (name for name in once if not comes_first(name)):
        yield parts[-1], name, [name] * len(parts[-1].inputs), 0.0


def _suffixes(view: View, stack: str, layer: int, model: str) -> list[str]:
    begin = f"{stack}.{layer}."
    if found := [name.removeprefix(begin) for name in view if name.startswith(begin)]:
        return found
    raise UserError(f"{model} has {len(stacks(view).get(stack, ()))} layers: there is no layer {layer}")


def _same_names(part: ResolvedSlice, views: Mapping[str, View]) -> None:
    """Of whole models; those of layers are looked up one by one."""
    first = part.inputs[0].model
    for one in part.inputs:
        if one.layers is None and (missing := views[one.model].keys() - views[first].keys()):
            raise UserError(f"{min(missing)} is missing in {first}; {one.model} has it")


# -- how ---------------------------------------------------------------------------------------------------------------


def _job(
    recipe: MergeRecipe,
    views: Mapping[str, View],
    vocabulary: Vocabulary | None,
    part: ResolvedSlice,
    name: str,
    names: Sequence[str],
    depth: float,
) -> TensorJob:
    for one, own in zip(part.inputs, names, strict=True):
        if own not in views[one.model]:
            raise UserError(f"{own} is missing in {one.model}; {part.inputs[0].model} has it")
    stored = [views[one.model][own] for one, own in zip(part.inputs, names, strict=True)]
    if vocabulary and is_vocabulary(name):
        known = {model: view[name] for model, view in views.items() if name in view}
        stored = [vocabulary.aligned(one.model, known) for one in part.inputs]
    _same_shape(name, part.inputs, stored)
    shape = stored[0].shape
    if not stored[0].dtype.is_floating_point or 0 in shape:
        return TensorJob(name, shape, stored[0].dtype, (stored[0],))
    dtype, begin = _dtype(recipe, stored), int(part.based)
    cast = [_input_cast(each, recipe.dtype) for each in stored]
    params = resolved(recipe, part.parameters, part.inputs[begin:], name, names[begin:], depth)
    models = tuple(one.model for one in part.inputs[begin:])
    base = cast[0] if part.based else None
    return TensorJob(name, shape, dtype, tuple(cast[begin:]), base, models, recipe.method, params)


def _dtype(recipe: MergeRecipe, stored: Sequence[LazyTensor]) -> torch.dtype:
    if name := recipe.out_dtype or recipe.dtype:
        return getattr(torch, name)  # type: ignore[no-any-return]
    dtype = stored[0].dtype
    for each in stored[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    return torch.float32 if dtype == torch.float64 else dtype


def _input_cast(stored: LazyTensor, name: str | None) -> LazyTensor:
    """As DTYPE has it; arithmetic is in float32 anyhow."""
    if name in (None, "float32"):
        return stored
    dtype = getattr(torch, str(name))
    return changed(stored, lambda _begin, _end, rows: rows.to(dtype))


def _same_shape(name: str, inputs: Sequence[MergeInput], stored: Sequence[LazyTensor]) -> None:
    for one, each in zip(inputs, stored, strict=True):
        if each.shape != stored[0].shape:
            shapes = f"{list(stored[0].shape)} in {inputs[0].model}, {list(each.shape)} in {one.model}"
            rule = "; give a tokenizer_source to bring vocabularies together" if is_vocabulary(name) else ""
            raise UserError(f"{name} has different shapes: {shapes}{rule}")
        if each.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise UserError(f"{name} of {one.model} is quantized; merge the model that it was made of")
        if each.dtype.is_floating_point != stored[0].dtype.is_floating_point:
            raise UserError(f"{name} is of {stored[0].dtype} in {inputs[0].model}, of {each.dtype} in {one.model}")


# -- the result's config.json ------------------------------------------------------------------------------------------


def _config(
    leader: Donor, tokens: Donor | None, parts: Sequence[ResolvedSlice], jobs: Sequence[TensorJob], donors: Donors
) -> Config:
    config: Config = copy.deepcopy(dict(leader.config))
    floats = {job.dtype for job in jobs if job.method}
    if len(floats) == 1:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = str(*floats).removeprefix("torch.")
    if any(is_head(job.name) for job in jobs) and tied(leader):
        config["tie_word_embeddings"] = False
    if rows := [job.shape[0] for job in jobs if is_embedding(job.name)]:
        where = config if "vocab_size" in config else text_part(config)
        where["vocab_size"] = rows[0]
    if tokens:
        config |= {key: tokens.config[key] for key in TOKEN_IDS if key in tokens.config}
    config.pop("auto_map", None)
    firsts = [(part.inputs[0].model, part.inputs[0].layers) for part in parts]
    if firsts[0][1]:
        of_each = [(donors[model], layer) for model, layers in firsts for layer in range(*(layers or (0, 0)))]
        stacked(text_part(config), of_each)
    return config

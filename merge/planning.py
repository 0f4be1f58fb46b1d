"""What a recipe makes: every tensor of the result, of which tensors it is made, and how. Nothing is merged here."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from merge.donors import BUFFERS, Donor, Donors, Stored
from merge.files import Wrong
from merge.parameters import check_names, method_of, resolved
from merge.recipe import Input, Merge, Slice
from merge.vocabulary import Vocabulary, is_vocabulary

_NUMBERED = re.compile(r"^(.+?)\.(\d+)\.(.+)$")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "n_head", "hidden_size", "num_experts_per_tok")
_ARITHMETIC = ("rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "rms_norm_eps", "sliding_window")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.(weight|bias)$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$")


@dataclass(frozen=True)
class Job:
    """One tensor of the result."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    others: tuple[Stored, ...]
    base: Stored | None
    models: tuple[str, ...]
    method: str  # empty: a copy of the only one
    params: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    jobs: list[Job]
    config: dict[str, Any]
    leader: Donor  # whose configuration, and by default whose tokenizer, the result has
    vocabulary: Vocabulary | None
    notes: list[str]

    @property
    def bytes(self) -> int:
        return sum(job.bytes for job in self.jobs)


def plan(recipe: Merge, donors: Donors) -> Plan:
    """All jobs, in the order of the result's files; or all that does not fit together, before anything is merged."""
    notes = check_names(recipe)
    leader = donors[recipe.base_model or recipe.models[0]]
    models = [donors[name] for name in recipe.models]
    _same_kind(models, leader)
    notes += _differences(models, leader)
    vocabulary = Vocabulary(recipe, models, leader) if recipe.tokenizer else None
    views = {donor.reference: view for donor, view in zip(models, _untied(models), strict=True)}
    slices = [_with_base(recipe, part, views) for part in recipe.slices]
    _same_names(slices[0], views)
    jobs = [_job(recipe, part, views, vocabulary, *names, t) for part, names, t in _names(slices, views)]
    if vocabulary:
        notes += vocabulary.notes
    return Plan(jobs, _config(recipe, leader, slices, views, jobs), leader, vocabulary, notes)


# -- which tensors -----------------------------------------------------------------------------------------------------

View = Mapping[str, Stored]  # a model's tensors, its output head among them only where it is one of its own


def _names(slices: Sequence[Slice], views: Mapping[str, View]) -> Iterator[tuple[Slice, tuple[str, list[str]], float]]:
    """Each tensor of the result, its names in the inputs, and where in its slice it lies."""
    first = views[slices[0].inputs[0].model]
    if all(one.layers is None for one in slices[0].inputs):
        counts = {stack: 1 + max(layers) for stack, layers in stacks(first).items()}
        for name in first:
            found = _NUMBERED.match(name)
            t = _place(int(found[2]), counts[found[1]]) if found else 0.0
            yield slices[0], (name, [name] * len(slices[0].inputs)), t
        return
    (stack, layers), *more = stacks(first).items()
    if more:
        raise Wrong(f"slices need one stack of layers; there are {stack}, {', '.join(name for name, _ in more)}")
    once = [name for name in first if not _NUMBERED.match(name)]
    for name in (name for name in once if comes_first(name)):
        yield slices[0], (name, [name] * len(slices[0].inputs)), 0.0
    made = 0
    for part in slices:
        ranges = [range(*one.layers) for one in part.inputs if one.layers]
        for n, own in enumerate(zip(*ranges, strict=True)):
            for suffix in _suffixes(views[part.inputs[0].model], stack, own[0], part.inputs[0].model):
                names = [f"{stack}.{layer}.{suffix}" for layer in own]
                yield part, (f"{stack}.{made}.{suffix}", names), _place(n, len(ranges[0]))
            made += 1
    for name in (name for name in once if not comes_first(name)):
        yield slices[-1], (name, [name] * len(slices[-1].inputs)), 0.0


def stacks(names: Mapping[str, Any]) -> dict[str, set[int]]:
    """The model's stacks of layers, and their numbers."""
    found: dict[str, set[int]] = {}
    for name in names:
        if numbered := _NUMBERED.match(name):
            found.setdefault(numbered[1], set()).add(int(numbered[2]))
    return found


def comes_first(name: str) -> bool:
    """Whether a tensor outside the layers stands before them."""
    return not _HEAD.search(name) and any(word in name for word in ("emb", "wte", "wpe"))


def _place(layer: int, layers: int) -> float:
    return layer / (layers - 1) if layers > 1 else 1.0


def _suffixes(view: View, stack: str, layer: int, model: str) -> list[str]:
    begin = f"{stack}.{layer}."
    if found := [name.removeprefix(begin) for name in view if name.startswith(begin)]:
        return found
    raise Wrong(f"{model} has {len(stacks(view).get(stack, ()))} layers: there is no layer {layer}")


def _untied(models: Sequence[Donor]) -> list[View]:
    """Output heads that are the embeddings are left out, unless another model has one of its own."""
    heads = {name for donor in models if not tied(donor) for name in donor.tensors if _HEAD.search(name)}
    views = []
    for donor in models:
        view = {name: each for name, each in donor.tensors.items() if not name.endswith(BUFFERS)}
        if tied(donor):
            view = {name: each for name, each in view.items() if not _HEAD.search(name)}
            embedding = next((each for name, each in view.items() if _EMBEDDING.search(name)), None)
            if embedding:
                view |= {name: embedding for name in heads if name.endswith(".weight")}
        views.append(view)
    return views


def tied(donor: Donor) -> bool:
    """Whether its output head is its embeddings."""
    said = donor.config.get("tie_word_embeddings")
    return bool(said) if said is not None else not any(_HEAD.search(name) for name in donor.tensors)


def _with_base(recipe: Merge, part: Slice, views: Mapping[str, View]) -> Slice:
    """The slice with its base as one of its inputs, where the method has one."""
    method, base = method_of(recipe), part.base_model or recipe.base_model
    if method.base == "required" and base is None:
        raise Wrong(f"{recipe.method} needs a base_model")
    inputs = part.inputs
    if method.base != "none" and base and base not in [one.model for one in inputs]:
        ranges = {one.layers for one in inputs}
        if len(ranges) > 1:
            raise Wrong(f"the base_model {base} must be one of the sources of a slice whose layer ranges differ")
        inputs = (Input(base, *ranges), *inputs)
    others = len(inputs) - (method.base != "none" and base is not None)
    if others < method.least or (method.most and others > method.most):
        limits = f"{method.least}" if method.least == method.most else f"{method.least} or more"
        limits = f"just {method.most}" if method.most == 1 else limits
        raise Wrong(f"{recipe.method} merges {limits} model(s) beside the base_model, if it has one; here are {others}")
    return replace(part, inputs=inputs, base_model=base if method.base != "none" else None)


# -- how ---------------------------------------------------------------------------------------------------------------


def _job(
    recipe: Merge,
    part: Slice,
    views: Mapping[str, View],
    vocabulary: Vocabulary | None,
    name: str,
    names: Sequence[str],
    t: float,
) -> Job:
    for one, own in zip(part.inputs, names, strict=True):
        if own not in views[one.model]:
            raise Wrong(f"{own} is missing in {one.model}; {part.inputs[0].model} has it")
    stored = [views[one.model][own] for one, own in zip(part.inputs, names, strict=True)]
    if vocabulary and is_vocabulary(name):
        stored = vocabulary.aligned(name, [one.model for one in part.inputs], stored)
    _same_shape(name, part.inputs, stored)
    others = [n for n, one in enumerate(part.inputs) if one.model != part.base_model]
    base = next((stored[n] for n, one in enumerate(part.inputs) if one.model == part.base_model), None)
    if not all(each.dtype.is_floating_point for each in stored):
        return Job(name, stored[0].shape, stored[0].dtype, (base or stored[0],), None, (), "", {})
    inputs, own_names = [part.inputs[n] for n in others], [names[n] for n in others]
    params = resolved(recipe, part, inputs, name, own_names, t)
    models = tuple(one.model for one in inputs)
    dtype = _dtype(recipe, stored)
    return Job(name, stored[0].shape, dtype, tuple(stored[n] for n in others), base, models, recipe.method, params)


def _same_names(part: Slice, views: Mapping[str, View]) -> None:
    """Of whole models; those of layers are looked up one by one."""
    first = part.inputs[0].model
    for one in part.inputs:
        if one.layers is None and (missing := views[one.model].keys() - views[first].keys()):
            raise Wrong(f"{min(missing)} is missing in {first}; {one.model} has it")


def _dtype(recipe: Merge, stored: Sequence[Stored]) -> torch.dtype:
    if name := recipe.out_dtype or recipe.dtype:
        return getattr(torch, name)  # type: ignore[no-any-return]
    dtype = stored[0].dtype
    for each in stored[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    return torch.float32 if dtype == torch.float64 else dtype


def _same_shape(name: str, inputs: Sequence[Input], stored: Sequence[Stored]) -> None:
    for one, each in zip(inputs, stored, strict=True):
        if each.shape != stored[0].shape:
            shapes = f"{list(stored[0].shape)} in {inputs[0].model}, {list(each.shape)} in {one.model}"
            rule = "; give a tokenizer_source to bring vocabularies together" if is_vocabulary(name) else ""
            raise Wrong(f"{name} has different shapes: {shapes}{rule}")
        if each.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise Wrong(f"{name} of {one.model} is quantized; merge the model that it was made of")


def _same_kind(models: Sequence[Donor], leader: Donor) -> None:
    for donor in models:
        mine, other = (each.config.get("model_type") for each in (leader, donor))
        if mine != other:
            raise Wrong(
                f"{leader.reference} is of the kind {mine}, {donor.reference} of the kind {other}: "
                "their tensors mean different things, and cannot be merged"
            )
        for key in _HEADS:
            if leader.config.get(key) != donor.config.get(key):
                values = f"{leader.config.get(key)} in {leader.reference}, {donor.config.get(key)} in {donor.reference}"
                raise Wrong(f"{key} is {values}: the models have different shapes")


def _differences(models: Sequence[Donor], leader: Donor) -> list[str]:
    return [
        f"{key} is {json.dumps(donor.config.get(key))} in {donor.reference}, "
        f"{json.dumps(leader.config.get(key))} in {leader.reference}: the result has the latter"
        for donor in models
        for key in _ARITHMETIC
        if donor.config.get(key) != leader.config.get(key)
    ]


# -- the result's config.json ------------------------------------------------------------------------------------------


def _config(
    recipe: Merge, leader: Donor, slices: Sequence[Slice], views: Mapping[str, View], jobs: Sequence[Job]
) -> dict[str, Any]:
    config = dict(leader.config)
    floats = {job.dtype for job in jobs if job.method}
    if len(floats) == 1:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = str(*floats).removeprefix("torch.")
    if any(_HEAD.search(job.name) for job in jobs) and tied(leader):
        config["tie_word_embeddings"] = False
    if rows := [job.shape[0] for job in jobs if _EMBEDDING.search(job.name)]:
        where = config if "vocab_size" in config else config.get("text_config", config)
        where["vocab_size"] = rows[0]
    if slices[0].inputs[0].layers:
        layers = [layer for part in slices for layer in range(*(part.inputs[0].layers or (0, 0)))]
        before = next((config[key] for key in _LAYERS if key in config), None)
        for key, value in list(config.items()):
            if key in _LAYERS:
                config[key] = len(layers)
            elif isinstance(value, list) and len(value) == before and max(layers) < len(value):
                config[key] = [value[layer] for layer in layers]  # what each layer is
    return config

"""Adapters merged as adapters: any method on the changes that they make, and matrices of low rank of what comes out."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from merge import engine
from merge.adapters import LoraMatrix, lora_settings, matrices_in
from merge.donor import LazyTensor, tensors_in
from merge.donors import located
from merge.lora.adapter_writing import EMBEDDING, LINEAR, TURNED, AdapterPlan, MatrixJob
from merge.lora.low_rank import Change
from merge.merge_planning import TensorJob, jobs_of
from merge.merge_recipe import MergeRecipe, refuse_keys
from merge.parameters import check_names, method_of
from merge.tensor_files import UserError
from merge.tensor_group import RowReader

_NOTHING = "no change"  # the base, to methods that need one


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder, and its changes by module."""

    reference: str
    folder: Path
    settings: Mapping[str, Any]
    matrices: Mapping[str, LoraMatrix]


def opened(reference: str, stack: ExitStack) -> Adapter:
    folder = located(reference)
    settings = lora_settings(folder)
    matrices, whole = matrices_in(folder, settings, tensors_in(folder, stack, "adapter_model"))
    if whole:
        rule = "extract it with --linear-only, or merge it with its model, MODEL+ADAPTER"
        raise UserError(f"{folder}: it holds {min(whole)} as a whole; {rule}")
    if dora := [module for module, each in matrices.items() if each.length is not None]:
        raise UserError(f"{folder}: {dora[0]} is a DoRA, no change by itself; merge it with its model, MODEL+ADAPTER")
    return Adapter(reference, folder, settings, matrices)


def plan_adapters(recipe: MergeRecipe, adapters: Sequence[Adapter], rank: int, how: engine.MergeOptions) -> AdapterPlan:
    """A module that an adapter does not change, it changes by nothing. Without a rank it is the sum of theirs: enough
    for sums of any weights."""
    _refuse(recipe, adapters)
    shapes = {module: each.shape for adapter in adapters for module, each in adapter.matrices.items()}
    views = {adapter.reference: _view(adapter.matrices, shapes) for adapter in adapters}
    if method_of(recipe).base == "required" and not recipe.base_model:
        recipe = replace(recipe, base_model=_NOTHING)
        views[_NOTHING] = _view({}, shapes)
    notes = check_names(recipe)
    jobs = [_matrix(job, adapters, rank, how) for job in jobs_of(recipe, views)]
    bases = list(dict.fromkeys(str(each.settings.get("base_model_name_or_path") or "") for each in adapters))
    if len(bases) > 1:
        notes.append(f"the adapters are of different models: {', '.join(bases)}; the result is said to be of the first")
    return AdapterPlan(bases[0], jobs, notes=notes)


def _refuse(recipe: MergeRecipe, adapters: Sequence[Adapter]) -> None:
    keys = ("slices", "dtype", "out_dtype", "tokenizer", "chat_template")
    refuse_keys(recipe, keys, "says something of models; here adapters are merged")
    if len({bool(each.settings.get("fan_in_fan_out")) for each in adapters}) > 1:
        raise UserError("of these adapters some have fan_in_fan_out, some have not: they are of different models")
    seen: dict[str, tuple[Adapter, LoraMatrix]] = {}
    for adapter in adapters:
        for module, each in adapter.matrices.items():
            first, other = seen.setdefault(module, (adapter, each))
            if (other.shape, other.embedding) != (each.shape, each.embedding):
                shapes = f"{list(other.shape)} in {first.reference}, {list(each.shape)} in {adapter.reference}"
                raise UserError(f"{module} has different shapes: {shapes}")


def _view(matrices: Mapping[str, LoraMatrix], shapes: Mapping[str, tuple[int, int]]) -> dict[str, LazyTensor]:
    rows = {module: _rows(matrices.get(module), columns) for module, (_, columns) in shapes.items()}
    return {f"{module}.weight": LazyTensor(shape, torch.float32, rows[module]) for module, shape in shapes.items()}


def _rows(matrix: LoraMatrix | None, columns: int) -> RowReader:
    return matrix.rows if matrix else lambda begin, end: torch.zeros(end - begin, columns)


def _matrix(job: TensorJob, adapters: Sequence[Adapter], rank: int, how: engine.MergeOptions) -> MatrixJob:
    module = job.name.removesuffix(".weight")
    theirs = [each.matrices[module] for each in adapters if module in each.matrices]
    kind = TURNED if any(each.settings.get("fan_in_fan_out") for each in adapters) else LINEAR
    rows, columns = job.shape
    change = Change(job.name, (rows, columns), lambda: engine.merged(job, how))
    most = rank or sum(each.rank for each in theirs)
    return MatrixJob(module, change, most, EMBEDDING if theirs[0].embedding else kind)

"""What an adapter has to say so that a base and it are a fine-tuned model."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fleet.errors import first_line
from fleet.plain import some
from merge.donor import Donor, LazyTensor, tied, views_of
from merge.donors import parts_of
from merge.lora.adapter_writing import EMBEDDING, LINEAR, PREFIX, TURNED, AdapterPlan, MatrixJob
from merge.lora.low_rank import Change
from merge.model_configs import check_kinds
from merge.tensor_files import UserError
from merge.tensor_group import Group
from merge.tensor_names import is_embedding, is_head

_WHOLE = "whole"  # a kind of module of which adapters hold everything
Both = tuple[LazyTensor, LazyTensor]  # a tensor of the base, and what it has become


def plan_extraction(tuned: Donor, base: Donor, rank: int, linear_only: bool) -> AdapterPlan:
    """Linear layers and embeddings become matrices of this rank at most; all else that has changed is there as it is,
    unless only linear layers are wanted."""
    kinds, modules = module_kinds(base.config), _modules(base, tuned)
    if parts_of(base.reference)[1]:
        raise UserError(
            f"{base.reference}: an adapter says for which one model it is; write that one first: "
            f"python -m merge {base.reference} merged-model"
        )
    matrices, lost = list[MatrixJob](), list[str]()
    whole, saved = dict[str, LazyTensor](), list[str]()
    for module, tensors in modules.items():
        kind, changed = kinds.get(module, ""), {leaf for leaf, both in tensors.items() if differs(*both)}
        if not changed or (linear_only and (kind not in (LINEAR, TURNED) or is_head(f"{module}.weight"))):
            continue
        if not kind or (is_embedding(f"{module}.weight") and tied(base)):
            lost.append(module)
        elif kind == _WHOLE or len(tensors["weight"][0].shape) != 2:
            saved.append(module)
            whole |= {f"{PREFIX}{module}.{leaf}": new for leaf, (_, new) in tensors.items()}
        else:
            inside = ""
            if "weight" in changed:
                matrices.append(MatrixJob(module, _change(f"{module}.weight", tensors["weight"]), rank, kind))
                inside = ".base_layer"
            if "bias" in changed and not linear_only:
                whole[f"{PREFIX}{module}{inside}.bias"] = tensors["bias"][1]
    return AdapterPlan(base.reference, matrices, whole, saved, _notes(lost, tied(base)))


def _modules(base: Donor, tuned: Donor) -> dict[str, dict[str, Both]]:
    """Their tensors, by module and by what they are in it."""
    check_kinds([base, tuned], base)
    if tied(base) != tied(tuned):
        one, other = (base, tuned) if tied(base) else (tuned, base)
        raise UserError(f"the output head of {one.reference} is its embeddings, {other.reference} has one of its own")
    old, new = views_of([base, tuned])
    found: dict[str, dict[str, Both]] = {}
    for name in [*old, *(new.keys() - old.keys())]:
        if name not in old or name not in new:
            here, there = (base, tuned) if name in old else (tuned, base)
            raise UserError(f"{name} is missing in {there.reference}; {here.reference} has it")
        module, _, leaf = name.rpartition(".")
        found.setdefault(module, {})[leaf] = old[name], new[name]
    return found


def differs(old: LazyTensor, new: LazyTensor) -> bool:
    return old.shape != new.shape or any(bool(change.any()) for change in _changes(old, new))


def _changes(old: LazyTensor, new: LazyTensor) -> Iterator[Tensor]:
    return (change for _, (change,) in Group(old.shape, [new.read_rows], old.read_rows).changes())


def _change(name: str, both: Both) -> Change:
    old, new = both
    if old.shape != new.shape:
        rule = "; --linear-only leaves embeddings and heads out" if is_embedding(name) or is_head(name) else ""
        raise UserError(f"{name} has different shapes: {list(old.shape)} in the base, {list(new.shape)}{rule}")
    rows, columns = old.shape
    return Change(name, (rows, columns), lambda: _changes(old, new))


def _notes(lost: list[str], tied_head: bool) -> list[str]:
    if not lost:
        return []
    why = "the output head is the same matrix, and an adapter changes one of the two" if tied_head else ""
    why = why or "transformers has no such module, and PEFT no place for it"
    return [f"left out, though changed: {some(lost, 3)}: {why}"]


def module_kinds(config: Mapping[str, Any]) -> dict[str, str]:
    """Of the model that transformers makes by this configuration, without any weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:  # whatever a configuration and its class can come up with
        raise UserError(f"no language model by the base's config.json: {first_line(error)}") from None
    kinds = {torch.nn.Linear: LINEAR, Conv1D: TURNED, torch.nn.Embedding: EMBEDDING}
    found = {name: kinds.get(type(each), _WHOLE) for name, each in model.named_modules() if [*each.parameters(False)]}
    turned = TURNED in found.values()  # PEFT says of all layers of a model at once how they lie
    return {name: _WHOLE if turned and kind == LINEAR else kind for name, kind in found.items()}

"""A model with a PEFT adapter, merged while its rows are read."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merge.donor import Donor
from merge.files import UserError, read_json
from merge.patterns import Pattern
from merge.weights import Stored, changed

_PART = re.compile(
    r"^base_model\.model\.(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?$"
)
_MOST_PATTERNS = 4096  # a model has no more modules


def adapted(donor: Donor, folder: Path, adapter: Mapping[str, Stored]) -> Donor:
    """The model as `merge_and_unload` would leave it."""
    settings = _settings(folder)
    patterns = _patterns(settings, folder)
    parts: dict[str, dict[str, Tensor]] = {}
    tensors = dict(donor.tensors)
    for key, stored in adapter.items():
        if found := _PART.match(key):
            parts.setdefault(found["module"], {})[found["part"]] = stored.read().float()
        elif (name := key.removeprefix("base_model.model.").replace(".base_layer.", ".")) in tensors:
            _same_shape(folder, name, tensors[name].shape, stored.shape)
            tensors[name] = stored  # MODULES_TO_SAVE, and biases: whole
        else:
            raise UserError(f"{folder}: {key} belongs to no tensor of {donor.folder}")
    for module, part in parts.items():
        name = f"{module}.weight"
        if name not in tensors:
            raise UserError(f"{folder}: it adapts {module}, which {donor.folder} does not have")
        tensors[name] = _with(tensors[name], part, settings, patterns, module, folder)
    return replace(donor, tensors=tensors)


def _settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / "adapter_config.json")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{folder}: an adapter of the kind {settings.get('peft_type')}; only LoRA can be merged here")
    return settings


def _with(
    stored: Stored,
    part: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    patterns: Sequence[tuple[Pattern, Any]],
    module: str,
    folder: Path,
) -> Stored:
    """Rows of W + scale B A; of B A turned round where the weight stands the other way round."""
    embedding = "lora_embedding_A" in part
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if not all(name in part for name in names) or len(stored.shape) != 2:
        raise UserError(f"{folder}: {module}: a pair of matrices for a matrix is expected, not {', '.join(part)}")
    a, b = (part[name] for name in names)
    left, right = (a.T, b.T) if embedding or settings.get("fan_in_fan_out") else (b, a)
    _same_shape(folder, module, stored.shape, (left.shape[0], right.shape[1]))
    rank = a.shape[0]
    alpha = _alpha(patterns, module, settings.get("lora_alpha", rank), folder)
    if not rank:
        raise UserError(f"{folder}: {module}: matrices of rank 0")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    length = part.get("lora_magnitude_vector")
    if length is not None and (embedding or settings.get("fan_in_fan_out")):
        raise UserError(
            f"{folder}: {module}: DoRA of weights that stand the other way round cannot be merged row by row"
        )

    def rows(begin: int, end: int, weight: Tensor) -> Tensor:
        merged = torch.addmm(weight.float(), left[begin:end], right, alpha=scale)
        if length is None:
            return merged
        scaled: Tensor = merged * (length.flatten()[begin:end] / merged.norm(dim=1))[:, None]
        return scaled

    return changed(stored, rows)


def _alpha(patterns: Sequence[tuple[Pattern, Any]], module: str, default: Any, folder: Path) -> float:
    value = next((value for pattern, value in patterns if pattern.matches(module)), default)
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise UserError(f"{folder}: {module}: lora_alpha is {str(value)[:60]!r}; a number is expected")
    return float(value)


def _patterns(settings: Mapping[str, Any], folder: Path) -> list[tuple[Pattern, Any]]:
    """Of modules that have an alpha of their own; others' patterns, so not for `re`."""
    given = settings.get("alpha_pattern") or {}
    if not isinstance(given, dict) or len(given) > _MOST_PATTERNS:
        raise UserError(f"{folder}: an alpha_pattern of {{pattern: number}} is expected, of {_MOST_PATTERNS} at most")
    try:
        return [(Pattern(pattern), value) for pattern, value in given.items()]
    except UserError as error:
        raise UserError(f"{folder}/adapter_config.json: alpha_pattern: {error}") from None


def _same_shape(folder: Path, name: str, here: tuple[int, ...], there: tuple[int, ...]) -> None:
    if tuple(here) != tuple(there):
        raise UserError(f"{folder}: {name}: the adapter has {list(there)}, the model {list(here)}")

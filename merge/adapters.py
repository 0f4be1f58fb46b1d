"""PEFT's LoRA adapters: what their files say of each matrix, and models with their changes added."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merge.donor import Donor, LazyTensor, changed
from merge.json_files import read_json
from merge.tensor_files import UserError

_PART = re.compile(
    r"^base_model\.model\.(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?$"
)
_MOST_PATTERNS, _LONGEST = 4096, 512  # a model has no more modules
# What adapters say of modules' names: letters, . ^ $ |, escapes, (...), [...], and how often each of them may stand.
_UNDERSTOOD = re.compile(
    r"(?:(?:\\[dw\W]|[\w\-/ .^$|)]|\((?:\?:|(?!\?))|\[\^?(?:\\[dw\W]|[\w/ .]|-(?!-))+\])"
    r"(?:[*+?]\??)?)*"
)
_CLASSES = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}
_TAKEN_OFF = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the model's own matrices
Matcher = Callable[[str], bool]


@dataclass(frozen=True)
class LoraMatrix:
    """How an adapter changes a matrix: by scale * left @ right, as the weight lies in its file."""

    left: Tensor
    right: Tensor
    scale: float
    embedding: bool
    length: Tensor | None = None  # DoRA: each row of the result is brought to this length

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    def rows(self, begin: int, end: int) -> Tensor:
        return (self.left[begin:end] @ self.right).mul_(self.scale)

    def added(self, begin: int, end: int, weight: Tensor) -> Tensor:
        """To rows of the weight."""
        merged = torch.addmm(weight.float(), self.left[begin:end], self.right, alpha=self.scale)
        if self.length is None:
            return merged
        scaled: Tensor = merged * (self.length.flatten()[begin:end] / merged.norm(dim=1))[:, None]
        return scaled


def adapted(donor: Donor, folder: Path, adapter: Mapping[str, LazyTensor]) -> Donor:
    """The model as `merge_and_unload` would leave it."""
    tensors = dict(donor.tensors)
    for found in filter(None, map(_PART.match, adapter)):
        if f"{found['module']}.weight" not in tensors:
            raise UserError(f"{folder}: it adapts {found['module']}, which {donor.folder} does not have")
    matrices, whole = matrices_in(folder, lora_settings(folder), adapter)
    for key, stored in whole.items():
        if (name := key.removeprefix("base_model.model.").replace(".base_layer.", ".")) not in tensors:
            raise UserError(f"{folder}: {key} belongs to no tensor of {donor.folder}")
        _same_shape(folder, name, tensors[name].shape, stored.shape)
        tensors[name] = stored  # MODULES_TO_SAVE, and biases: whole
    for module, matrix in matrices.items():
        name = f"{module}.weight"
        if len(tensors[name].shape) != 2:
            raise UserError(f"{folder}: {module}: a pair of matrices, for a tensor of {list(tensors[name].shape)}")
        _same_shape(folder, module, tensors[name].shape, matrix.shape)
        tensors[name] = changed(tensors[name], matrix.added)
    return replace(donor, tensors=tensors, adapter=folder)


def lora_settings(folder: Path) -> dict[str, Any]:
    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"{folder} is no adapter: it has no adapter_config.json")
    settings = read_json(folder / "adapter_config.json")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{folder}: an adapter of the kind {settings.get('peft_type')}; only LoRA can be merged here")
    if str(began := settings.get("init_lora_weights")).lower().startswith(_TAKEN_OFF):
        raise UserError(
            f"{folder}: init_lora_weights is {str(began)[:40]!r}: it began as a part of the model, and belongs to what "
            "was left of that; save it by PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=...), "
            "or merge it where it was trained, by merge_and_unload"
        )
    return settings


def matrices_in(
    folder: Path, settings: Mapping[str, Any], adapter: Mapping[str, LazyTensor]
) -> tuple[dict[str, LoraMatrix], dict[str, LazyTensor]]:
    """By their modules; and what else is in the adapter's file, which is there as a whole."""
    patterns, whole = _patterns(settings, folder), dict[str, LazyTensor]()
    parts: dict[str, dict[str, Tensor]] = {}
    for key, stored in adapter.items():
        if found := _PART.match(key):
            parts.setdefault(found["module"], {})[found["part"]] = stored.read().float()
        else:
            whole[key] = stored
    return {module: _matrix(part, settings, patterns, module, folder) for module, part in parts.items()}, whole


def _matrix(
    part: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    patterns: Sequence[tuple[Matcher, Any]],
    module: str,
    folder: Path,
) -> LoraMatrix:
    embedding = "lora_embedding_A" in part
    names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    if not all(name in part and part[name].ndim == 2 for name in names):
        raise UserError(f"{folder}: {module}: a pair of matrices is expected, not {', '.join(part)}")
    a, b = (part[name] for name in names)
    if a.shape[0] != b.shape[1]:
        raise UserError(f"{folder}: {module}: a matrix of rank {a.shape[0]} beside one of rank {b.shape[1]}")
    turned = bool(settings.get("fan_in_fan_out"))  # the weight stands the other way round
    left, right = (a.T, b.T) if embedding or turned else (b, a)
    if not (rank := a.shape[0]):
        raise UserError(f"{folder}: {module}: matrices of rank 0")
    alpha = _alpha(patterns, module, settings.get("lora_alpha", rank), folder)
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    length = part.get("lora_magnitude_vector")
    if length is not None and (embedding or turned):
        raise UserError(
            f"{folder}: {module}: DoRA of weights that stand the other way round cannot be merged row by row"
        )
    return LoraMatrix(left, right, scale, embedding, length)


def _alpha(patterns: Sequence[tuple[Matcher, Any]], module: str, default: Any, folder: Path) -> float:
    value = next((value for matches, value in patterns if matches(module)), default)
    if type(value) not in (int, float) or not abs(value) < 1e9:
        raise UserError(f"{folder}: {module}: lora_alpha is {str(value)[:60]!r}; a number is expected")
    return float(value)


def _patterns(settings: Mapping[str, Any], folder: Path) -> list[tuple[Matcher, Any]]:
    """Of modules that have an alpha of their own."""
    given = settings.get("alpha_pattern") or {}
    if not isinstance(given, dict) or len(given) > _MOST_PATTERNS:
        raise UserError(f"{folder}: an alpha_pattern of {{pattern: number}} is expected, of {_MOST_PATTERNS} at most")
    try:
        return [(matcher(pattern), value) for pattern, value in given.items()]
    except UserError as error:
        raise UserError(f"{folder}/adapter_config.json: alpha_pattern: {error}") from None


def matcher(pattern: str) -> Matcher:
    """Of a module's name: of the whole of it, or of its end behind a dot, as PEFT has it. For a pattern that means harm
    `re` may take longer than anybody lives; Rust's, which pydantic brings, a time that grows with the name alone."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    known = re.sub(r"\\.", lambda escape: _CLASSES.get(escape[0], escape[0]), pattern)
    try:
        if len(pattern) <= _LONGEST and _UNDERSTOOD.fullmatch(pattern):
            return SchemaValidator(core_schema.str_schema(pattern=rf"^(.*\.)?({known})$")).isinstance_python
        why = f"a name of at most {_LONGEST} characters"
    except SchemaError as error:
        why = str(error).splitlines()[-1]
    raise UserError(
        f"the pattern {pattern[:80]!r} is not understood ({why}): names, "
        r". \. \d \w [...] (...) | * + ? ^ $ are, up to 512 characters; write the modules' names instead"
    )


def _same_shape(folder: Path, name: str, here: tuple[int, ...], there: tuple[int, ...]) -> None:
    if tuple(here) != tuple(there):
        raise UserError(f"{folder}: {name}: the adapter has {list(there)}, the model {list(here)}")

"""Models to merge, wherever they lie: opened by their references, with PEFT adapters merged into them."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fleet.errors import Lacking, from_home
from fleet.places import of_hub
from merge.donor import Donor, LazyTensor, changed, read_config, tensors_in
from merge.hub import fetched
from merge.tensor_files import UserError, read_json
from merge.tensor_names import stacks

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
Matcher = Callable[[str], bool]
T = TypeVar("T")


class Donors:
    """Opens models by their references; closes their files at the end. Some references may be mere names of models
    that lie in other places."""

    def __init__(self, places: Mapping[str, Path | str] | None = None) -> None:
        self.places = dict(places or {})
        self.stack, self._open = ExitStack(), dict[str, Donor]()
        self._known: dict[Any, Any] = {}

    def __enter__(self) -> "Donors":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __getitem__(self, reference: str) -> Donor:
        if reference not in self._open:
            self._open[reference] = self._opened(reference)
        return self._open[reference]

    def remembered(self, key: Any, find: Callable[[], T]) -> T:
        """What was found out about these models, for whoever plans many merges."""
        if key not in self._known:
            self._known[key] = find()
        found: T = self._known[key]
        return found

    def _opened(self, reference: str) -> Donor:
        model, adapter = _parts(str(self.places.get(reference, reference)))
        if model.endswith(".gguf"):
            from merge.gguf.reading import open_gguf

            donor = open_gguf(from_home(model), self.stack)
        else:
            folder = located(model)
            donor = Donor(model, folder, read_config(folder), tensors_in(folder, self.stack))
        _check_whole(donor)
        if adapter:
            where = located(adapter)
            donor = adapted(donor, where, tensors_in(where, self.stack, "adapter_model"))
        return replace(donor, reference=reference)


def _parts(reference: str) -> tuple[str, str]:
    """A model and its adapter; a + may also be part of a path."""
    places = [n for n, sign in enumerate(reference) if sign == "+"]
    for place in reversed([*places, len(reference)]):
        if from_home(reference[:place]).exists():
            return reference[:place], reference[place + 1 :]
    model, _, adapter = reference.partition("+")
    return model, adapter


def located(reference: str) -> Path:
    """The folder of a model: a local one, or one of the hub, which is fetched."""
    if (folder := from_home(reference)).is_dir():
        return folder
    name, _ = of_hub(reference)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or folder.exists():
        raise Lacking(f"{reference}: not a folder with a model, a .gguf file, or a hub id")
    return fetched(reference)


def _check_whole(donor: Donor) -> None:
    """Layers that the configuration promises and the files lack; where layers share weights there is just one."""
    promised, found = donor.layers, max((*map(len, stacks(donor.tensors).values()), 0))
    if promised is None:
        return
    for stack, numbers in stacks(donor.tensors).items():
        there = numbers & set(range(promised)) if promised < 1 << 20 else numbers
        if len(numbers) == found and 1 < len(there) < promised:
            raise UserError(f"{donor.folder}: {stack} has {len(there)} layers, its config.json says {promised}")


# -- adapters ----------------------------------------------------------------------------------------------------------


def adapted(donor: Donor, folder: Path, adapter: Mapping[str, LazyTensor]) -> Donor:
    """The model as `merge_and_unload` would leave it."""
    settings = read_json(folder / "adapter_config.json")
    if settings.get("peft_type") != "LORA":
        raise UserError(f"{folder}: an adapter of the kind {settings.get('peft_type')}; only LoRA can be merged here")
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


def _with(
    stored: LazyTensor,
    part: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    patterns: Sequence[tuple[Matcher, Any]],
    module: str,
    folder: Path,
) -> LazyTensor:
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

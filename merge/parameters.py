"""What a method is told about one tensor: filters and gradients resolved, numbers checked."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from merge.files import UserError
from merge.merge_recipe import Input, Merge, Setting, Settings, nearest
from merge.methods import IGNORED, METHODS, REQUIRED, MergeMethod, Param


def method_of(recipe: Merge) -> MergeMethod:
    if recipe.method not in METHODS:
        raise UserError(f"merge_method is {recipe.method!r}; {nearest(recipe.method, METHODS)}")
    return METHODS[recipe.method]


def resolved(
    recipe: Merge, of_slice: Settings, inputs: Sequence[Input], name: str, names: Sequence[str], t: float
) -> dict[str, Any]:
    """The parameters of a tensor; of those that each model has, one for each input. A source wins over its slice."""
    found: dict[str, Any] = {}
    for key, param in method_of(recipe).params.items():
        where = f"{recipe.method}: `{key}` of {name}"
        if not param.each:
            found[key] = _value(key, param, (of_slice, recipe.parameters), name, t, where)
            continue
        found[key] = tuple(
            _value(key, param, (one.parameters, of_slice, recipe.parameters), own, t, f"{where}, {one.model}")
            for one, own in zip(inputs, names, strict=True)
        )
    method_of(recipe).check(found)
    return found


def check_names(recipe: Merge) -> list[str]:
    """Unknown parameters are errors. In words, what stands in the recipe without effect."""
    method, notes = method_of(recipe), []
    places: list[tuple[str, Settings, bool | None]] = [("parameters", recipe.parameters, None)]
    for n, part in enumerate(recipe.slices):
        places.append((f"slices[{n}].parameters", part.parameters, None))
        base = part.base_model or recipe.base_model
        places += [(f"the parameters of {one.model}", one.parameters, one.model == base) for one in part.inputs]
    for where, settings, of_base in places:
        for key in settings:
            if key in IGNORED:
                notes.append(f"{where}: `{key}` has no effect here: masks need no memory of their own")
            elif key not in method.params:
                raise UserError(f"{where}: {recipe.method} has no parameter {key!r}; {nearest(key, method.params)}")
            elif of_base is not None and not method.params[key].each:
                raise UserError(
                    f"{where}: {key!r} is one value for all models; it belongs into the recipe's parameters"
                )
            elif of_base and method.base != "none":
                notes.append(f"{where}: `{key}` has no effect: it is the base")
    return list(dict.fromkeys(notes))


def chosen(setting: Setting, name: str, t: float) -> Any:
    """The value for a tensor that lies at t, from 0 to 1, in its slice; None where no filter fits."""
    values = next((values for part, values in setting if part in name), None)
    if values is None:
        return None
    place = t * (len(values) - 1)
    before = int(place)
    if any(isinstance(each, (bool, str)) for each in values):
        return values[before]
    after = min(len(values) - 1, before + 1)
    return (1 - (place - before)) * values[before] + (place - before) * values[after]


def _value(key: str, param: Param, settings: Iterable[Settings], name: str, t: float, where: str) -> Any:
    for each in settings:
        if key in each and (value := chosen(each[key], name, t)) is not None:
            return _checked(value, param, where)
    if param.default is REQUIRED:
        raise UserError(f"{where} is missing")
    return param.default


def _checked(value: Any, param: Param, where: str) -> Any:
    if param.kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{where} is {value!r}; true or false is expected")
        return value
    if isinstance(value, (bool, str)) or not math.isfinite(value):
        raise UserError(f"{where} is {value!r}; a number is expected")
    if param.kind is int and value != int(value):
        raise UserError(f"{where} is {value}; a whole number is expected")
    if (param.low is not None and value < param.low) or (param.high is not None and value > param.high):
        limits = f"from {param.low:g}" + (f" to {param.high:g}" if param.high is not None else " on")
        raise UserError(f"{where} is {value}; {limits} is possible")
    return param.kind(value)

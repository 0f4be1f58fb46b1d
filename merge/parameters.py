"""What a method is told about one tensor: filters and gradients resolved, numbers checked."""

from collections.abc import Iterable, Sequence
from typing import Any

from merge.files import Wrong
from merge.methods import IGNORED, METHODS, REQUIRED, Method, Param
from merge.recipe import Input, Merge, Setting, Settings, Slice, nearest


def method_of(recipe: Merge) -> Method:
    if recipe.method not in METHODS:
        raise Wrong(f"merge_method is {recipe.method!r}; {nearest(recipe.method, METHODS)}")
    return METHODS[recipe.method]


def resolved(
    recipe: Merge, part: Slice, inputs: Sequence[Input], name: str, names: Sequence[str], t: float
) -> dict[str, Any]:
    """The parameters of a tensor; of those that each model has, one for each input. A source wins over its slice."""
    found: dict[str, Any] = {}
    for key, param in method_of(recipe).params.items():
        where = f"{recipe.method}: `{key}` of {name}"
        if not param.each:
            found[key] = _value(key, param, (part.parameters, recipe.parameters), name, t, where)
            continue
        found[key] = tuple(
            _value(key, param, (one.parameters, part.parameters, recipe.parameters), own, t, f"{where}, {one.model}")
            for one, own in zip(inputs, names, strict=True)
        )
    method_of(recipe).check(found)
    return found


def check_names(recipe: Merge) -> list[str]:
    """Unknown parameters are errors. In words, what stands in the recipe without effect."""
    params, notes = method_of(recipe).params, []
    places = [("parameters", recipe.parameters, False)]
    for n, part in enumerate(recipe.slices):
        places.append((f"slices[{n}].parameters", part.parameters, False))
        places += [(f"the parameters of {one.model}", one.parameters, True) for one in part.inputs]
    for where, settings, of_one in places:
        for key in settings:
            if key in IGNORED:
                notes.append(f"{where}: `{key}` has no effect here: masks need no memory of their own")
            elif key not in params:
                raise Wrong(f"{where}: {recipe.method} has no parameter {key!r}; {nearest(key, params)}")
            elif of_one and not params[key].each:
                raise Wrong(f"{where}: {key!r} is one value for all models; it belongs into the recipe's parameters")
    return list(dict.fromkeys(notes))


def chosen(setting: Setting, name: str, t: float) -> Any:
    """The value for a tensor that lies at t, from 0 to 1, in its slice; None where no filter fits."""
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return setting
    if isinstance(setting[0], dict):
        fits = (each for each in setting if each.get("filter") in (None, "*") or each["filter"] in name)
        found = next(fits, None)
        return None if found is None else chosen(found["value"], name, t)
    values = [_number(each) for each in setting]
    place = t * (len(values) - 1)
    before = int(place)
    if any(isinstance(each, (bool, str)) for each in values):
        return values[before]
    after = min(len(values) - 1, before + 1)
    return (1 - (place - before)) * values[before] + (place - before) * values[after]


def _value(key: str, param: Param, settings: Iterable[Settings], name: str, t: float, where: str) -> Any:
    for each in settings:
        value = _number(chosen(each[key], name, t)) if key in each else None
        if value is not None:
            return _checked(value, param, where)
    if param.default is REQUIRED:
        raise Wrong(f"{where} is missing")
    return param.default


def _number(value: Any) -> Any:
    """YAML takes 1e-4 for text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _checked(value: Any, param: Param, where: str) -> Any:
    if param.kind is bool:
        if not isinstance(value, bool):
            raise Wrong(f"{where} is {value!r}; true or false is expected")
        return value
    if isinstance(value, (bool, str)) or value != value or value in (float("inf"), float("-inf")):
        raise Wrong(f"{where} is {value!r}; a number is expected")
    if param.kind is int and value != int(value):
        raise Wrong(f"{where} is {value}; a whole number is expected")
    if (param.low is not None and value < param.low) or (param.high is not None and value > param.high):
        limits = f"from {param.low:g}" + (f" to {param.high:g}" if param.high is not None else " on")
        raise Wrong(f"{where} is {value}; {limits} is possible")
    return param.kind(value)

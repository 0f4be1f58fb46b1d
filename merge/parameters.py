"""What a method is told about one tensor, filters and gradients resolved, numbers checked; and what evolution may tell
it: settings as recipes have them, brought to the nearest ones that every check lets pass, whatever the tensor, and with
which no number overflows. What is allowed stays as it is, to the bit."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleet.errors import UserError
from merge.layer_splits import part_at
from merge.merge_recipe import MergeInput, MergeRecipe, Piece, Setting, Settings, nearest, scalar_of, setting_of
from merge.methods import IGNORED, METHODS, REQUIRED, MergeMethod, Param
from merge.methods.checks import check_della, check_shares

Told = Mapping[str, Any]  # a value, a curve of values or filters for each parameter
_LEAST = 1e-6  # less is nothing
_MOST = 1e30  # with more, sums of fp32 numbers are infinite
_EDGE = 0.99  # of what a density leaves for an epsilon


def method_of(recipe: MergeRecipe) -> MergeMethod:
    if recipe.method not in METHODS:
        raise UserError(f"merge_method is {recipe.method!r}; {nearest(recipe.method, METHODS)}")
    return METHODS[recipe.method]


def resolved(
    recipe: MergeRecipe, of_slice: Settings, inputs: Sequence[MergeInput], name: str, names: Sequence[str], depth: float
) -> dict[str, Any]:
    """The parameters of a tensor; of those that each model has, one for each input. A source wins over its slice."""
    found: dict[str, Any] = {}
    for key, param in method_of(recipe).params.items():
        where = f"{recipe.method}: `{key}` of {name}"
        if param.each:
            found[key] = tuple(
                _value(key, param, (one.parameters, of_slice, recipe.parameters), own, depth, f"{where}, {one.model}")
                for one, own in zip(inputs, names, strict=True)
            )
        else:
            found[key] = _value(key, param, (of_slice, recipe.parameters), name, depth, where)
    method_of(recipe).check(found)
    return found


def check_names(recipe: MergeRecipe) -> list[str]:
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


def value_at(setting: Setting, name: str, depth: float) -> Any:
    """The value for a tensor that lies at a depth from 0 to 1 of its slice; None where no filter fits."""
    piece = next((each for each in setting if each.part in name), None)
    if piece is None:
        return None
    values = piece.values
    place = part_at(depth, piece.splits) if piece.splits else depth * (len(values) - 1)
    before = int(place)
    if any(isinstance(each, (bool, str)) for each in values):
        return values[before]
    if place == before:
        return float(values[before])  # whatever its neighbour is: zero times infinity is NaN
    after = min(len(values) - 1, before + 1)
    return (1 - (place - before)) * values[before] + (place - before) * values[after]


def _value(key: str, param: Param, settings: Iterable[Settings], name: str, depth: float, where: str) -> Any:
    for each in settings:
        if key in each and (value := value_at(each[key], name, depth)) is not None:
            return _checked(value, param, where)
    if param.default is REQUIRED:
        raise UserError(f"{where} is missing")
    return param.default


def _checked(value: Any, param: Param, where: str) -> Any:
    if param.kind is bool:
        if not isinstance(value, bool):
            raise UserError(f"{where} is {value!r}; true or false is expected")
        return value
    if isinstance(value, (bool, str)) or not abs(value) <= _MOST:
        raise UserError(f"{where} is {value!r}; a number is expected, of a size up to {_MOST:g}")
    if param.kind is int and value != int(value):
        raise UserError(f"{where} is {value}; a whole number is expected")
    if (param.low is not None and value < param.low) or (param.high is not None and value > param.high):
        limits = f"from {param.low:g}" + (f" to {param.high:g}" if param.high is not None else " on")
        raise UserError(f"{where} is {value}; {limits} is possible")
    return param.kind(value)


# -- what evolution may tell -------------------------------------------------------------------------------------------


def within(method: str, told: Sequence[Told], shared: Told | None = None) -> list[dict[str, Any]]:
    """For each model what it is told by itself; or for all of them together. `shared`: what all are told beside it."""
    params = METHODS[method].params
    found = [{key: _bounded(value, params.get(key)) for key, value in each.items()} for each in told]
    mend = MENDERS.get(METHODS[method].check)
    return mend(found, shared or {}, params) if mend else found


def _bounded(value: Any, param: Param | None) -> Any:
    """Each number of a setting between its limits."""
    if param is None or param.kind is bool:
        return value

    def clamped(x: float) -> float:
        low = -param.far if param.low is None else param.low
        high = param.far if param.high is None else param.high
        inside = min(high, max(low, x))
        inside = param.kind(round(inside)) if param.kind is int else inside
        return x if inside == x else inside

    return _mapped(value, clamped)


# -- relations between parameters: each check that a method has, and what mends it -------------------------------------


def _lifted(told: list[dict[str, Any]], shared: Told, params: Mapping[str, Param]) -> list[dict[str, Any]]:
    """Weights that are shares may not sum to nothing: where they do, they count by their size."""
    plain = {**{key: param.default for key, param in params.items()}, **shared, **(told[0] if told else {})}
    if not plain.get("normalize", plain.get("normalize_weights", True)) or any("weight" not in each for each in told):
        return told
    several = [_numbers(each["weight"]) for each in told]
    longest = max(map(len, several), default=0)
    if {len(each) for each in several} <= {1, longest}:
        totals = [math.fsum(each[n % len(each)] for each in several) for n in range(longest)]
        bad = [n for n, total in enumerate(totals) if abs(total) < _LEAST]
    else:  # curves of different lengths: it is enough that they can never meet at nothing
        bad = [*range(longest)] if math.fsum(map(min, several)) < _LEAST else []

    def lifted(each: Told) -> Any:
        numbers = _numbers(each["weight"])
        mended = [max(abs(x), _LEAST) if n in bad or (bad and len(numbers) == 1) else x for n, x in enumerate(numbers)]
        return _refilled(each["weight"], mended)

    return [{**each, "weight": lifted(each)} for each in told] if bad else told


def _narrowed(told: list[dict[str, Any]], shared: Told, params: Mapping[str, Param]) -> list[dict[str, Any]]:
    """Density - epsilon and density + epsilon lie between 0 and 1; between the points of their curves, too."""
    found = []
    for each in told:
        both = {**shared, **each}
        density, epsilon = (_pieces(both.get(key), params[key]) for key in ("density", "epsilon"))
        meet = [(piece.part, piece.splits) for piece in density] == [(piece.part, piece.splits) for piece in epsilon]
        kept = [piece.values for piece in density]
        least = min((_room(x) for values in kept if not _is_edge(values) for x in values), default=1.0)
        rooms = [tuple(map(_room, values)) for values in kept] if meet else [(least,)] * len(epsilon)
        if "epsilon" not in both:
            rooms = [(least,)]
        mended = [_under(piece.values, room) for piece, room in zip(epsilon, rooms, strict=True)]
        changed = mended != [piece.values for piece in epsilon]
        found.append({**each, "epsilon": _retold(both.get("epsilon"), mended)} if changed else each)
    return found


def _under(values: Sequence[float], rooms: Sequence[float]) -> tuple[float, ...]:
    """Between two points both curves are lines, and room has a hump: what fits at the points fits between them."""
    rooms = rooms if len(rooms) == len(values) else [min(rooms)] * len(values)
    return tuple(min(x, room) for x, room in zip(values, rooms, strict=True))


def _room(density: float) -> float:
    """For epsilon; next to the ends none is left that rounding would not take."""
    return min(_EDGE * density, _EDGE * (1 - density)) if _LEAST < density < 1 - _LEAST else 0.0


def _is_edge(values: Sequence[float]) -> bool:
    """All or nothing is kept: epsilon is not looked at."""
    return {*values} in ({0.0}, {1.0})


MENDERS: Mapping[Callable[[Told], None], Any] = {check_shares: _lifted, check_della: _narrowed}


# -- settings as recipes have them -------------------------------------------------------------------------------------


def _pieces(value: Any, param: Param) -> list[Piece]:
    """Filters with their values; where none of them fits, the default."""
    said = list(setting_of(value, "")) if value is not None else []
    return said if said and not said[-1].part else [*said, Piece("", (param.default,))]


def _retold(value: Any, pieces: Sequence[Sequence[float]]) -> Any:
    """A setting with other numbers; with one for all other tensors where it had none."""
    numbers = [x for piece in pieces for x in piece]
    if value is None:
        return numbers[0]
    there = len(_numbers(value))
    return _refilled(value, numbers) if there == len(numbers) else [*_refilled(value, numbers), {"value": numbers[-1]}]


def _numbers(value: Any) -> list[float]:
    found: list[float] = []

    def noted(x: float) -> float:
        found.append(x)
        return x

    _mapped(value, noted)
    return found


def _refilled(value: Any, numbers: Sequence[float]) -> Any:
    left: Iterator[float] = iter(numbers)
    return _mapped(value, lambda _: next(left))


def _mapped(value: Any, change: Callable[[float], float]) -> Any:
    """Of all numbers of a setting, in their order; split points are places, and no values."""
    if isinstance(value, Mapping):
        return {key: each if key != "value" else _mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(each, change) for each in value]
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return value
    if isinstance(value, str):  # 1e-4 is text in YAML
        x = scalar_of(value, "")
        return value if isinstance(x, str) or (y := change(x)) == x else y
    return change(value)

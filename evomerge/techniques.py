"""From a formula to recipes of the merge engine: one for each stage, the last one is the model. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from evomerge.formula import BLEND, Blend, Formula, Step
from merge.merge_recipe import alone

MERGED, MEAN = "merged", "mean-of-all"  # the last stage's name, and that of a base which nobody gave
ENGINE_METHODS = {"linear": "linear", "slerp": "slerp", "ties": "ties", "dare": "dare_linear"}  # of the merge engine
Recipes = dict[str, dict[str, Any]]


def recipes(formula: Formula, models: Mapping[str, str], base: str, dtype: str = "") -> Recipes:
    """By their names, in the order in which they are needed. Names stand where a recipe names a model."""
    found: Recipes = {}
    blend = formula.blend
    if isinstance(blend, str) and not formula.path:
        return {MERGED: _with_out_dtype(alone(models[blend]), dtype)}
    if isinstance(blend, Blend):
        last = _add_blend(blend, models, base, found)
        found["blend" if formula.path else MERGED] = found.pop(last)
    if formula.path:
        there = {**models, BLEND: "blend" if isinstance(blend, Blend) else models.get(str(blend), "")}
        found[MERGED] = {"merge_method": "passthrough", "slices": [*_slices(formula.path, there)]}
    found[MERGED] = _with_out_dtype(found[MERGED], dtype)
    return found


def _add_blend(blend: Blend, models: Mapping[str, str], base: str, found: Recipes) -> str:
    """Adds the recipes of a blend, and of the blends that it is made of; returns its name."""
    inputs = [models[each] if isinstance(each, str) else _add_blend(each, models, base, found) for each in blend.of]
    match blend.technique:
        case "linear":
            recipe: dict[str, Any] = {"merge_method": "linear", "models": _inputs(inputs, weight=blend.normed)}
        case "slerp":
            t = _scalar(blend.normed[1])
            listed = {"models": [{"model": name} for name in inputs], "parameters": {"t": t}}
            recipe = {"merge_method": "slerp", "base_model": inputs[0], **listed}
        case _:
            recipe = _of_task_vectors(blend, inputs, base or _mean(models, found))
    name = f"stage-{len(found) + 1}"
    found[name] = recipe
    return name


def _of_task_vectors(blend: Blend, inputs: Sequence[str], base: str) -> dict[str, Any]:
    """Of a base that all of them share. The base itself has not changed."""
    parameters = {"density": blend.density, "lambda": blend.strength}
    listed = [each for each in _inputs(inputs, weight=blend.normed) if each["model"] != base]
    method = ENGINE_METHODS[blend.technique]
    return {"merge_method": method, "base_model": base, "models": listed, "parameters": parameters}


def _mean(models: Mapping[str, str], found: Recipes) -> str:
    """Where nobody knows what the models were made from."""
    found.setdefault(MEAN, {"merge_method": "linear", "models": _inputs([*models.values()], [(1.0,)] * len(models))})
    return MEAN


def _slices(path: Sequence[Step], models: Mapping[str, str]) -> Sequence[dict[str, Any]]:
    """Steps that go on in the same model with the same scale are one slice."""
    runs: list[tuple[Step, int]] = []
    for step in path:
        if runs and (runs[-1][0].model, runs[-1][0].scale, runs[-1][1]) == (step.model, step.scale, step.layer):
            runs[-1] = (runs[-1][0], step.layer + 1)
        else:
            runs.append((step, step.layer + 1))
    scales = [{"parameters": {"residual": first.scale}} if first.scale != 1.0 else {} for first, _ in runs]
    return [
        {"sources": [{"model": models[first.model], "layer_range": [first.layer, end], **scale}]}
        for (first, end), scale in zip(runs, scales, strict=True)
    ]


def _inputs(names: Sequence[str], weight: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    return [{"model": name, "parameters": {"weight": _scalar(each)}} for name, each in zip(names, weight, strict=True)]


def _scalar(values: Sequence[float]) -> float | list[float]:
    return values[0] if len(set(values)) == 1 else list(values)


def _with_out_dtype(recipe: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {**recipe, "out_dtype": dtype} if dtype else recipe

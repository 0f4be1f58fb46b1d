"""How parents become one model, before it has learned anything: the merge engine's recipe."""

from collections.abc import Sequence
from typing import Any

from merge.methods import METHODS
from train.member import dna
from train.posttrain.posttrain_config import PosttrainConfig


def crossed(c: PosttrainConfig, parents: Sequence[str], genome: dna.Genome, base: str = "") -> dict[str, Any]:
    """The merge engine's recipe: CROSSOVER with its curves, or those of the genome. One parent stays what it is."""
    if len(parents) == 1:
        return {"merge_method": "passthrough", "models": [{"model": parents[0]}]}
    parameters, method = genome.get("crossover", c.curves), METHODS[c.crossover["method"]]
    recipe: dict[str, Any] = {"merge_method": c.crossover["method"]}
    if method.base == "required" and method.most == 1:
        return {**recipe, "base_model": parents[0], "models": [{"model": parents[1]}], "parameters": parameters}
    if "weight" in method.params and "weight" not in parameters:
        parameters = {**parameters, "weight": 1 / len(parents)}
    named = {"base_model": base} if c.base_model else {}
    return {**recipe, **named, "models": [{"model": each} for each in parents], "parameters": parameters}

"""What a merged model is made of: models blended in the space of weights, then a path through layers. Pure data."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from evomerge.config import ModelReference
from fleet.errors import UserError, refuse
from merge.json_files import read_json

FILE = "evomerge.json"  # beside a merged model's weights
_STEPS, _POINTS = 1024, 256  # of a path, of the shares of one model
MOST = 24  # models that a formula names; a merge of larger ones keeps their heavier parts
BLEND = ""  # in a path: the blend, instead of a model


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Blend(_Frozen):
    """Models, or blends of models, combined in the space of their weights."""

    technique: Literal["linear", "slerp", "ties", "dare"]
    of: tuple[Union[str, "Blend"], ...] = Field(min_length=2)
    shares: tuple[tuple[float, ...], ...]  # of each: values from the first to the last layer
    density: float = Field(1.0, gt=0, le=1)  # ties, dare: what is kept of their changes
    strength: float = 1.0  # ties, dare: what the changes are multiplied with

    @model_validator(mode="after")
    def _check(self) -> "Blend":
        counts = {len(each) for each in self.shares}
        refuse(
            [
                (
                    len(self.shares) != len(self.of) or len(counts) != 1 or counts == {0},
                    "each of the models needs shares, equally many",
                ),
                (max(counts, default=0) > _POINTS, f"at most {_POINTS} shares of a model are possible"),
                (
                    any(not 0 <= x <= 1e6 for each in self.shares for x in each),
                    "shares are numbers from 0 to a million",
                ),
                (any(sum(column) <= 0 for column in zip(*self.shares, strict=False)), "not all shares can be 0"),
                (self.technique == "slerp" and len(self.of) != 2, "slerp combines two"),
            ]
        )
        return self

    @property
    def normed(self) -> tuple[tuple[float, ...], ...]:
        """Shares that add up to 1."""
        sums = [sum(column) for column in zip(*self.shares, strict=True)]
        return tuple(tuple(x / total for x, total in zip(each, sums, strict=True)) for each in self.shares)


class Step(_Frozen):
    """A layer of a path."""

    model: str = BLEND
    layer: int = Field(ge=0)
    scale: float = 1.0  # of what the layer adds


class Formula(_Frozen):
    """A blend, then a path through its layers and those of the models; at least one of them."""

    blend: str | Blend | None = None
    path: tuple[Step, ...] = Field((), max_length=_STEPS)
    scaled: bool = False  # a path in data flow space: its steps have scales that may change
    noise: float = Field(0.0, ge=0)  # in parts of each tensor's spread
    seed: int = 0  # of the noise, and of which changes dare drops

    @model_validator(mode="after")
    def _check(self) -> "Formula":
        through = any(step.model == BLEND for step in self.path)
        refuse(
            [
                (self.blend is None and not self.path, "a blend or a path is needed"),
                (self.blend is None and through, "the path goes through a blend, and there is none"),
            ]
        )
        return self

    @property
    def models(self) -> list[str]:
        """All that it names."""
        of_path = [step.model for step in self.path if step.model != BLEND]
        return list(dict.fromkeys([*(leaves(self.blend) if self.blend is not None else []), *of_path]))

    def renamed(self, names: Mapping[str, str]) -> "Formula":
        path = tuple(step.model_copy(update={"model": names.get(step.model, step.model)}) for step in self.path)
        blend = _renamed(self.blend, names) if self.blend is not None else None
        return self.model_copy(update={"blend": blend, "path": path})

    def unscaled(self) -> "Formula":
        """Each step adds what it adds, or nothing."""
        path = tuple(step.model_copy(update={"scale": float(step.scale != 0)}) for step in self.path)
        return self.model_copy(update={"path": path})


def leaves(node: str | Blend) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        for each in node.of:
            yield from leaves(each)


def lighter(node: str | Blend, most: int) -> str | Blend:
    """A blend that names at most so many models: of a larger one, its heaviest part that is small enough."""
    while isinstance(node, Blend) and len([*leaves(node)]) > most:
        weights = [sum(each) for each in node.normed]
        node = node.of[weights.index(max(weights))]
    return node


def makeup(formula: Formula) -> dict[str, float]:
    """How much of each model is in it: shares of its layers, and of each layer's blend."""
    blend = _makeup(formula.blend) if formula.blend is not None else {}
    if not formula.path:
        return blend
    found: dict[str, float] = {}
    for step in formula.path:
        for name, share in (blend if step.model == BLEND else {step.model: 1.0}).items():
            found[name] = found.get(name, 0.0) + share / len(formula.path)
    return found


def in_words(formula: Formula) -> str:
    """Its techniques: slerp+ties+dfs."""
    parts, node = list[str](), formula.blend
    while isinstance(node, Blend):
        parts.insert(0, node.technique)
        node = next((each for each in node.of if isinstance(each, Blend)), None)
    path = ["dfs" if formula.scaled else "frankenmerge"] if formula.path else []
    return "+".join([*parts, *path, *(["noise"] if formula.noise else [])]) or "as it is"


def _makeup(node: str | Blend) -> dict[str, float]:
    if isinstance(node, str):
        return {node: 1.0}
    found: dict[str, float] = {}
    for part, shares in zip(node.of, node.normed, strict=True):
        for name, share in _makeup(part).items():
            found[name] = found.get(name, 0.0) + share * sum(shares) / len(shares)
    return found


def _renamed(node: str | Blend, names: Mapping[str, str]) -> str | Blend:
    if isinstance(node, str):
        return names.get(node, node)
    return node.model_copy(update={"of": tuple(_renamed(each, names) for each in node.of)})


# -- beside a model's weights -----------------------------------------------------------------------------------------


def text_of(formula: Formula, models: Mapping[str, str], base: str) -> str:
    """The formula with where its models are, so that the model can be made again, or mutated."""
    named = {name: models[name] for name in formula.models}
    record = {"formula": formula.model_dump(mode="json"), "models": named, "base": base}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def read(folder: Path) -> tuple[Formula, dict[str, str], str] | None:
    """What a folder says that its model was made of; nothing where it was not merged here."""
    if not (folder / FILE).is_file():
        return None
    value: dict[str, Any] = read_json(folder / FILE)
    try:
        models, formula = value["models"], Formula.model_validate(value["formula"])
        for name, path in models.items():
            ModelReference(name, path)
        if len([*leaves(formula.blend or "")]) > 4 * MOST:
            raise ValueError("its blend names too many models")
        if not isinstance(models, dict) or not {*formula.models} <= models.keys() or not isinstance(value["base"], str):
            raise ValueError("its models are not those of its formula")
        return formula, {str(name): str(path) for name, path in models.items()}, value["base"]
    except (KeyError, ValueError, AttributeError, ValidationError, RecursionError) as error:
        raise UserError(f"{folder / FILE}: not what a merge writes: {' '.join(str(error).split())[:200]}") from None

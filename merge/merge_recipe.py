"""What a merge is: mergekit's YAML, read strictly, as frozen records."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fleet.errors import UserError, refuse
from merge import strictyaml

LIMIT = 1 << 20
_MOST_LAYERS = 100_000
DTYPES = ("float32", "bfloat16", "float16")
# What mergekit knows besides: other kinds of merges, and what its own recipes hardly ever say.
_LACKING = (
    *("gate_mode", "experts", "shared_experts", "experts_per_token", "architecture"),  # mixtures of experts
    *("modules", "residual_weight", "override_architecture"),
)


class Piece(NamedTuple):
    """What holds for tensors in whose names `part` is: values that are spread over the layers; with split points, one
    before, between and behind them."""

    part: str
    values: tuple[Any, ...]
    splits: tuple[float, ...] = ()


Setting = tuple[Piece, ...]  # the first that fits counts
Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class MergeInput:
    """A model, or some of its layers, with what it is told by itself."""

    model: str
    layers: tuple[int, int] | None = None
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Slice:
    """Layers of the result that are made of the same layers of each input; `models:` is a slice of all layers."""

    inputs: tuple[MergeInput, ...]
    base_model: str | None = None
    parameters: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Token:
    """Where the embedding of a token comes from."""

    source: str | None = None  # a model; none: the usual rules
    kind: str = "model"  # or "zero", or "model_token": another token of that model
    token: str | None = None
    token_id: int | None = None
    force: bool = False  # also for models that know the token


@dataclass(frozen=True)
class TokenizerSettings:
    """Which tokenizer the result has."""

    source: str = "union"
    tokens: Mapping[str, Token] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None


@dataclass(frozen=True)
class MergeRecipe:
    method: str
    slices: tuple[Slice, ...]
    base_model: str | None = None
    parameters: Settings = field(default_factory=dict)
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer: TokenizerSettings | None = None
    chat_template: str | None = None
    text: str = ""  # the file that it stood in

    @property
    def models(self) -> list[str]:
        """All that it names, the base first."""
        bases = [self.base_model, *(each.base_model for each in self.slices)]
        inputs = [one.model for each in self.slices for one in each.inputs]
        return list(dict.fromkeys(name for name in [*bases, *inputs] if name))


def load(path: Path) -> MergeRecipe:
    try:
        return parse(strictyaml.read(path))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def parse(text: str) -> MergeRecipe:
    return merge_of(strictyaml.parse(text), text)


def merge_of(value: Any, text: str) -> MergeRecipe:
    """The recipe in a YAML file's data."""
    known = "merge_method models slices base_model parameters dtype out_dtype tokenizer_source tokenizer chat_template"
    given = fields(value, "the file", known)
    both = ", not both" if "models" in given else ""
    refuse(
        [
            (("models" in given) == ("slices" in given), f"one of `models` and `slices` is needed{both}"),
            (
                "tokenizer" in given and "tokenizer_source" in given,
                "`tokenizer` and `tokenizer_source` say the same; one of them is enough",
            ),
        ]
    )
    if "models" in given:
        slices: tuple[Slice, ...] = (Slice(_inputs(given["models"], "models", "model parameters")),)
    else:
        slices = tuple(_slice(each, f"slices[{n}]") for n, each in enumerate(_list(given["slices"], "slices")))
    return MergeRecipe(
        method=_text(given.get("merge_method"), "merge_method"),
        slices=slices,
        base_model=_model(given["base_model"], "base_model") if "base_model" in given else None,
        parameters=_settings(given.get("parameters"), "parameters"),
        dtype=_dtype(given, "dtype"),
        out_dtype=_dtype(given, "out_dtype"),
        tokenizer=_tokens(given),
        chat_template=_text(given["chat_template"], "chat_template") if "chat_template" in given else None,
        text=text,
    )


def refuse_keys(recipe: MergeRecipe, keys: Iterable[str], why: str) -> None:
    """What a recipe must not say where it stands."""
    said = {**vars(recipe), "slices": recipe.slices[0].inputs[0].layers}
    if given := next(filter(said.get, keys), None):
        raise UserError(f"`{given}` {why}")


def text_of(recipe: Mapping[str, Any]) -> str:
    """The recipe as a file: what `python -m merge` and others read."""
    return yaml.dump(dict(recipe), Dumper=_NoAliases, sort_keys=False, allow_unicode=True)


def alone(model: str, **more: str) -> dict[str, Any]:
    """The recipe of a model as it is; with a dtype in other numbers."""
    return {"merge_method": "passthrough", "models": [{"model": model}], **more}


class _NoAliases(yaml.SafeDumper):
    """No anchors: they are refused, here and elsewhere."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# -- its parts ---------------------------------------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str]) -> str:
    """In words, for messages."""
    known = list(known)
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.0)
    return f"the nearest known one is {near[0]} (known: {', '.join(known)})" if near else "none is known here"


def fields(value: Any, where: str, known: str) -> dict[str, Any]:
    """What is said in a block of `key: value` lines, if it is nothing unknown."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: `key: value` lines are expected, not {_short(value)}")
    for key in value:
        if key in _LACKING:
            raise UserError(f"{where}: mergekit's key {key!r} is not supported here; known: {', '.join(known.split())}")
        if key not in known.split():
            raise UserError(f"{where}: unknown key {_short(key)}; {nearest(key, known.split())}")
    return {key: each for key, each in value.items() if each is not None}


def _slice(value: Any, where: str) -> Slice:
    given = fields(value, where, "sources base_model parameters")
    inputs = _inputs(given.get("sources"), f"{where}.sources", "model layer_range parameters")
    if not all(one.layers for one in inputs):
        raise UserError(f"{where}: each source needs a layer_range, [first, behind the last]")
    if len({one.layers[1] - one.layers[0] for one in inputs if one.layers}) > 1:
        ranges = ", ".join(f"{one.model} {list(one.layers or ())}" for one in inputs)
        raise UserError(f"{where}: its sources have different numbers of layers: {ranges}")
    base = _model(given["base_model"], f"{where}.base_model") if "base_model" in given else None
    return Slice(inputs, base, _settings(given.get("parameters"), f"{where}.parameters"))


def _inputs(value: Any, where: str, known: str) -> tuple[MergeInput, ...]:
    found = []
    for n, each in enumerate(_list(value, where)):
        here = f"{where}[{n}]"
        given = fields({"model": each} if isinstance(each, str) else each, here, known)
        layers = _layers(given["layer_range"], f"{here}.layer_range") if "layer_range" in given else None
        parameters = _settings(given.get("parameters"), f"{here}.parameters")
        found.append(MergeInput(_model(given.get("model"), f"{here}.model"), layers, parameters))
    return tuple(found)


def _layers(value: Any, where: str) -> tuple[int, int]:
    whole = isinstance(value, list) and len(value) == 2 and all(type(each) is int for each in value)
    if not whole or not 0 <= value[0] < value[1] < _MOST_LAYERS:
        raise UserError(f"{where}: [first, behind the last] is expected, as in [0, 16], not {_short(value)}")
    return value[0], value[1]


def _tokens(given: Mapping[str, Any]) -> TokenizerSettings | None:
    if "tokenizer_source" in given:
        return TokenizerSettings(_text(given["tokenizer_source"], "tokenizer_source"))
    if "tokenizer" not in given:
        return None
    said = fields(given["tokenizer"], "tokenizer", "source tokens pad_to_multiple_of")
    each = said.get("tokens", {})
    if not isinstance(each, dict):
        raise UserError(f"tokenizer.tokens: `token: rule` lines are expected, not {_short(each)}")
    multiple = said.get("pad_to_multiple_of")
    if multiple is not None and (type(multiple) is not int or not 1 <= multiple <= LIMIT):
        raise UserError(
            f"tokenizer.pad_to_multiple_of: a whole number from 1 to {LIMIT} is expected, not {_short(multiple)}"
        )
    rules = {token: _token(rule, f"tokenizer.tokens[{token!r}]") for token, rule in each.items()}
    return TokenizerSettings(_text(said.get("source", "union"), "tokenizer.source"), rules, multiple)


def _token(value: Any, where: str) -> Token:
    given = fields(value, where, "source force")
    source, force = given.get("source"), given.get("force", False)
    if not isinstance(force, bool):
        raise UserError(f"{where}.force: true or false is expected, not {_short(force)}")
    if not isinstance(source, dict):
        return Token(None if source is None else _model(source, f"{where}.source"), force=force)
    said = fields(source, f"{where}.source", "kind model token token_id")
    if said.get("kind") == "zero" and len(said) == 1:
        return Token(kind="zero", force=force)
    if said.get("kind") != "model_token" or ("token" in said) == ("token_id" in said):
        example = "a model, {kind: zero}, or {kind: model_token, model: M, token: T} (or token_id: N)"
        raise UserError(f"{where}.source: {example} is expected, not {_short(source)}")
    model = _model(said.get("model"), f"{where}.source.model")
    token, number = said.get("token"), said.get("token_id")
    if not (isinstance(token, str) or type(number) is int and number >= 0):
        raise UserError(f"{where}.source: a token, or the number of one, is expected")
    return Token(model, "model_token", token, number, force)


def _settings(value: Any, where: str) -> Settings:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{where}: `parameter: value` lines are expected, not {_short(value)}")
    return {key: setting_of(each, f"{where}.{key}") for key, each in value.items() if each is not None}


def setting_of(value: Any, where: str) -> Setting:
    """Of a value, a list of values, a {filter, split, value}, or a list of these."""
    several = value if isinstance(value, list) else [value]
    if not several:
        raise UserError(f"{where}: an empty list says nothing")
    if not any(isinstance(each, dict) for each in several):
        return (Piece("", tuple(scalar_of(each, where) for each in several)),)
    found = []
    for n, each in enumerate(several):
        given = fields(each, f"{where}[{n}]", "filter split value")
        inner = given.get("value")
        if inner is None or isinstance(inner, dict):
            raise UserError(f"{where}[{n}]: a value, or a list of values, is expected")
        part = _text(given.get("filter", "*"), f"{where}[{n}].filter")
        for piece in setting_of(inner, f"{where}[{n}].value"):
            splits = _splits(given.get("split"), len(piece.values), f"{where}[{n}].split")
            found.append(Piece("" if part == "*" else part, piece.values, splits))
    return tuple(found)


def _splits(value: Any, count: int, where: str) -> tuple[float, ...]:
    if value is None:
        return ()
    found = [scalar_of(each, where) for each in (value if isinstance(value, list) else [value])]
    if not found:
        raise UserError(f"{where}: an empty list says nothing")
    if any(isinstance(each, (bool, str)) or not 0 <= each <= 1 for each in found):
        raise UserError(f"{where}: numbers from 0, the first layer, to 1, the last, are expected, not {_short(value)}")
    if count != len(found) + 1:
        raise UserError(f"{where}: values are one more than split points, here {len(found) + 1}, not {count}")
    return tuple(map(float, found))


def scalar_of(value: Any, where: str) -> bool | int | float | str:
    """YAML takes 1e-4 for text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    if not isinstance(value, (bool, int, float)) or (type(value) is int and abs(value) > 1 << 53):
        raise UserError(f"{where}: a number, or a list of numbers, is expected, not {_short(value)}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: a list is expected, `- model: ...`, not {_short(value)}")
    return value


def _model(value: Any, where: str) -> str:
    """A reference as text; mergekit also writes it as {model: {path: P}, lora: {path: L}}."""
    if isinstance(value, dict):
        given = fields(value, where, "model lora path revision")
        if "model" in given:
            return _model(given["model"], where) + (f"+{_model(given['lora'], where)}" if "lora" in given else "")
        return _text(given.get("path"), where) + (f"@{given['revision']}" if "revision" in given else "")
    return _text(value, where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise UserError(
            f"{where}: text is expected, not {_short(value)}" if value is not None else f"{where} is missing"
        )
    return value


def _dtype(given: Mapping[str, Any], key: str) -> str | None:
    name = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(str(given.get(key)), given.get(key))
    if name is not None and name not in DTYPES:
        raise UserError(f"{key} is {_short(name)}; {', '.join(DTYPES)} are possible (arithmetic is float32 always)")
    return name


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."

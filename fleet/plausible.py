"""Whether a foreign model's configuration can be meant: looked at before anything is built or counted by it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.errors import UserError

_DEEPEST = 32
# Of the first part that is in a key: the most that its number may be. Far beyond every model there is, and still built
# within a minute. Tokens' ids, frequencies and the like are no sizes.
_MOST = (
    *((part, 1 << 62) for part in ("token_id", "token_index", "layer_ids")),
    *((part, 1 << 40) for part in ("position", "length", "window", "context", "n_ctx", "theta", "seed")),
    ("vocab", 1 << 26),
    *((part, 1 << 24) for part in ("size", "dim", "embd", "embed", "d_model", "d_ff", "d_kv", "inner", "width")),
    *((part, 2048) for part in ("layer", "block", "depth")),
    ("expert", 1 << 14),
    ("head", 1 << 16),
    *((part, 1 << 20) for part in ("num_", "n_", "rank", "channels", "labels")),
)
_MOST_EXPERTS = 1 << 19  # of all layers


def check_config(config: Any, where: str) -> None:
    """An error for a model that nobody has, such as one of a thousand million layers."""
    most: dict[str, int] = {}
    for key, value, deep in _numbers(config, "", 0):
        if deep > _DEEPEST:
            raise UserError(f"{where}: nested too deeply; {_DEEPEST} levels are accepted")
        part, limit = next(((part, limit) for part, limit in _MOST if part in key), ("", 1 << 62))
        if abs(value) > limit:
            shown = value if abs(value) < 1 << 99 else "a number of many digits"
            raise UserError(f"{where}: {key[:60]} is {shown}; no model has more than {limit}")
        most[part] = max(most.get(part, 0), abs(value))
    if (experts := most.get("layer", 1) * most.get("expert", 1)) > _MOST_EXPERTS:
        raise UserError(f"{where}: its layers have {experts} experts in all; no model has more than {_MOST_EXPERTS}")


def check_config_in(folder: Path | str) -> None:
    """Of a folder's config.json, as far as it is one: what else is wrong with it is said by whoever reads it."""
    path = Path(folder) / "config.json"
    with contextlib.suppress(OSError, UnicodeDecodeError, json.JSONDecodeError):
        check_config(json.loads(path.read_bytes()), str(path))


def _numbers(value: Any, key: str, deep: int) -> Iterator[tuple[str, int, int]]:
    """All whole numbers, with the key that they stand at or under."""
    if deep > _DEEPEST:
        yield key, 0, deep
    elif isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _numbers(each, str(inner), deep + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _numbers(each, key, deep + 1)
    elif type(value) is int:
        yield key, value, deep

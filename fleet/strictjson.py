"""JSON as this project reads it: finite numbers, no key twice, bounded size and depth."""

import json
import math
from typing import Any

DEPTH = 20


class Bad(ValueError):
    """Text that is not the JSON we accept; says why."""


def parse(data: bytes, limit: int = 1 << 20) -> Any:
    if len(data) > limit:
        raise Bad(f"{len(data)} bytes, the limit is {limit}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_infinite, parse_float=_finite)
    except RecursionError:
        raise Bad(f"nested deeper than {DEPTH}") from None
    except UnicodeDecodeError as error:
        raise Bad(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise Bad(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise Bad(str(error)) from None
    if data.count(b"[") + data.count(b"{") > DEPTH and _deep(value):
        raise Bad(f"nested deeper than {DEPTH}")
    return value


def text(value: Any) -> str:
    """One line, keys in their own order, floats so that they read back as the same bits."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise Bad(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands there twice")
    return found


def _infinite(name: str) -> Any:
    raise Bad(f"{name} is not a finite number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _infinite(digits)


def _deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    return any(isinstance(inner, (dict, list)) for inner in level)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []

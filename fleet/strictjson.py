"""JSON as this project reads it: finite numbers, no key twice, bounded size and depth."""

import json
import math
from collections import Counter
from typing import Any

DEPTH = 20


class BadJson(ValueError):
    """Text that is not the JSON we accept; says why."""


def parse(data: bytes, limit: int = 1 << 20) -> Any:
    if len(data) > limit:
        raise BadJson(f"longer than {limit} bytes")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_infinite, parse_float=_finite)
    except RecursionError:
        raise BadJson(f"nested deeper than {DEPTH}") from None
    except UnicodeDecodeError as error:
        raise BadJson(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        comment = error.doc.startswith(("//", "/*", "#"), error.pos)
        why = "comments are not supported" if comment else error.msg
        raise BadJson(f"line {error.lineno}, column {error.colno}: {why}") from None
    except BadJson:
        raise
    except ValueError:
        raise BadJson("a whole number of more than 4300 digits") from None
    if data.count(b"[") + data.count(b"{") > DEPTH and _deep(value):
        raise BadJson(f"nested deeper than {DEPTH}")
    return value


def text(value: Any) -> str:
    """One line, keys in their own order, floats so that they read back as the same bits."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise BadJson(f"the key {key[:60]!r} stands there twice")
    return found


def _infinite(name: str) -> Any:
    raise BadJson(f"{name} is not a finite number")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _infinite(digits[:60])


def _deep(value: Any) -> bool:
    """Whether something is left below so many levels."""
    level = [value]
    for _ in range(DEPTH):
        insides = (each.values() if isinstance(each, dict) else each for each in level)
        if not (level := [each for inside in insides for each in inside if isinstance(each, dict | list)]):
            return False
    return True

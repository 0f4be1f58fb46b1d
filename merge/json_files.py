"""JSON files of models: read as the object that is expected, and written as people read them. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.errors import UserError

_LIMIT = 100_000_000  # bytes


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of some model's; or in one line, why there is none."""
    try:
        with path.open("rb") as file:
            data = file.read(_LIMIT + 1)
        value = json.loads(data.decode()) if len(data) <= _LIMIT else None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: an object of at most {_LIMIT} bytes is expected, {{...}}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

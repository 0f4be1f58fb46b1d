"""Whether a foreign model's configuration can be meant, and its tokenizer.json be used without harm: looked at before
anything is built or counted by them."""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.errors import UserError

_DEEPEST = 32
_LARGEST = 200_000_000  # bytes of a tokenizer.json
_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")  # of it, that have patterns
_MOST_ID = 1 << 26
_MOST_GROWTH = 256  # letters that a normalizer makes of one
_LONGEST = 4096  # letters of a pattern
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
    for key, value in _inside(config, where):
        if type(value) is not int:
            continue
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


def _inside(value: Any, where: str, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Itself and all that it holds, each with the key that it stands at or under."""
    if depth > _DEEPEST:
        raise UserError(f"{where}: nested too deeply; {_DEEPEST} levels are accepted")
    yield key, value
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _inside(each, where, str(inner), depth + 1)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _inside(each, where, key, depth + 1)


def check_words_in(folder: Path | str) -> None:
    """Of a folder, if it has one."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        return
    if path.stat().st_size > _LARGEST:
        raise UserError(f"{path}: longer than {_LARGEST} bytes")
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error or 'nested too deeply'}") from None
    check_words(value, str(path))


def check_words(file: Any, where: str) -> None:
    """Patterns that take for ever, texts that grow without end, tokens with numbers that no embedding has."""
    if not isinstance(file, Mapping):
        raise UserError(f"{where}: an object is expected")
    growth = 1.0
    for _, step in _inside([file.get(part) for part in _PARTS], where):
        if not isinstance(step, Mapping):
            continue
        pattern = step.get("pattern")
        if isinstance(pattern, Mapping) and isinstance(regex := pattern.get("Regex"), str):
            if why := endless(regex):
                raise UserError(f"{where}: the pattern {regex[:80]!r} {why}: it could take for ever on some text")
        if isinstance(content := step.get("content"), str) and step.get("type") == "Replace":
            given = pattern.get("String", "") if isinstance(pattern, Mapping) else ""
            growth *= max(1.0, len(content) / max(1, len(given)))
    if growth > _MOST_GROWTH:
        raise UserError(f"{where}: its normalizer makes {growth:.0f} letters of one; {_MOST_GROWTH} are accepted")
    _check_numbers(file, where)


def _check_numbers(file: Mapping[str, Any], where: str) -> None:
    model = file.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    added = [each for each in file.get("added_tokens") or () if isinstance(each, Mapping)]
    pairs = [*vocabulary.items()] if isinstance(vocabulary, Mapping) else []
    pairs += [(each.get("content"), each.get("id")) for each in added]
    for token, number in pairs:
        if type(number) is not int or not 0 <= number < _MOST_ID:
            raise UserError(f"{where}: the token {str(token)[:40]!r} has the number {str(number)[:30]}")


_TIMES = {"*": (0, math.inf), "+": (1, math.inf), "?": (0, 1.0)}
_PART = re.compile(
    r"(?P<back>\\[1-9kg])|\\[pPxu]\{[^{}\[\]()]*\}|\\.?|(?P<letters>\[\^?\]?)|(?P<end>\])"
    r"|(?P<open>\((?:\?[a-zA-Z<>=!-]*:?)?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<times>[*+?]|\{(?P<least>[0-9]*)(?:,(?P<most>[0-9]*))?\})[?+]?|.",
    re.DOTALL,
)


def endless(regex: str) -> str:
    """What of a pattern makes a search without end possible: a repeated part that itself may be of several lengths.

    `(a+)+` may cut a text in more ways than anybody can try; `(?:abc)+` and `a+b*` cannot.
    """
    if len(regex) > _LONGEST:
        return f"is longer than {_LONGEST} letters"
    groups, closed = [False], False  # of each open group, and the part just read, whether it may be of several lengths
    depth = 0  # of [...], in which there may be others
    for part in _PART.finditer(regex):
        kind, before, closed = part.lastgroup, closed, False
        if depth or kind == "letters":
            depth += (kind == "letters") - (kind == "end")
        elif kind == "back":
            return "refers to what it has found"
        elif kind == "open":
            groups.append(False)
        elif kind == "close" and len(groups) > 1:
            closed = groups.pop()
            groups[-1] |= closed
        elif kind == "or":
            groups[-1] = True
        elif kind == "times":
            least, most = _times(part)
            if before and most > 1:
                return "repeats what may be of several lengths"
            groups[-1] |= least != most
    return ""


def _times(part: re.Match[str]) -> tuple[int, float]:
    """How often what stands before it is repeated, at least and at most."""
    if part["least"] is None:
        return _TIMES[part["times"]]
    most = part["least"] if part["most"] is None else part["most"]
    return int(part["least"] or 0), float(most or "inf")

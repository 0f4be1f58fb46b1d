"""Whether a foreign tokenizer.json can be used without harm: looked at before the tokenizer is built."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.errors import UserError

_LARGEST = 200_000_000  # bytes of a tokenizer.json
_MOST_ID = 1 << 26
_MOST_GROWTH = 256  # letters that a normalizer makes of one
_LONGEST = 4096  # letters of a pattern
_DEEPEST = 32


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
    for step in _steps(
        [file.get(part) for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder")], where
    ):
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


def _steps(value: Any, where: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    if depth > _DEEPEST:
        raise UserError(f"{where}: nested too deeply")
    if isinstance(value, Mapping):
        yield value
    if isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _steps(each, where, depth + 1)


def _check_numbers(file: Mapping[str, Any], where: str) -> None:
    model = file.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    added = [each for each in file.get("added_tokens") or () if isinstance(each, Mapping)]
    pairs = [*vocabulary.items()] if isinstance(vocabulary, Mapping) else []
    pairs += [(each.get("content"), each.get("id")) for each in added]
    for token, number in pairs:
        if type(number) is not int or not 0 <= number < _MOST_ID:
            raise UserError(f"{where}: the token {str(token)[:40]!r} has the number {str(number)[:30]}")


def endless(regex: str) -> str:
    """What of a pattern makes a search without end possible: a repeated part that itself may be of several lengths.

    `(a+)+` may cut a text in more ways than anybody can try; `(?:abc)+` and `a+b*` cannot.
    """
    if len(regex) > _LONGEST:
        return f"is longer than {_LONGEST} letters"
    open_groups, at = [False], 0  # of each group whether it may be of several lengths
    closed: bool | None = None  # of the part just read, if it was a group
    while at < len(regex):
        letter, before, closed = regex[at], closed, None
        if letter == "\\":
            if regex[at + 1 : at + 2] in [*"123456789kg"]:
                return "refers to what it has found"
            at += 2
            if regex[at - 1] in "pPxu" and regex[at : at + 1] == "{":
                at = regex.find("}", at) + 1 or len(regex)
            continue
        if letter == "[":
            at = _behind_letters(regex, at)
            continue
        if letter == "(":
            open_groups.append(False)
            if regex.startswith("(?", at):  # what kind of group it is
                at = next((n for n in range(at + 2, len(regex)) if not (regex[n].isalpha() or regex[n] in "-<>=!")), at)
                at += regex[at : at + 1] == ":"
                continue
        elif letter == ")" and len(open_groups) > 1:
            closed = open_groups.pop()
            open_groups[-1] = open_groups[-1] or closed
        elif letter == "|":
            open_groups[-1] = True
        elif letter in "*+?{":
            least, most, at = _times(regex, at)
            if before and most > 1:
                return "repeats what may be of several lengths"
            open_groups[-1] = open_groups[-1] or least != most
            continue
        at += 1
    return ""


def _behind_letters(regex: str, at: int) -> int:
    """Behind [...], in which there may be others, and escapes."""
    depth, at = 1, at + 1
    at += regex.startswith("^", at)
    at += regex.startswith("]", at)
    while at < len(regex) and depth:
        if regex[at] == "\\":
            at += 1
        depth += (regex[at : at + 1] == "[") - (regex[at : at + 1] == "]") if regex[at - 1] != "\\" else 0
        at += 1
    return at


def _times(regex: str, at: int) -> tuple[int, float, int]:
    """How often a part is repeated, and where that ends."""
    sign, end = regex[at], at + 1
    least, most = {"*": (0, float("inf")), "+": (1, float("inf")), "?": (0, 1.0)}.get(sign, (1, 1.0))
    if sign == "{":
        close = regex.find("}", at)
        said = regex[at + 1 : close].split(",") if close > 0 else []
        if not said or len(said) > 2 or not all(part.isdigit() or not part for part in said):
            return 1, 1.0, end  # a brace that means itself
        end, least = close + 1, int(said[0] or 0)
        most = float(said[-1] or "inf")
    end += regex[end : end + 1] in ("?", "+")
    return least, most, end

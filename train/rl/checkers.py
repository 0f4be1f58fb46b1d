"""Whether an answer is right, by what is expected: named terms from 0 to 1. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.run_config import UserError
from fleet.untrusted_model import endless
from train.rl.rl_config import CORRECT
from train.splits import normal
from train.text_sources import Row, prompt_of

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_CLOSE = 1e-6  # of numbers, relative
EXPECTED = '{"prompt": ..., "answer": ...}, perhaps with "checker": "exact", "numeric", "regex" or "choice"'
Terms = dict[str, float]


@dataclass(frozen=True)
class Said:
    """A model's answer: its text, its tokens, each one's log-probability, and whether it came to an end by itself."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    ended: bool


def terms_of(row: Row, said: Said, longest: int) -> Terms:
    """What is right, whether it is an answer of the expected kind and nothing else, and how short it is."""
    right, formed = CHECKERS[row["checker"]](said.text.strip(), row)
    brief = 1 - len(said.tokens) / longest
    return {CORRECT: float(right), "format": float(formed and said.ended), "brief": brief}


def _exact(said: str, row: Row) -> tuple[bool, bool]:
    right = normal(said) == normal(row["answer"])
    return right, bool(said)


def _numeric(said: str, row: Row) -> tuple[bool, bool]:
    """The last number counts, as where an answer comes after thoughts."""
    found, wanted = _NUMBER.findall(said), _number(row["answer"])
    right = bool(found) and abs(_number(found[-1]) - wanted) <= _CLOSE * max(1.0, abs(wanted))
    return right, bool(_NUMBER.fullmatch(said))


def _regex(said: str, row: Row) -> tuple[bool, bool]:
    return re.search(row["answer"], said) is not None, bool(said)


def _choice(said: str, row: Row) -> tuple[bool, bool]:
    """Exactly one of the choices must be named, and not only within a longer one."""
    words, wanted, choices = normal(said), normal(row["answer"]), {*map(normal, row["choices"])}
    if words in choices:
        return words == wanted, True
    there = [
        (choice, *each.span())
        for choice in choices
        for each in re.finditer(rf"(?<!\w){re.escape(choice)}(?!\w)", words)
    ]
    named = {
        choice
        for choice, begin, end in there
        if not any(a <= begin and end <= b and b - a > end - begin for _, a, b in there)
    }
    return named == {wanted}, False


CHECKERS: Mapping[str, Callable[[str, Row], tuple[bool, bool]]] = {
    "exact": _exact,
    "numeric": _numeric,
    "regex": _regex,
    "choice": _choice,
}


def checked_question(row: Any) -> Row:
    """The row with only what a checker needs; refuses what no checker can judge. A checker's further fields have to be
    copied here."""
    if not isinstance(row, Mapping) or (prompt := prompt_of(row)) is None or row.get("answer") is None:
        raise UserError(f"{EXPECTED} is expected")
    checker, answer = row.get("checker") or "exact", str(row["answer"])
    if checker not in CHECKERS:
        raise UserError(f"there is no checker {checker!r}; there are {', '.join(CHECKERS)}")
    found: dict[str, Any] = {"prompt": prompt, "answer": answer, "checker": checker}
    if checker == "numeric" and not _NUMBER.fullmatch(answer.strip()):
        raise UserError(f"the checker is numeric, and the answer {answer!r} no number")
    if checker == "regex":
        _check_pattern(answer)
    if checker == "choice":
        found["choices"] = [str(each) for each in row.get("choices") or ()]
        if answer not in found["choices"]:
            raise UserError(f'the checker is choice: "choices" must be a list with the answer {answer!r} in it')
    return found


def whole_question(row: Any) -> Row:
    """The same with all else that JSON can say: a verifier of the user's own may look at anything."""
    found = checked_question(row)
    return {**{str(key): each for key, each in row.items() if _is_plain(each)}, **found}


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise UserError(f"the pattern {pattern!r} is none: {error}") from None
    if why := endless(pattern):
        raise UserError(f"the pattern {pattern!r} {why}: it could take for ever on some answer")

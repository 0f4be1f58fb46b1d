"""The error of whatever people can set right; by itself, so that nobody waits for pydantic to know it."""

from collections.abc import Iterator
from pathlib import Path


class UserError(ValueError):
    """What was given cannot be used; says where, what was seen, what is allowed and what to do."""


class Lacking(UserError):
    """This machine has not got what is needed (a file, a package, a GPU, room); another one may have it."""


def absolute(path: Path) -> Path:
    """From the user's home on, and through all links; or why it leads nowhere."""
    try:
        return path.expanduser().resolve()
    except (RuntimeError, OSError) as error:  # links in a circle; nobody knows where this user is at home
        raise UserError(f"{path}: no such place: {getattr(error, 'strerror', None) or error}") from None


def first_line(error: BaseException) -> str:
    """What a stranger's error says, in a line; of an error that says nothing, what it is called."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def cut(text: str, most: int = 20_000) -> str:
    """A text for people: of one that nobody could read to its end, the beginning, and how much there was."""
    return text if len(text) <= most else f"{text[:most]} ... and {len(text) - most:,} more characters"


def behind(error: BaseException) -> Iterator[BaseException]:
    """An error, and what it came of, though it may not show that: the latest first."""
    seen, each = set[int](), error
    while each is not None and id(each) not in seen:
        yield each
        seen.add(id(each))
        each = each.__cause__ or each.__context__  # type: ignore[assignment]

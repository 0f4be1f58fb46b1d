"""The command line of every search: it starts one or goes on with it, and the same module is also its workers."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import App, Group, Parameter
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fleet import faults
from fleet.method import Method
from fleet.permissions import keep_private
from fleet.places import address, here, in_bucket
from fleet.plain import say
from fleet.run_config import UserError
from fleet.start import main as fleet_main

Names = str | Sequence[str] | None
_WORKER = ("--worker", "--forkserver", "--make", "--look", "--sink", "--follow", "--join")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def run(app: App, method: Callable[[], Method[Any]] | None = None, arguments: Sequence[str] | None = None) -> None:
    """The method is imported by whoever works; what is only asked for --help waits for no torch."""
    if method and any(word in _WORKER for word in sys.argv[1:]):
        return fleet_main(method())  # which ends this process
    keep_private()
    try:
        sys.exit(app(arguments, result_action="return_value"))
    except (UserError, faults.Fault, OSError) as error:
        say(in_words(error), file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


def in_words(error: BaseException) -> str:
    """What can be expected to go wrong says what to do; the system's own errors say of which file they are."""
    if not isinstance(error, OSError):
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def folder_named(path: Path | str, option: str) -> Path:
    """Where a search is, or will be. Nothing is made yet."""
    where = here(Path(path))
    if not _NAME.fullmatch(where.name) or where.is_file():
        raise UserError(
            f"{option} {address(where)}: a folder is expected; "
            "the folder's name has up to 64 letters, digits, '.', '-', '_'"
        )
    if not in_bucket(where) and not where.exists():
        there = next(each for each in where.parents if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "Permission denied" if there.is_dir() else "Not a directory"
            raise UserError(f"{option} {where}: cannot be made in {there}: {why}")
    return where


def make_parents(where: Path, option: str) -> None:
    """Once all else is known to be right; in a bucket there are only names."""
    if in_bucket(where):
        return
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option} {where}: cannot be made: {error.strerror}") from None


# -- options that are keys of a configuration --------------------------------------------------------------------------


def flags(groups: Mapping[Group, Mapping[str, Names]], *sections: type[BaseModel]) -> Any:
    """A class of options for keys whose sections say what they are, and check them; with other names than theirs where
    some are told. What nobody gives is None."""
    known = {key: field for section in sections for key, field in section.model_fields.items()}
    keys = [(key, group, names) for group, each in groups.items() for key, names in each.items()]
    fields = [(key, _flag(known[key], group, names), None) for key, group, names in keys]
    made = make_dataclass("Flags", fields, frozen=True)
    made.__module__ = __name__  # or cyclopts takes it for one of Python's own
    return Parameter(name="*")(made)


def _flag(field: FieldInfo, group: Group, names: Names) -> Any:
    default, negative = field.default, None if field.default is True else ""
    shown = (lambda _: default) if default and isinstance(default, (int, float, str)) else False
    about = Parameter(name=names, group=group, help=field.description, negative=negative, show_default=shown)
    return Annotated[_kind(field.annotation) | None, about]


def _kind(told: Any) -> Any:
    """Records, and one of several words, are read and checked by their section alone."""
    records = any(isinstance(each, type) and issubclass(each, BaseModel) for each in (told, *get_args(told)))
    return str if records or get_origin(told) is Literal else told


def given(flags: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(flags).items() if value is not None}

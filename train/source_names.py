"""What a source of text is called, looked at before the hub is asked for it, which takes a while."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from fleet.plain import say
from fleet.run_config import UserError
from train.text_sources import FILES, SOURCE_KINDS

_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_NEAR = 0.8  # how alike two names are of which one is most likely meant to be the other
_KINDS = tuple(pattern for pattern in SOURCE_KINDS if pattern != "*")


def check(names: Iterable[str], where: Path, kinds: tuple[str, ...] = _KINDS) -> None:
    """Refuse what the hub cannot have, and what looks like something that is here, seen from a folder."""
    built_in = [kind for kind in kinds if "*" not in kind]
    for name in names:
        if any(fnmatchcase(name, kind) for kind in kinds) or name.endswith(FILES) or os.path.exists(name):
            continue
        if not _HUB.fullmatch(name):
            raise UserError(f"dataset {name}: no such file or folder, and no name that the hub can have")
        alike = difflib.get_close_matches(name, [*built_in, *_beside(name, where)], n=1, cutoff=_NEAR)
        if alike and (alike[0] in built_in or Path(name).suffix):  # whatever else may be a dataset beside another one
            raise UserError(f"dataset {name}: there is none; is {alike[0]} meant?")
        meant = f" (or is {alike[0]} meant?)" if alike else ""
        say(f"Dataset {name}: no file of that name is here, so the hub is asked for it{meant}.")


def _beside(name: str, where: Path) -> Iterator[str]:
    """What lies where it would lie."""
    with contextlib.suppress(OSError):
        yield from (str(Path(name).parent / each.name) for each in (where / name).parent.iterdir())

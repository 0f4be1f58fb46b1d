"""How a command of training ends, be it one process or one of several ranks."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NoReturn

from cyclopts import App

from fleet import busy_notice, faults
from fleet.errors import UserError
from fleet.plain import say


class Agreed(UserError):
    """All ranks know of it, and raise it; one of them says it."""


def loading(what: str) -> AbstractContextManager[None]:
    """Said by one of all ranks."""
    return busy_notice.loading(what, partial(say, file=sys.stderr) if _speaks() else None)


def run(
    app: App,
    words: Sequence[str] | None = None,
    interrupted: str = "",
    said: tuple[type[BaseException], ...] = (UserError, faults.Fault),
) -> NoReturn:
    """0 or what the command returns; 2: an error that is said in a line; 130: interrupted."""
    try:
        sys.exit(app(words, result_action="return_value"))
    except KeyboardInterrupt:
        if interrupted:
            say(interrupted, file=sys.stderr)
        sys.exit(130)
    except said as error:
        if not isinstance(error, Agreed) or _speaks():
            say(error, file=sys.stderr)
        sys.exit(2)


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"

"""Commands of one function: `python -m fleet.status RUN_DIR` and its like."""

import sys
from collections.abc import Callable
from typing import Any

from cyclopts import App

from fleet import faults
from fleet.errors import UserError
from fleet.plain import say


def command(module: str, function: Callable[..., Any]) -> None:
    """A function as a command: its docstring is the help, and what is wrong with a run is said in a line."""
    try:
        App(name=f"python -m {module}", help=function.__doc__, version_flags=[], default_command=function)()
    except (UserError, faults.Fault) as error:
        say(error, file=sys.stderr)
        raise SystemExit(2) from None

"""Commands of one function: `python -m fleet.status RUN_DIR` and its like."""

import sys
from collections.abc import Callable
from typing import Any

from fleet import faults
from fleet.errors import UserError
from fleet.help_pages import app
from fleet.plain import say


def command(module: str, function: Callable[..., Any], examples: str = "") -> None:
    """A function as a command: its docstring is the help, a number that it returns is the exit code, and what is wrong
    with a run is said in a line."""
    try:
        app(f"python -m {module}", function.__doc__, examples, default_command=function)()
    except (UserError, faults.Fault) as error:
        say(error, file=sys.stderr)
        raise SystemExit(2) from None

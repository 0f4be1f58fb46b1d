"""Where tables for people go."""

import sys

from rich.console import Console


def console() -> Console:
    """As wide as the terminal; into a file or a pipe, so wide that no name is cut."""
    return Console(width=None if sys.stdout.isatty() else 200)

"""Text for people that comes from a disk, a machine or a library: nothing in it is obeyed by a terminal.

Whatever this project says to somebody goes through `say`, through `fleet.console`, or into a log of `log_plainly`.
"""

import io
import logging
import sys
from typing import IO

_MOST = 200_000  # characters of one thing that is said

if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that knows fewer characters shows what it can
    sys.stdout.reconfigure(errors="replace")


def plain(text: object, most: int = 200) -> str:
    """One line: control and format characters, lone surrogates and line ends are blanks. What is cut is counted."""
    whole = str(text)
    if len(whole) <= most and whole.isprintable():
        return whole
    more = f"... and {len(whole) - most:,} characters more" if len(whole) > most else ""
    return "".join(c if c.isprintable() else " " for c in whole[:most]) + more


def lines(text: object, most: int = _MOST) -> str:
    """The same, of what has several lines."""
    whole = str(text).replace("\r\n", "\n")
    more = f"\n... and {len(whole) - most:,} characters more" if len(whole) > most else ""
    return "\n".join(plain(line, most) for line in whole[:most].split("\n")) + more


def say(*words: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None) -> None:
    """What `print` is elsewhere; at once, since it may stand in a pipe."""
    print(lines(sep.join(map(str, words))), end=end, file=file, flush=True)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))


def log_plainly(form: str, level: int | str = logging.WARNING) -> None:
    """What is logged, on the standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain(form))
    logging.basicConfig(level=level, handlers=[handler])

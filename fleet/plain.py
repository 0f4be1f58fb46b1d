"""Text for people that comes from a disk, a machine or a library: nothing in it is obeyed by a terminal.

Whatever this project says to somebody goes through `say`, through `fleet.console`, or into a log of `log_plainly`. If
nobody can hear it (a pipe whose reader has gone, a full disk), the work goes on all the same.
"""

import atexit
import contextlib
import errno
import io
import logging
import os
import select
import sys
from collections.abc import Sequence
from typing import IO

_SIZES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_MOST = 200_000  # characters of one thing that is said
_failed: list[IO[str]] = []  # streams that once took nothing

for _name in ("stdin", "stdout", "stderr"):  # closed ones lead nowhere, rather than to what is opened next
    if getattr(sys, _name) is None:
        setattr(sys, _name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if _name == "stdin" else "w"))
if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that knows fewer characters shows what it can
    sys.stdout.reconfigure(errors="replace")


def plain(text: object, most: int = 200) -> str:
    """One line: control and format characters, lone surrogates and line ends are blanks. What is cut is counted."""
    whole = str(text)
    if len(whole) <= most and whole.isprintable():
        return whole
    more = f"... and {len(whole) - most:,} characters more" if len(whole) > most else ""
    return "".join(c if c.isprintable() else " " for c in whole[:most]) + more


def some(words: Sequence[str], most: int, sep: str = ", ") -> str:
    """The first of them, and how many more there are."""
    left = unsaid(len(words), most)
    return sep.join(words[: len(words) - left]) + (f" and {left} more" if left else "")


def unsaid(there: int, most: int) -> int:
    """How many of those that are there have no place among so many; one is said, which takes no more room."""
    return there - most if there > most + 1 else 0


def lines(text: object, most: int = _MOST) -> str:
    """The same, of what has several lines."""
    whole = str(text).replace("\r\n", "\n")
    more = f"\n... and {len(whole) - most:,} characters more" if len(whole) > most else ""
    return "\n".join(plain(line, most) for line in whole[:most].split("\n")) + more


def say(*words: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None) -> None:
    """What `print` is elsewhere; at once, since it may stand in a pipe."""
    utter(lines(sep.join(map(str, words))) + end, file or sys.stdout)


def utter(text: str, file: IO[str]) -> bool:
    """Whether it could be said. What a full disk does not take now waits in the stream for the next time."""
    try:
        file.write(text)
        file.flush()
    except UnicodeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: it is closed
        if file not in _failed:
            _failed.append(file)
            atexit.register(_give_up, file)  # or Python would complain about it at the end
            if file is sys.stdout and getattr(error, "errno", errno.EPIPE) != errno.EPIPE:
                say(f"The standard output takes nothing ({error}); the work goes on.", file=sys.stderr)
        return False
    return True


def heard() -> bool:
    """Whether somebody hears the standard output, as far as can be seen: of a pipe, whether anybody reads it still."""
    return sys.stdout not in _failed and not _hung_up(sys.stdout)


def _hung_up(file: IO[str]) -> bool:
    with contextlib.suppress(OSError, ValueError):  # what has no number is no pipe
        asked = select.poll()
        asked.register(file.fileno(), 0)
        return any(what & (select.POLLERR | select.POLLHUP) for _, what in asked.poll(0))
    return False


def _give_up(file: IO[str]) -> None:
    try:
        file.flush()
    except (OSError, ValueError):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        except (OSError, ValueError):  # there is no such stream any more
            pass


def several(number: int, what: str) -> str:
    """1 round, 2 rounds."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def readable_bytes(value: float) -> str:
    """As people say it: 12 B, 3.4 MB, 150 GB."""
    return in_units(value, _SIZES, "B")


def in_units(value: float, units: Sequence[tuple[float, str]], least: str) -> str:
    size, unit = next((each for each in units if value >= each[0]), (1.0, least))
    return f"{digits(value / size)} {unit}"


def digits(value: float) -> str:
    """Three of it, or all before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return lines(super().format(record))


def log_plainly(form: str, level: int | str = logging.WARNING) -> None:
    """What is logged, on the standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PlainFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])

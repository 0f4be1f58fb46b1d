"""Numbers, names and moments as people read them, safe in a page. Pure."""

import html
import time
import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from fleet.plain import digits, in_units, plain

_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
T = TypeVar("T")

CELL = 6.7  # pixels of a sign in the charts' own font; Chinese and the like take two


def text(value: object, most: int = 300) -> str:
    """Any text from the disk: nothing in it is obeyed, neither by a browser nor by a terminal."""
    return html.escape(plain(value, most))


def name(value: object, most: int = 300) -> str:
    """The same as an island: a name that is written from right to left turns nothing else around."""
    return f"<bdi>{text(value, most)}</bdi>"


def clipped(value: object, cells: int) -> str:
    """As much of it as fits into so many cells; not escaped yet."""
    shown = plain(value, 4 * cells + 8)
    if cells_of(shown) <= cells:
        return shown
    while shown and cells_of(shown) > cells - 1:
        shown = shown[:-1]
    return shown.rstrip() + "…"


def cells_of(value: str) -> int:
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in value)


def figure(value: float | None) -> str:
    """A measured number: as many digits as tell something."""
    if value is None:
        return "–"
    return f"{value:.4f}" if 0.01 <= abs(value) < 1000 else f"{value:.4g}"


def count(value: float) -> str:
    return f"{value:,.0f}" if value < 10_000 else in_units(value, _COUNTS, "")


def lasting(seconds: float) -> str:
    size, unit = next((each for each in _TIMES if seconds >= 2 * each[0]), (1.0, "s"))
    return f"{digits(seconds / size)} {unit}"


def share(value: float | None) -> str:
    if value is None:
        return "–"
    return "<1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def moment(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at)) if at else "–"
    except (OverflowError, ValueError, OSError):  # a clock that tells nonsense
        return "–"


def thinned(rows: Sequence[T], most: int) -> list[T]:
    """Evenly spaced ones, the first and the last among them."""
    if len(rows) <= most:
        return [*rows]
    return [rows[round(n * (len(rows) - 1) / (most - 1))] for n in range(most)]

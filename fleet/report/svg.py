"""Charts as SVG that fits any width: lines live in a box that is stretched, text and dots in one that is not.

A plot is as wide as its place; positions from left to right are shares of it, so that the same picture is right on a
telephone and on a wall.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from fleet.report.formatting import CELL, cells_of, clipped, text

WIDE = 1000  # units of the stretched box
_LABEL = 14  # pixels of a line of text

Point = tuple[float, float]
Line = tuple[str, Sequence[Point], str]  # its name, where it goes, its look


@dataclass(frozen=True)
class Scale:
    """Values to shares of an axis."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[float], room: float = 0.0) -> "Scale":
        low, high = min(values, default=0.0), max(values, default=1.0)
        if high - low < 1e-12 * max(1.0, abs(high)):
            low, high = low - (0.5 * abs(low) or 0.5), high + (0.5 * abs(high) or 0.5)
        return cls(low - room * (high - low), high + room * (high - low))

    @classmethod
    def fair(cls, values: Sequence[float], usual: Sequence[float], kept: Sequence[float] = ()) -> "Scale":
        """Of all values; where a few of the usual ones lie so far off that nothing could be told of the others, without
        them, but for those that are kept."""
        everything, order = cls.over([*values, *kept], 0.04), sorted(usual)
        few = max(1, len(order) // 50)
        if len(order) < 20:
            return everything
        some = cls.over([*order[few : len(order) - few], *kept], 0.1)
        return some if everything.high - everything.low > 4 * (some.high - some.low) else everything

    def __call__(self, value: float) -> float:
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self, most: int = 5, integers: bool = False) -> list[float]:
        """Round numbers."""
        rough = (self.high - self.low) / most
        unit = 10.0 ** math.floor(math.log10(rough))
        step = max(next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough), 1.0 if integers else 0.0)
        return [n * step for n in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Axis:
    scale: Scale
    title: str
    integers: bool = False  # numbers of things

    def labels(self, most: int) -> list[tuple[float, str]]:
        ticks = self.scale.ticks(most, self.integers)
        step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        plain = all(abs(tick) < 1e6 for tick in ticks) and digits < 7
        return [(self.scale(tick), f"{tick:,.{digits}f}" if plain else f"{tick:.3g}") for tick in ticks]


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def path(points: Sequence[Point], high: float) -> str:
    """Of shares from the left and from the bottom."""
    return "M" + "L".join(f"{WIDE * x:.1f} {high * (1 - y):.1f}" for x, y in points)


def line(points: Sequence[Point], high: float, look: str) -> str:
    return f'<path class="line {look}" d="{path(points, high)}"/>' if points else ""


def band(upper: Sequence[Point], lower: Sequence[Point], high: float, look: str) -> str:
    return f'<path class="band {look}" d="{path([*upper, *reversed(lower)], high)}Z"/>' if upper else ""


def stretched(inside: str, high: float) -> str:
    box = f'viewBox="0 0 {WIDE} {high:g}" preserveAspectRatio="none" width="100%" height="{high:g}"'
    return f"<svg {box}>{inside}</svg>"


def word(x: str, y: float, what: str, look: str = "", cells: int = 0, more: str = "") -> str:
    """A piece of text; of strangers' script one that keeps to its room, whatever font there is."""
    shown = clipped(what, cells) if cells else what
    if not shown.isascii() and cells:
        more += f' textLength="{min(cells, cells_of(shown)) * CELL:.0f}" lengthAdjust="spacingAndGlyphs"'
    title = f"<title>{html.escape(clipped(what, 400))}</title>" if shown != what else ""
    return f'<text class="{look}" x="{x}" y="{y:.1f}"{more}>{html.escape(shown)}{title}</text>'


def dot(point: Point, high: float, look: str) -> str:
    return f'<circle class="{look}" cx="{percent(point[0])}" cy="{high * (1 - point[1]):.1f}" r="3.5"/>'


def frame(x: Axis, y: Axis | None, high: float) -> str:
    """What lies behind the lines: a faint grid, and what its lines stand for."""
    parts = [f'<line class="axis" x1="0" x2="100%" y1="{high:g}" y2="{high:g}"/>']
    if y:
        for share, label in y.labels(4):
            at = high * (1 - share)
            parts.append(f'<line class="grid" x1="0" x2="100%" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(word("-8", at + 4, label, "tick end"))
    for share, label in x.labels(4):
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
        left = percent(share)
        parts.append(f'<line class="axis" x1="{left}" x2="{left}" y1="{high:g}" y2="{high + 4:g}"/>')
        parts.append(word(left, high + 17, label, f"tick {anchor}"))
    parts.append(word("50%", high + 35, x.title, "tick middle"))
    return "".join(parts)


def beside(labels: Sequence[tuple[float, str, str]], high: float, cells: int = 13) -> str:
    """Names of lines at their right ends, pushed apart where they would meet: share from the bottom, name, look."""
    order = sorted(labels, key=lambda each: -each[0])
    places = [high * (1 - share) + 4 for share, _, _ in order]
    for n, (a, b) in enumerate(pairwise([*places])):
        places[n + 1] = max(b, places[n] + _LABEL, a + _LABEL)
    over = max(0.0, (places[-1] if places else 0.0) - high - 4)
    for n in reversed(range(len(places))):
        limit = places[n + 1] - _LABEL if n + 1 < len(places) else high + 4
        places[n] = min(places[n], limit) if over else places[n]
    named = zip(places, order, strict=True)
    return "".join(word("100%", y, name, f"name {look}", cells, ' dx="6"') for y, (_, name, look) in named)


def plot(
    id: str, title: str, about: str, x: Axis, y: Axis, high: float, lines: Sequence[Line], behind: str = "",
    labels: Sequence[tuple[float, str, str]] = (),
) -> str:  # fmt: skip
    """Lines with a dot and their names at their ends, over what lies behind them and has labels of its own."""
    there = [(name, [(x.scale(at), y.scale(value)) for at, value in points], look) for name, points, look in lines]
    drawn = "".join(line(points, high, look) for _, points, look in there)
    dots = "".join(dot(points[-1], high, look) for _, points, look in there)
    names = beside([*labels, *((points[-1][1], name, look) for name, points, look in there)], high)
    inside = frame(x, y, high) + stretched(behind + drawn, high) + dots + names
    return chart(id, title, about, high + 42, inside, look="lines")


def chart(id: str, title: str, about: str, high: float, inside: str, width: str = "100%", look: str = "") -> str:
    """The picture, with what a screen reader says of it."""
    names = f'role="img" aria-labelledby="{id}-t {id}-d"'
    head = f'<title id="{id}-t">{text(title)}</title><desc id="{id}-d">{text(about, 2000)}</desc>'
    return (
        f'<div class="scroll" id="{id}-s" tabindex="0" role="region" aria-label="{text(title)}">'
        f'<div class="plot {look}"><svg {names} width="{width}" height="{high:g}">{head}{inside}</svg></div></div>'
    )

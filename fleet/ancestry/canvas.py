"""What the pictures share: colours, fonts, text that fits, and a page on which every inch has its purpose."""

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet.plain import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRAY, FAINT, ACCENT, PAPER = "#22303c", "#8a97a3", "#b9c2ca", "#d1345b", "#fdfdfb"
DPI = 120
_FONTS = ("Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Noto Sans Arabic", "Noto Sans Devanagari")
_SIDE, _HEAD, _AXIS, _LINE = 0.25, 1.0, 0.55, 0.22  # inches: margins, title, ticks below, a line of the key

Entry = tuple[str, Mapping[str, Any]]  # a label of the key, and how its line or mark looks


@dataclass(frozen=True)
class Page:
    """Inches: a panel with room at its sides, a title above it and a key below."""

    wide: float  # the panel
    high: float
    left: float
    right: float
    keys: Sequence[Entry] = ()

    @property
    def width(self) -> float:
        return max(7.5, self.left + self.wide + self.right)

    @property
    def height(self) -> float:
        return _HEAD + self.high + _AXIS + self.key_lines * _LINE + _SIDE

    @property
    def key_columns(self) -> int:
        widest = max((width_of(label, 8) for label, _ in self.keys), default=0.0)
        return max(1, int((self.width - 2 * _SIDE) * 72 / (widest + 52)))

    @property
    def key_lines(self) -> int:
        return -(-len(self.keys) // self.key_columns)

    def figure(self, title: str, *lines: str) -> "Figure":
        """With everything on it but the panels."""
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        figure = Figure(figsize=(self.width, self.height), dpi=DPI, facecolor=PAPER)
        x, most = _SIDE / self.width, (self.width - 2 * _SIDE) * 72
        small = [(line, 9, GRAY, "normal", 0.58 + 0.19 * n) for n, line in enumerate(lines)]
        for text, size, color, weight, down in [(title, 13, INK, "bold", 0.34), *small]:
            how: Any = {"fontsize": size, "color": color, "weight": weight, "parse_math": False}
            figure.text(x, 1 - down / self.height, fitted(text, most / (1.1 if weight == "bold" else 1), size), **how)
        if self.keys:
            legend = figure.legend(
                [Line2D([], [], **looks) for _, looks in self.keys], ["." for _ in self.keys], ncols=self.key_columns,
                loc="lower left", bbox_to_anchor=(x, 0.6 * _SIDE / self.height), frameon=False, fontsize=8, borderpad=0,
                borderaxespad=0, labelcolor=INK, handlelength=2.6, columnspacing=1.5,
            )  # fmt: skip
            for written, (label, _) in zip(legend.get_texts(), self.keys, strict=True):
                written.set_parse_math(False)
                written.set_text(label)  # only now: a legend has its own ideas about what begins with "_"
        return figure

    def panel(
        self, figure: "Figure", left: float = 0.0, wide: float = 0.0, down: float = 0.0, high: float = 0.0
    ) -> "Axes":
        """Axes at so many inches from the left and the top of the page's panel; all of it by default."""
        wide, high = wide or self.wide, high or self.high
        x, y = self.left + left, self.height - _HEAD - down - high
        axes = figure.add_axes((x / self.width, y / self.height, wide / self.width, high / self.height))
        axes.set_facecolor(PAPER)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelcolor=INK, labelsize=8)
        return axes


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Fonts that are there; a sign that none of them has is drawn as a box, which is no news."""
    import matplotlib
    from matplotlib.font_manager import fontManager

    there = {font.name for font in fontManager.ttflist}
    family = ["DejaVu Sans", *(font for font in _FONTS if font in there)]
    with matplotlib.rc_context({"font.family": family, "text.usetex": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def as_png(figure: "Figure") -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=DPI, facecolor=figure.get_facecolor(), metadata={"Software": None})
    return data.getvalue()


def fitted(text: str, points: float, size: float) -> str:
    """As much of it as has room."""
    text = " ".join(plain(text, 1000).split())
    if width_of(text, size) <= points:
        return text
    short, long = 0, len(text)
    while long - short > 1:
        middle = (short + long) // 2
        short, long = (middle, long) if width_of(text[:middle] + "…", size) <= points else (short, middle)
    return text[:short].rstrip() + "…"


@functools.lru_cache(1 << 14)
def width_of(text: str, size: float) -> float:
    """In points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    return float(text_to_path.get_text_width_height_descent(text, FontProperties(size=size), False)[0])


def shades(steps: int = 256) -> list[Any]:
    """From poor to good: uniform for the eye, darker means more; neither end drowns in paper or ink."""
    import matplotlib

    colors = matplotlib.colormaps["viridis"]
    return [colors(1 - n / (steps - 1)) for n in range(steps)]

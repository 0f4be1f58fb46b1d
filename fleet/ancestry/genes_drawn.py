"""The history of a run's genomes as a picture: numbers as heat maps, all else as shares."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fleet.ancestry.canvas import GRAY, INK, Page, as_png, fitted, quiet, shades, width_of
from fleet.ancestry.genes import Gene, Genes, Trait, genes_of
from fleet.ancestry.tree import Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#4f7cac", "#e2a458", "#63a088", "#bc5d72", "#8e7cc3", "#7fb7be", "#c7a78a", "#c9ced3")
_GENES, _TRAITS = 400, 8  # at most
_GAP, _SHARES, _RIGHT = 0.6, 1.4, 2.5  # inches


def genome_picture(tree: Tree, title: str = "") -> bytes | None:
    """A PNG file; nothing if the members have no genomes."""
    found = genes_of(tree)
    if not (found.genes or found.traits):
        return None
    with quiet():
        return as_png(drawing(found, title))


def drawing(found: Genes, title: str = "") -> "Figure":
    genes, traits = found.genes[:_GENES], found.traits[:_TRAITS]
    count = len(genes)
    row = min(0.3, max(12 / max(1, count), 0.03))
    heights = [count * row, count * row * 0.6] * bool(count) + [_SHARES] * len(traits)
    names = [gene.name for gene in genes] + [trait.name for trait in traits]
    wide = min(16.0, max(5.0, 0.45 * len(found.rounds)))
    page = Page(
        wide,
        sum(heights) + _GAP * (len(heights) - 1),
        0.4 + max(width_of(fitted(name, 130, 8), 8) for name in names) / 72,
        _RIGHT,
    )
    figure = page.figure(title or "How the genome changed", *_summed_up(found))
    panels = [
        page.panel(figure, wide=wide, down=sum(heights[:n]) + n * _GAP, high=high) for n, high in enumerate(heights)
    ]
    if count:
        _draw_means(page, figure, panels[0], genes, row)
        _draw_spreads(page, figure, panels[1], genes, row)
    for trait, axes in zip(traits, panels[2 * bool(count) :], strict=True):
        _draw_shares(axes, trait)
    for axes in panels:
        _draw_rounds(axes, found.rounds, wide)
    panels[-1].set_xlabel("round", fontsize=9, color=INK)
    return figure


def _summed_up(found: Genes) -> list[str]:
    """What one sees, from the top."""
    lines = []
    if count := len(found.genes):
        some = f" (the first {_GENES} of {count})" if count > _GENES else ""
        lines.append(f"Each number{some}, as the mean over the members of a round; below it, how far they are apart")
    if count := len(found.traits):
        some = f" (the first {_TRAITS} of {count})" if count > _TRAITS else ""
        lines.append(f"What is not a number{some}: which share of a round's members has what")
    return lines


# -- numbers -----------------------------------------------------------------------------------------------------------


def _draw_means(page: Page, figure: "Figure", axes: "Axes", genes: Sequence[Gene], row: float) -> None:
    """Each gene on its own scale, which stands at its right."""
    shown = [[_share(mean, gene.low, gene.high) for mean in gene.means] for gene in genes]
    _draw_heat(page, figure, axes, shown, shades(), ("lowest", "highest"))
    _draw_genes(axes, genes, row)
    for n, gene in _where_there_is_room(genes, row):
        text = f"{gene.low:.3g} … {gene.high:.3g}" if gene.high > gene.low else f"{gene.low:.3g}"
        how: Any = {"va": "center", "fontsize": 7, "color": GRAY}
        axes.annotate(text, (1, n), (6, 0), ("axes fraction", "data"), "offset points", **how)


def _draw_spreads(page: Page, figure: "Figure", axes: "Axes", genes: Sequence[Gene], row: float) -> None:
    """Standard deviations; half of a gene's range is the most that there can be."""
    import matplotlib

    shown = [[_share(spread, 0.0, (gene.high - gene.low) / 2) for spread in gene.spreads] for gene in genes]
    colors = [matplotlib.colormaps["magma"](1 - 0.75 * n / 255) for n in range(256)]
    _draw_heat(page, figure, axes, shown, colors, ("all alike", "far apart"))
    _draw_genes(axes, genes, row * 0.6)


def _share(value: float | None, low: float, high: float) -> float:
    if value is None:
        return math.nan
    return (value - low) / (high - low) if high > low else 0.0


def _draw_heat(
    page: Page, figure: "Figure", axes: "Axes", shown: Any, colors: list[Any], ends: tuple[str, str]
) -> None:
    from matplotlib.colors import ListedColormap

    heat = axes.imshow(shown, cmap=ListedColormap(colors), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    place = axes.get_position()
    high = min(place.height, 1.6 / page.height)
    bar = figure.add_axes((place.x1 + 1.35 / page.width, place.y0 + (place.height - high) / 2, 0.13 / page.width, high))
    figure.colorbar(heat, cax=bar, ticks=[0, 1]).outline.set_visible(False)
    bar.set_yticks([0, 1], ends, fontsize=8, color=INK)
    bar.tick_params(length=0)


def _draw_genes(axes: "Axes", genes: Sequence[Gene], row: float) -> None:
    some = _where_there_is_room(genes, row)
    axes.set_yticks([n for n, _ in some], [fitted(gene.name, 130, 8) for _, gene in some], parse_math=False)


def _where_there_is_room(genes: Sequence[Gene], row: float) -> list[tuple[int, Gene]]:
    return list(enumerate(genes))[:: max(1, -int(-0.15 // row))]


# -- all else ----------------------------------------------------------------------------------------------------------


def _draw_shares(axes: "Axes", trait: Trait) -> None:
    """Stacked, the commonest at the bottom."""
    rounds = range(len(trait.shares[0]))
    bottom = [0.0 for _ in rounds]
    several = len(trait.values) > len(_COLORS)
    common = len(_COLORS) - 1 if several else len(trait.values)
    rest = [math.fsum(column) for column in zip(*trait.shares[common:], strict=True)] if several else []
    shown = [*zip(trait.values[:common], trait.shares, strict=False), *([("others", rest)] * several)]
    for n, ((value, shares), color) in enumerate(zip(shown, _COLORS, strict=False)):
        axes.bar(rounds, shares, 1.0, bottom, color=color)
        bottom = [a + b for a, b in zip(bottom, shares, strict=True)]
        spot: Any = ("axes fraction", "axes fraction")
        at = (1.0, (n + 0.5) / len(_COLORS))
        how: Any = {"va": "center", "fontsize": 8, "parse_math": False}
        axes.annotate("■", at, (6, 0), spot, "offset points", **{**how, "color": color})
        axes.annotate(
            fitted(value, _RIGHT * 72 - 40, 8) or "(blank)", at, (18, 0), spot, "offset points", color=INK, **how
        )
    axes.set(xlim=(-0.5, len(rounds) - 0.5), ylim=(0, 1))
    axes.set_yticks([0.5], [fitted(trait.name, 130, 8)], parse_math=False)


def _draw_rounds(axes: "Axes", rounds: Sequence[int], wide: float) -> None:
    every = max(1, -int(-0.35 // (wide / len(rounds))))
    some = [(n, round) for n, round in enumerate(rounds) if round % every == 0]
    axes.set_xticks([n for n, _ in some], [str(round) for _, round in some])

"""The family tree as a picture: rounds from left to right, lines from parents to children, fitness as colour."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fleet.ancestry.canvas import ACCENT, FAINT, GRAY, INK, Page, as_png, quiet, shades
from fleet.ancestry.layout import Edge, Layout, laid_out
from fleet.ancestry.tree import Node, Tree
from fleet.ancestry.words import LINES, MARKS, Grid, draw_names, grid_of, key, label, marks_of, summed_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure


def picture(tree: Tree, title: str = "") -> bytes:
    """A PNG file."""
    with quiet():
        return as_png(drawing(tree, title))


def drawing(tree: Tree, title: str = "") -> "Figure":
    layout, marks = laid_out(tree), marks_of(tree)
    grid, scale = grid_of(layout), _scale(tree, layout)
    wide, high = grid.left + layout.columns * grid.column, layout.height * grid.row
    page = Page(wide, high, 0.2, grid.right + 1.2 * bool(scale), key(tree, layout, marks))
    figure = page.figure(title or "Family tree", *summed_up(tree, layout))
    axes = page.panel(figure)
    axes.set_xlim(-0.5 - grid.left / grid.column, layout.columns - 0.5)
    axes.set_ylim(layout.height - 0.5, -0.5)
    _draw_edges(axes, layout, grid)
    _draw_nodes(axes, tree, layout, grid, marks, scale)
    draw_names(axes, tree, layout, grid)
    label(axes, layout, grid)
    if scale:
        _draw_scale(page, figure, grid.right, scale, tree.measure)
    return figure


# -- lines and marks ---------------------------------------------------------------------------------------------------


def _draw_edges(axes: "Axes", layout: Layout, grid: Grid) -> None:
    from matplotlib.collections import PathCollection

    crowd = min(1.0, max(0.15, (300 / max(1, len(layout.edges))) ** 0.5))
    thick = min(1.0, max(0.4, grid.mark / 9))
    looks = {  # colour, points, opacity, which lies above which
        "other": (GRAY, thick, 0.7 * crowd, 1),
        "line": (INK, 1.1 * thick, max(0.25, 0.6 * crowd), 2),
        "main": (ACCENT, max(1.6, 2.8 * thick), 1.0, 4),
    }
    for rank, (color, width, alpha, order) in looks.items():
        for kind, style in LINES.items():
            thin = 0.6 if kind == "carried" and rank != "main" else 1.0
            curves = [_curve(edge) for edge in layout.edges if (edge.rank, edge.kind) == (rank, kind)]
            how: Any = {"linewidths": width * thin, "linestyles": [style], "zorder": order}
            axes.add_collection(PathCollection(curves, facecolors="none", edgecolors=color, alpha=alpha, **how))


def _curve(edge: Edge) -> Any:
    from matplotlib.path import Path

    (x, y), (u, v) = edge.start, edge.end
    bend = min(0.5 * abs(u - x), 1.0)
    points = [(x, y), (x + bend, y), (u - bend, v), (u, v)]
    return Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def _draw_nodes(
    axes: "Axes", tree: Tree, layout: Layout, grid: Grid, marks: Mapping[str, str], scale: "ScalarMappable | None"
) -> None:
    groups = dict[tuple[str, bool], list[str]]()
    for id in layout.spots:
        node = tree.nodes[id]
        groups.setdefault((_mark_of(node, marks), scale is not None and node.score is not None), []).append(id)
    for (mark, scored), ids in groups.items():
        xs, ys = zip(*(layout.spots[id] for id in ids), strict=True)
        how: Any = {"marker": mark, "s": grid.mark**2, "edgecolors": INK, "linewidths": grid.mark / 14, "zorder": 5}
        if mark == "x":
            how |= {"c": FAINT, "s": grid.mark**2 / 3, "edgecolors": None, "linewidths": max(0.5, grid.mark / 8)}
        elif scored and scale:
            values = [tree.measured(tree.nodes[id]) for id in ids]
            how |= {"c": values, "cmap": scale.cmap, "norm": scale.norm}
        else:
            how |= {"c": "white"}
        axes.scatter(xs, ys, **how)
    if layout.stays:
        xs, ys = zip(*layout.stays.values(), strict=True)
        axes.scatter(xs, ys, s=max(1.0, grid.mark / 3) ** 2, c=INK, linewidths=0, zorder=5)
    if tree.winner in layout.spots:
        x, y = layout.spots[tree.winner]
        ring = max(9.0, 1.8 * grid.mark)
        axes.scatter([x], [y], s=ring**2, facecolors="none", edgecolors=ACCENT, linewidths=1.8, zorder=6)


def _mark_of(node: Node, marks: Mapping[str, str]) -> str:
    if node.failed:
        return "x"
    if node.summary:
        return "d"
    return marks.get(node.technique, MARKS[-1]) if node.parents else "o"


# -- fitness -----------------------------------------------------------------------------------------------------------


def _scale(tree: Tree, layout: Layout) -> "ScalarMappable | None":
    """Colours for what was bred; a start that is far worse than all others does not make them alike."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    known = [node for node in map(tree.nodes.__getitem__, layout.spots) if node.score is not None]
    bred = [node for node in known if node.parents and node.round] or known
    if not (scores := sorted(node.score for node in bred if node.score is not None)):
        return None
    low, high = scores[len(scores) // 40], max(node.score for node in known if node.score is not None)
    if low == high:
        low, high = low - 0.5, high + 0.5
    if tree.measure == "loss":
        return ScalarMappable(Normalize(-high, -low, clip=True), ListedColormap(shades()[::-1]))
    return ScalarMappable(Normalize(low, high, clip=True), ListedColormap(shades()))


def _draw_scale(page: Page, figure: "Figure", slots: float, scale: "ScalarMappable", measure: str) -> None:
    high = min(page.high, 4.0)
    axes = page.panel(figure, page.wide + slots + 0.05, 0.14, (page.high - high) / 2, high)
    bar = figure.colorbar(scale, cax=axes)
    bar.outline.set_visible(False)
    better = "lower" if measure == "loss" else "higher"
    bar.set_label(f"{measure} ({better} is better)", fontsize=8, color=INK)
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    if measure == "loss":
        axes.invert_yaxis()

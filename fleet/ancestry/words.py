"""What is written on the picture of a family tree: names where there is room, rounds, slots, and what marks mean."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fleet.ancestry.canvas import ACCENT, FAINT, GRAY, INK, Entry, fitted, width_of
from fleet.ancestry.layout import Layout
from fleet.ancestry.tree import Tree, line_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = "osD^vPXph"  # for the commonest techniques; the last one for all others
LINES: Mapping[str, Any] = {"crossover": "-", "mutation": (0, (4, 2)), "carried": "-"}
_SAID = {"crossover": "two or more parents", "mutation": "one parent", "carried": "carried over"}
_NAMES = 1.6  # inches for the names of original models


@dataclass(frozen=True)
class Grid:
    """How large things are: inches between columns, between rows and at the sides; points of a mark."""

    column: float
    row: float
    left: float
    right: float

    @property
    def mark(self) -> float:
        return max(1.0, min(9.0, 36 * min(self.column, self.row)))

    @property
    def names(self) -> bool:
        """There is room for them above the marks."""
        return self.column >= 0.4 and self.row >= 0.36


def grid_of(layout: Layout) -> Grid:
    slots = max((width_of(fitted(slot, 80, 8), 8) for slot in layout.labels), default=0.0)
    column = min(max(1.1, 5 / layout.columns), max(20 / layout.columns, 0.06))
    row = min(0.5, max(15 / layout.height, 0.012))
    return Grid(column, row, _NAMES if layout.originals else 0.3, slots / 72 + 0.2)


def marks_of(tree: Tree) -> dict[str, str]:
    """A mark for each technique, the commonest first; what is not in it shares the last mark."""
    members = filter(tree.is_member, tree.nodes.values())
    bred = (node for node in members if node.parents and not node.summary and not node.failed)
    counted = Counter(node.technique for node in bred)
    common = sorted(counted, key=lambda technique: (-counted[technique], technique))
    most = len(MARKS) if len(common) <= len(MARKS) else len(MARKS) - 1
    return dict(zip(common[:most], MARKS, strict=False))


def summed_up(tree: Tree, layout: Layout) -> list[str]:
    members = sum(tree.is_member(node) and not node.summary for node in tree.nodes.values())
    parts = [f"{members} members up to round {max(layout.ticks, default=0)}"]
    parts += ["the fittest of each round on top"] * layout.ranked
    parts += [f"rounds before {layout.left_out} are not shown"] * bool(layout.left_out)
    lines = ["; ".join(parts)]
    if winner := tree.nodes.get(tree.winner):
        score = "" if winner.score is None else f", {tree.measure} {tree.measured(winner):.4g}"
        line = [tree.nodes[id] for id in line_of(tree).all]
        roots = ", ".join(node.name for node in line if not node.parents and node is not winner)
        descent = f"; it descends from {fitted(roots, 240, 9)}" if roots else ""
        lines.append(f"The winner, circled: {fitted(winner.name, 240, 9)}{score}{descent}")
    return lines


def draw_names(axes: "Axes", tree: Tree, layout: Layout, grid: Grid) -> None:
    """Original models' names beside them, bred ones' above them."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2, foreground="white", alpha=0.85)]
    apart = min((b - a for a, b in pairwise(sorted(layout.spots[id][1] for id in layout.originals))), default=1.0)
    for id, spot in layout.spots.items():
        node = tree.nodes[id]
        if id in layout.originals and apart * grid.row > 0.15:
            text, offset = fitted(node.name, _NAMES * 72 - grid.mark - 8, 8), (-grid.mark / 2 - 5, 0.0)
            how: Any = {"ha": "right", "va": "center", "fontsize": 8}
        elif id not in layout.originals and grid.names and not node.summary and not node.failed:
            above = grid.mark / 2 + (6 if id == tree.winner else 3)
            text, offset = fitted(node.name, grid.column * 72 * 0.92, 6), (0.0, above)
            how = {"ha": "center", "va": "bottom", "fontsize": 6}
        else:
            continue
        how |= {"path_effects": halo, "zorder": 7, "color": INK, "parse_math": False}
        axes.annotate(text, spot, offset, textcoords="offset points", **how)


def label(axes: "Axes", layout: Layout, grid: Grid) -> None:
    every = max(1, -int(-0.35 // grid.column))
    rounds = [round for round in layout.ticks if round % every == 0]
    names = ["start" if round == 0 else str(round) for round in rounds]
    axes.set_xticks([layout.ticks[round] for round in rounds], names)
    axes.set_xlabel("round", fontsize=9, color=INK)
    every = max(1, -int(-0.15 // grid.row))
    shown = {slot: y for slot, y in layout.labels.items() if y % every == 0 or y % 1}
    axes.yaxis.tick_right()
    axes.set_yticks(list(shown.values()), [fitted(slot, 80, 8) for slot in shown])


def key(tree: Tree, layout: Layout, marks: Mapping[str, str]) -> list[Entry]:
    """What is said of each kind of line and mark that is there."""
    kinds, ranks = {edge.kind for edge in layout.edges}, {edge.rank for edge in layout.edges}
    width = {"carried": 0.7}
    lines: list[Entry] = [
        (_SAID[kind], {"color": GRAY, "linestyle": style, "linewidth": width.get(kind, 1.2)})
        for kind, style in LINES.items()
        if kind in kinds
    ]
    lines += [("an ancestor of the winner", {"color": INK, "linewidth": 1.2})] * ("line" in ranks)
    lines += [("the winner's line (fitter parents)", {"color": ACCENT, "linewidth": 2.8})] * ("main" in ranks)
    drawn = [tree.nodes[id] for id in layout.spots]
    blank: Any = {"linestyle": "", "markerfacecolor": "white", "markeredgecolor": INK, "markersize": 7}
    special: list[Entry] = [("a whole round", {**blank, "marker": "d"})] * any(node.summary for node in drawn)
    cross: Entry = ("failed or too late", {**blank, "marker": "x", "markeredgecolor": FAINT})
    special += [cross] * any(node.failed for node in drawn)
    several = marks if len(marks) > 1 else {}
    techniques = [(fitted(what, 130, 8) or "no technique", {**blank, "marker": mark}) for what, mark in several.items()]
    rest = {node.technique for node in drawn if node.parents and not (node.failed or node.summary)} - {*marks}
    return [*lines, *special, *techniques, *([("other techniques", {**blank, "marker": MARKS[-1]})] * bool(rest))]

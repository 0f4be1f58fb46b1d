"""The family tree and the genomes' history as parts of a page. Pure."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product

from fleet.ancestry.genes import GeneHistory, Genes, Trait, genes_of
from fleet.ancestry.layout import Edge, TreeLayout, laid_out
from fleet.ancestry.tree import Node, Tree, by_place, line_of
from fleet.plain import several
from fleet.report.formatting import CELL, cells_of, figure, name, text, thinned
from fleet.report.page_parts import table
from fleet.report.svg import Axis, Point, Scale, band, chart, frame, line, path, stretched, word

_COLUMN, _NARROW, _ROW, _LEFT, _RIGHT = 72.0, 14.0, 20.0, 24.0, 110.0  # pixels
_NAME = 22  # signs of a given model's name
_SHADES = 7
_GENES, _TRAITS, _VALUES = 24, 6, 6
_SMALL = 74.0


# -- the tree ----------------------------------------------------------------------------------------------------------


def tree_part(grown: Tree, since: int = 0) -> str:
    """A note, what the signs mean, the picture, a table."""
    layout = laid_out(grown)
    first = max(since, layout.left_out)
    parts = ["Rounds from left to right", *["the fittest of each on top"] * layout.ranked]
    parts += [f"members of the rounds since {first} are shown"] * bool(first)
    picture = _tree(grown, layout, said(grown, since))
    columns = ["member", "name", "parents", "made by", grown.measure or "score", ""]
    return f'<p class="note">{"; ".join(parts)}.</p>{key(picture)}<figure>{picture}</figure>' + table(
        "tree-table", "Members", columns, tree_rows(grown)
    )


def _tree(grown: Tree, layout: TreeLayout, about: str) -> str:
    names = {id: grown.nodes[id].name for id in layout.originals if grown.nodes[id].name != id}
    left = _LEFT + CELL * max((min(_NAME, cells_of(each)) for each in names.values()), default=0)
    column = max(_NARROW, min(_COLUMN, 1060 / layout.columns))
    wide, high = left + column * layout.columns + _RIGHT, _ROW * (layout.height + 0.5)

    def place(point: Point) -> Point:
        return left + (point[0] + 0.5) * column, _ROW * (point[1] + 0.75)

    shade = shades(grown, [*layout.spots])
    spots = {id: place(spot) for id, spot in layout.spots.items()}
    every = max(1, -int(-30 // column))
    ticks = [(number or "start", place((at, 0))[0]) for number, at in layout.ticks.items() if number % every == 0]
    parts = [_edges(layout.edges, place)]
    parts += [f'<circle class="stay" cx="{x:.0f}" cy="{y:.0f}" r="2"/>' for x, y in map(place, layout.stays.values())]
    parts += [_node(grown, grown.nodes[id], spot, shade.get(id, "")) for id, spot in spots.items()]
    parts += [
        word(f"{spots[id][0] - 12:.0f}", spots[id][1] + 4, called, "tick end", _NAME) for id, called in names.items()
    ]
    parts += [
        word(f"{wide - _RIGHT + 8:.0f}", place((0, row))[1] + 4, slot, "tick", 14)
        for slot, row in layout.labels.items()
    ]
    parts += [word(f"{x:.0f}", high + 14, str(number), "tick middle") for number, x in ticks]
    parts.append(word(f"{left + column * layout.columns / 2:.0f}", high + 32, "round", "tick middle"))
    return chart("tree", "Family tree", about, high + 38, "".join(parts), f"{wide:.0f}", "tree")


_SIGNS = {  # by what stands in the picture: each with its place in a box of 18 by 12, and what it means
    'class="winner"': ('<circle class="winner" cx="9" cy="6" r="5"/>', "the winner"),
    'class="edge main ': ('<path class="edge main" d="M0 6h18"/>', "its descent through the fitter parents"),
    'class="edge line ': ('<path class="edge line" d="M0 6h18"/>', "its other ancestors"),
    " mutation": ('<path class="edge line mutation" d="M0 6h18"/>', "from a single parent"),
    'class="stay"': ('<circle class="stay" cx="9" cy="6" r="2"/>', "carried on unchanged"),
    "<rect": ('<rect class="node" x="5" y="2" width="8" height="8"/>', "an average of the round"),
    'class="failed"': ('<path class="failed" d="M6 3l6 6m0 -6l-6 6"/>', "failed"),
    'class="node "': ('<circle class="node" cx="9" cy="6" r="5"/>', "not measured"),
}


def key(picture: str) -> str:
    """What the signs of this tree mean, and no others."""
    steps = "".join(f'<span class="swatch q{n}"></span>' for n in range(_SHADES))
    fitness = f'<li class="steps">poor {steps} fit</li>' if 'class="node q' in picture else ""
    signs = "".join(
        f'<li><svg class="sign" width="18" height="12" aria-hidden="true">{sign}</svg> {meaning}</li>'
        for there, (sign, meaning) in _SIGNS.items()
        if there in picture
    )
    return f'<ul class="key">{fitness}{signs}</ul>'


def _edges(edges: Sequence[Edge], place: Callable[[Point], Point]) -> str:
    parts = []
    for look in product(("other", "line", "main"), ("carried", "mutation", "crossover")):
        if d := "".join(_curve(place(e.start), place(e.end)) for e in edges if (e.rank, e.kind) == look):
            parts.append(f'<path class="edge {" ".join(look)}" d="{d}"/>')
    return "".join(parts)


def _curve(start: Point, end: Point) -> str:
    (x, y), (u, v) = start, end
    bend = min(0.5 * abs(u - x), 40.0)
    return f"M{x:.0f} {y:.0f}C{x + bend:.0f} {y:.0f} {u - bend:.0f} {v:.0f} {u:.0f} {v:.0f}"


def _node(grown: Tree, node: Node, spot: Point, shade: str) -> str:
    x, y = spot
    score = f", {grown.measure} {figure(grown.measured(node))}" if node.score is not None else ""
    called = f" {node.name}"[:200] if node.name != node.id else ""
    how = f" ({node.technique[:100]})" if node.technique else ""
    about = f"<title>{text(f'{node.id}{called}{how}{score}', 500)}</title>"
    if node.failed:
        return f'<path class="failed" d="M{x - 3:.0f} {y - 3:.0f}l6 6m0 -6l-6 6">{about}</path>'
    ring = f'<circle class="winner" cx="{x:.0f}" cy="{y:.0f}" r="9"/>' if node.id == grown.winner else ""
    if node.summary:
        return f'{ring}<rect class="node {shade}" x="{x - 4:.0f}" y="{y - 4:.0f}" width="8" height="8">{about}</rect>'
    return f'{ring}<circle class="node {shade}" cx="{x:.0f}" cy="{y:.0f}" r="5">{about}</circle>'


def shades(grown: Tree, ids: Sequence[str]) -> dict[str, str]:
    """From poor to good in a few steps, by rank: a start that is far worse than all others makes nobody alike."""
    order = sorted((node.score, id) for id in ids if (node := grown.nodes[id]).score is not None)
    return {id: f"q{n * _SHADES // max(1, len(order))}" for n, (_, id) in enumerate(order)}


def said(grown: Tree, since: int = 0) -> str:
    parts = [several(len(grown.nodes), "member") + (f" since round {since}" if since else "")]
    if winner := grown.nodes.get(grown.winner):
        parts.append(f"the winner is {winner.name[:100]}")
        parts.append(f"its line, through the fitter parents: {', '.join(line_of(grown).main[-12:])}")
    return "; ".join(parts) + "."


def tree_rows(grown: Tree, most: int = 300) -> list[list[str]]:
    line, found = {*line_of(grown).all}, []
    for node in sorted(grown.nodes.values(), key=lambda node: by_place(node.id))[-most:]:
        score = figure(grown.measured(node) if node.score is not None else None)
        mark = "winner" if node.id == grown.winner else "ancestor of the winner" if node.id in line else node.failed
        called = node.name if node.name != node.id else ""
        found.append([node.id, called, ", ".join(node.parents), node.technique, score, mark])
    return found


# -- the genomes -------------------------------------------------------------------------------------------------------


def genome_part(members: Sequence[Node]) -> str:
    """A small picture for each gene, and a table; nothing where nobody has any."""
    found = genes_of(Tree({node.id: node for node in members}))
    if not (found.genes or found.traits):
        return ""
    same, found = constant(found)
    only = f" Only round {found.rounds[0]} has genomes so far." if len(found.rounds) == 1 else ""
    what = "What members inherit and mutate: the mean of each round's members, and one standard deviation around it."
    note = f'<p class="note">{what}{only}</p>'
    hidden = max(0, len(found.genes) - _GENES)
    more = f"<p>{hidden} more genes are not drawn.</p>" if hidden else ""
    more += f"<p>The same for all members: {name('; '.join(same[:_GENES]), 2000)}.</p>" if same else ""
    shown = f'{note}<div class="smalls">{"".join(genome(found))}</div>{more}'
    return shown + (table("genome-table", "Means by round", *gene_rows(found)) if found.genes else "")


def constant(found: Genes) -> tuple[list[str], Genes]:
    """Those that were the same for everybody in all rounds, in words; and all others."""
    genes = [each for each in found.genes if len({*each.values}) > 1]
    traits = [each for each in found.traits if len(each.values) > 1]
    same = [f"{each.name} {figure(each.values[0])}" for each in found.genes if each not in genes]
    same += [f"{each.name} {each.values[0]}" for each in found.traits if each not in traits]
    return same, Genes(found.rounds, genes, traits)


def genome(found: Genes) -> list[str]:
    pictures = [_gene(f"gene-{n}", found, gene) for n, gene in enumerate(found.genes[:_GENES])]
    return pictures + [_trait(f"trait-{n}", found, trait) for n, trait in enumerate(found.traits[:_TRAITS])]


def _gene(id: str, found: Genes, gene: GeneHistory) -> str:
    rounds = [float(number) for number in found.rounds]
    x, y = Axis(Scale.over(rounds), "round", True), Scale.fair(gene.values, gene.values)
    every = zip(rounds, gene.means, gene.spreads, strict=True)
    there = [(at, mean, spread) for at, mean, spread in every if mean is not None and spread is not None]
    upper = [(x.scale(at), y(m + s)) for at, m, s in there]
    lower = [(x.scale(at), y(m - s)) for at, m, s in there]
    middle = [(x.scale(at), y(m)) for at, m, _ in there]
    drawn = stretched(band(upper, lower, _SMALL, "members") + line(middle, _SMALL, "best"), _SMALL)
    ends = word("-6", 9, f"{y.high:.3g}", "tick end") + word("-6", _SMALL, f"{y.low:.3g}", "tick end")
    means = [figure(mean) for _, mean, _ in there] or ["–"]
    if len(there) == 1:
        spread = figure(there[0][2])
        return _small(gene.name, f"<p>{means[0]} in the only round, with a standard deviation of {spread}</p>")
    about = f"The mean of {gene.name[:200]} goes from {means[0]} to {means[-1]}."
    picture = frame(x, None, _SMALL) + drawn + ends
    return _small(gene.name, chart(id, gene.name[:200], about, _SMALL + 42, picture))


def _trait(id: str, found: Genes, trait: Trait) -> str:
    """Shares of a round's members, the commonest at the bottom."""
    rounds = [float(number) for number in found.rounds]
    x = Axis(Scale.over(rounds), "round", True)
    bounds = [[0.0] * len(rounds)]  # the lower one of each share, and the upper one of the last
    for shares in trait.shares[:_VALUES]:
        bounds.append([a + b for a, b in zip(bounds[-1], shares, strict=True)])
    tops = [[(x.scale(at), y) for at, y in zip(rounds, each, strict=True)] for each in bounds]
    parts = [
        f'<path class="share s{n}" d="{path([*upper, *reversed(lower)], _SMALL)}Z"/>'
        for n, (lower, upper) in enumerate(pairwise(tops))
    ]
    named = "; ".join(f"{value[:60]}: {100 * shares[-1]:.0f} % at last" for value, shares in _named(trait).items())
    if len(rounds) == 1:
        return _small(trait.name, f"<p>{name(named, 600)}</p>")
    others = "<li>above them: others</li>" if len(trait.values) > _VALUES else ""
    items = others + "".join(
        f'<li><span class="swatch share s{n}"></span>{name(value, 60) if value.strip() else "(blank)"}</li>'
        for n, value in enumerate(_named(trait))
    )
    drawn = frame(x, None, _SMALL) + stretched("".join(parts), _SMALL)
    picture = chart(id, trait.name[:200], named, _SMALL + 42, drawn)
    return _small(trait.name, f'{picture}<ul class="key">{items}</ul>')


def _named(trait: Trait) -> Mapping[str, Sequence[float]]:
    return dict(zip(trait.values[:_VALUES], trait.shares, strict=False))


def _small(title: str, inside: str) -> str:
    return f'<div class="small"><h3>{name(title, 80)}</h3>{inside}</div>'


def gene_rows(found: Genes) -> tuple[list[str], list[list[str]]]:
    """A column for each gene, a row for each round."""
    shown = [*found.genes[:_GENES]]
    rows = [[str(round), *(figure(gene.means[n]) for gene in shown)] for n, round in enumerate(found.rounds)]
    return ["round", *(gene.name for gene in shown)], thinned(rows, 100)

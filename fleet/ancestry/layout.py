"""Where everything stands in the picture of a family tree: rounds as columns, the fittest on top. Pure.

Where everybody is a parent and nobody goes on unchanged, as in DiLoCo or with matched parents, slots are the rows: they
are what stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from fleet.ancestry.tree import Node, Tree, by_place, fitness, line_of, natural
from fleet.recipe import round_and_slot

MOST = 300  # rounds that are drawn: of longer runs the last ones

Point = tuple[float, float]
Key = tuple[int, int]  # a round, and a stage in it: members whose parents are of the same round stand behind them


@dataclass(frozen=True)
class Edge:
    start: Point
    end: Point
    kind: str  # "crossover", "mutation" or "carried"
    rank: str  # "main": of the winner's main line; "line": of another ancestor; "other"


@dataclass(frozen=True)
class TreeLayout:
    spots: Mapping[str, Point]  # of the nodes that are drawn
    stays: Mapping[str, Point]  # and of the places that they were carried to
    edges: Sequence[Edge]
    columns: int
    height: float  # rows
    labels: Mapping[str, float]  # slots with a row of their own
    ticks: Mapping[int, float]  # round -> where it stands
    originals: frozenset[str]  # nodes in the first column, if models stand there that nobody bred
    ranked: bool  # the fittest on top
    left_out: int = 0  # rounds


def laid_out(tree: Tree) -> TreeLayout:
    left_out = max(0, max((node.round for node in tree.nodes.values()), default=0) - MOST)
    drawn = {id: node for id, node in tree.nodes.items() if tree.is_member(node) and node.round >= left_out}
    keys = _keys(drawn)
    carried = _carried(drawn, keys)
    order = sorted({*keys.values(), *carried.values()})
    column = {key: float(number) for number, key in enumerate(order)}
    homes = {id: key for id, key in keys.items() if key[0] > 0 and not drawn[id].summary} | carried
    ranked = _somebody_went_on(drawn, homes) or _somebody_was_passed_over(drawn)
    heights = _by_fitness(drawn, homes) if ranked else _by_slot([*homes])
    rows = int(max(heights.values(), default=0)) + 1
    below = _below(drawn, rows)
    heights |= {id: below[node.slot] for id, node in drawn.items() if node.summary}
    heights |= _around_the_middle({id: key for id, key in keys.items() if id not in heights}, rows)
    stays = {id: (column[key], heights[id]) for id, key in carried.items()}
    spots = {id: (column[key], heights[id]) for id, key in keys.items()}
    first = frozenset(id for id in spots if keys[id] == (0, 0) and not drawn[id].parents)
    slots = {} if ranked else {round_and_slot(id)[1]: heights[id] for id in homes}
    edges = [*_descents(tree, drawn, spots, stays), *_lives(tree, drawn, spots, stays)]
    height = max(heights.values(), default=0.0) + 1
    return TreeLayout(
        spots, stays, edges, max(1, len(order)), height, {**slots, **below}, _ticks(column), first, ranked, left_out
    )


def _keys(drawn: Mapping[str, Node]) -> dict[str, Key]:
    """The column of each node. Originals that are measured in round 1 stand left of the children made there."""
    early = any(node.round == 1 and any(round_and_slot(p)[0] == 1 for p in node.parents) for node in drawn.values())
    keys = dict[str, Key]()
    for id, node in drawn.items():
        if not node.parents and node.round <= early:
            keys[id] = (0, 0)
            continue
        here = [
            p
            for p, at in zip(node.parents, node.through, strict=True)
            if round_and_slot(at)[0] == node.round and p in keys
        ]
        before = [keys[p][1] if keys[p][0] == node.round else 0 for p in here]
        keys[id] = (node.round, max(before) + (not node.summary) if before else 0)
    return keys


def _carried(drawn: Mapping[str, Node], keys: Mapping[str, Key]) -> dict[str, Key]:
    """Places among those in which members are bred, as m0 beside m1. A pool only kept within reach is not drawn."""
    kinds = {_kind(id) for id, key in keys.items() if key[0] > 0 and not drawn[id].summary}
    first = dict(sorted(keys.values(), reverse=True))
    there = [id for node in drawn.values() for id in node.also if _kind(id) in kinds]
    return {id: (round, first.get(round, 0)) for id in there for round in [round_and_slot(id)[0]]}


def _kind(id: str) -> str:
    """Of a slot: its name without its number."""
    return round_and_slot(id)[1].rstrip("0123456789")


def _somebody_went_on(drawn: Mapping[str, Node], homes: Mapping[str, Key]) -> bool:
    """Unchanged, from one round to the next, whatever slot that was."""
    lives = ({round_and_slot(id)[0] for id in (node.id, *node.also) if id in homes} for node in drawn.values())
    return any(len(rounds) > 1 for rounds in lives)


def _somebody_was_passed_over(drawn: Mapping[str, Node]) -> bool:
    """A member that was fit to be a parent, of a round from which others were taken, and yet was not."""
    parents = {parent for node in drawn.values() if not node.summary for parent in node.parents}
    rounds = {drawn[parent].round for parent in parents if parent in drawn} - {0}
    bred = (node for node in drawn.values() if node.round in rounds and node.parents)
    return any(node.score is not None and not (node.summary or node.failed) and node.id not in parents for node in bred)


def _by_fitness(drawn: Mapping[str, Node], homes: Mapping[str, Key]) -> dict[str, float]:
    """The fittest of each column on top; `homes` are places of members."""
    node_of = {id: node for node in drawn.values() for id in (node.id, *node.also)}
    order = sorted(homes, key=lambda id: (homes[id], -fitness(node_of[id]), by_place(id)))
    columns = groupby(order, key=lambda id: homes[id])
    return {id: float(number) for _, ids in columns for number, id in enumerate(ids)}


def _by_slot(homes: Sequence[str]) -> dict[str, float]:
    slots = sorted({round_and_slot(id)[1] for id in homes}, key=natural)
    return {id: float(slots.index(round_and_slot(id)[1])) for id in homes}


def _below(drawn: Mapping[str, Node], rows: int) -> dict[str, float]:
    """What whole rounds come to has rows under all others."""
    slots = sorted({node.slot for node in drawn.values() if node.summary}, key=natural)
    return {slot: rows + 0.2 + number for number, slot in enumerate(slots)}


def _around_the_middle(homes: Mapping[str, Key], rows: int) -> dict[str, float]:
    """What was there before all breeding."""
    heights = dict[str, float]()
    for column in set(homes.values()):
        ids = sorted((id for id, key in homes.items() if key == column), key=by_place)
        apart = max(1.0, rows / len(ids))
        top = max(0.0, (rows - 1) / 2 - apart * (len(ids) - 1) / 2)
        heights |= {id: top + apart * number for number, id in enumerate(ids)}
    return heights


def _ticks(column: Mapping[Key, float]) -> dict[int, float]:
    """A round with several columns has its number in their middle."""
    ends = {round: x for (round, _), x in column.items()}
    begins = {round: x for (round, _), x in reversed([*column.items()])}
    return {round: (begins[round] + ends[round]) / 2 for round in ends}


def _descents(
    tree: Tree, drawn: Mapping[str, Node], spots: Mapping[str, Point], stays: Mapping[str, Point]
) -> list[Edge]:
    line, edges = line_of(tree), list[Edge]()
    main, ancestors = dict(zip(line.main[1:], line.main, strict=False)), set(line.all)
    for id, node in drawn.items():
        kind = "crossover" if len(node.parents) > 1 else "mutation"
        for parent, through in zip(node.parents, node.through, strict=True):
            if parent in spots and not (node.summary or node.failed):
                rank = "main" if main.get(id) == parent else "line" if id in ancestors else "other"
                edges.append(Edge(stays.get(through, spots[parent]), spots[id], kind, rank))
    return edges


def _lives(tree: Tree, drawn: Mapping[str, Node], spots: Mapping[str, Point], stays: Mapping[str, Point]) -> list[Edge]:
    """The ways of members that were carried over, in bold as far as the winner's line goes along."""
    line, edges = line_of(tree), list[Edge]()
    until = {tree.winner: MOST + max((node.round for node in drawn.values()), default=0)}
    for child, parent in zip(line.main[1:], line.main, strict=False):
        node = tree.nodes[child]
        until[parent] = round_and_slot(node.through[node.parents.index(parent)])[0]
    for id, node in drawn.items():
        spot = spots[id]
        for there in node.also:
            if there in stays and stays[there][0] > spot[0]:
                rank = "main" if round_and_slot(there)[0] <= until.get(id, -1) else "other"
                edges.append(Edge(spot, stays[there], "carried", rank))
                spot = stays[there]
    return edges

"""From a run's members to their family tree. Pure.

A member that was carried over is one node, however many rounds it lives. Its parents are those that its recipe's
merge names in `of`; without that, the recipe's parents but for mere tools, such as a tokenizer or a text.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fleet import faults
from fleet.diary import plain
from fleet.history import History
from fleet.recipe import Member, NotYet, name, place

WINNER = "winner"  # the slot that names a run's result
_MEASURES = ("score", "loss")  # of members' metrics; where there are scores, losses do not count
_LONGEST, _HUGE = 200, 1e150
_GENE = "genome_"  # what a maker says of a genome that was settled while making


@dataclass(frozen=True)
class Node:
    id: str  # where it was made
    name: str
    parents: tuple[str, ...] = ()  # where they were made
    through: tuple[str, ...] = ()  # the parents as the recipe names them: places that they were carried to
    technique: str = ""
    score: float | None = None  # higher is better
    also: tuple[str, ...] = ()  # the places that it was carried to
    failed: str = ""  # "failed" or "closed"
    summary: bool = False  # what a whole round comes to, such as its average: nobody descends from it
    genome: Mapping[str, Any] = field(default_factory=dict)

    @property
    def round(self) -> int:
        return place(self.id)[0]

    @property
    def slot(self) -> str:
        return place(self.id)[1]


@dataclass(frozen=True)
class Tree:
    nodes: Mapping[str, Node]  # by id; parents come before their children
    measure: str = ""  # what fitness is: "score", or "loss", whose negative is the score; empty: nothing was measured
    winner: str = ""

    def measured(self, node: Node) -> float:
        """The score of one that has it, as it was measured."""
        score = node.score or 0.0
        return -score if self.measure == "loss" else score


@dataclass(frozen=True)
class Line:
    """The winner's descent, the oldest first."""

    all: tuple[str, ...] = ()  # every ancestor, and the winner
    main: tuple[str, ...] = ()  # through the fitter parent each time


def tree(history: History) -> Tree:
    """Of what is finished; the history must have looked."""
    return grown(finished_members(history), history.first)


def finished_members(history: History) -> list[Member]:
    found = []
    for round in range(max(history.plans, default=-1) + 1):
        for recipe in history.plan(round):
            id = name(round, recipe.slot)
            with contextlib.suppress(NotYet, faults.Passing):  # made again, or not visible yet
                if history.finished(id):
                    found.append(history[id])
    return found


def grown(members: Iterable[Member], rounds: int) -> Tree:
    """The tree of members that stand in the order of their plans; so many rounds are finished."""
    made = dict[str, Member]()
    places = dict[str, str]()  # every place -> where that member was made
    for member in members:
        places[member.id] = member.origin
        if member.origin == member.id:
            made[member.id] = member
    measure = next((what for what in _MEASURES if any(_number(m, what) is not None for m in made.values())), "")
    nodes = _with_places(_related(made, places, measure), places)
    return Tree(nodes, measure, _winner(made, places, nodes, rounds))


def line_of(tree: Tree, id: str = "") -> Line:
    """The descent of a member, or of the winner."""
    id = id or tree.winner
    if not id:
        return Line()
    found, open = {id}, [id]
    while open:
        new = set(tree.nodes[open.pop()].parents) - found
        found |= new
        open += sorted(new)
    main = [id]
    while parents := tree.nodes[main[-1]].parents:
        main.append(max(parents, key=lambda parent: fitness(tree.nodes[parent])))  # of equal ones the first
    return Line(tuple(sorted(found, key=by_place)), tuple(reversed(main)))


def fitness(node: Node) -> float:
    return -math.inf if node.score is None else node.score


def as_json(tree: Tree) -> dict[str, Any]:
    line = line_of(tree)
    members = [_described(node) for node in sorted(tree.nodes.values(), key=lambda node: by_place(node.id))]
    about = {"measure": tree.measure, "winner": tree.winner or None}
    return {**about, "main_line": list(line.main), "line": list(line.all), "members": members}


def by_place(id: str) -> tuple[int, list[int | str]]:
    """An order in which m2 comes before m10."""
    round, slot = place(id)
    return round, natural(slot)


def natural(text: str) -> list[int | str]:
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"([0-9]+)", text))]


def finite(value: Any) -> float | None:
    """A number with which one can reckon and draw; whole numbers may be of any size on the disk."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE
    return float(value) if good else None


# -- inside ------------------------------------------------------------------------------------------------------------


def _described(node: Node) -> dict[str, Any]:
    parents, also = list(node.parents), list(node.also)
    what = {"id": node.id, "name": node.name, "round": node.round, "slot": node.slot, "parents": parents}
    how = {"technique": node.technique, "score": node.score, "carried": bool(also), "also": also}
    return {**what, **how, "failed": node.failed, "summary": node.summary}


def _related(made: Mapping[str, Member], places: Mapping[str, str], measure: str) -> dict[str, Node]:
    nodes, roots = dict[str, Node](), dict[str, frozenset[str]]()
    named = {places[id] for member in made.values() for id in _of(member) or () if id in places}
    for id, member in made.items():
        through = _through(member, places, nodes, roots)
        node = _node(member, through, places, measure)
        if node.parents or node.failed or id in named or _is_model(member):
            nodes[id] = node
            first = {id} if not node.parents and node.score is None else set()
            roots[id] = frozenset(first.union(*(roots[parent] for parent in node.parents)))
    return {id: replace(node, summary=_summary(made[id], nodes)) for id, node in nodes.items()}


def _through(
    member: Member, places: Mapping[str, str], nodes: Mapping[str, Node], roots: Mapping[str, frozenset[str]]
) -> list[str]:
    """Each parent once, as it was named; none that is absent, or only a tool here: first weights that another parent
    descends from are only looked at for their shape."""
    once = dict[str, str]()
    named = _of(member)
    for id in member.recipe.parents if named is None else named:
        if (origin := places.get(id, "")) in nodes and not nodes[origin].failed:
            once.setdefault(origin, id)
    behind = {root for parent in once for root in roots[parent] - {parent}} if named is None else set()
    return [id for origin, id in once.items() if origin not in behind]


def _of(member: Member) -> Sequence[str] | None:
    match member.recipe.merge.get("of"):
        case str(one):
            return [one]
        case list(several):
            return [each for each in several if isinstance(each, str)]
    return None


def _node(member: Member, through: Sequence[str], places: Mapping[str, str], measure: str) -> Node:
    merge, score = member.recipe.merge, _number(member, measure)
    named, technique = merge.get("name"), merge.get("technique") or merge.get("method") or ""
    settled = {key.removeprefix(_GENE): value for key, value in member.metrics.items() if key.startswith(_GENE)}
    return Node(
        member.id,
        (plain(named, _LONGEST).strip() if isinstance(named, str) else "") or member.id,
        tuple(places[id] for id in through),
        tuple(through),
        plain(technique, _LONGEST),
        -score if score is not None and measure == "loss" else score,
        failed=member.absent,
        genome={**member.recipe.genome, **settled},
    )


def _number(member: Member, what: str) -> float | None:
    return finite(member.metrics.get(what))


def _is_model(member: Member) -> bool:
    weights = any(file.startswith("weights") or file.endswith((".safetensors", ".gguf")) for file in member.digests)
    return weights or any(_number(member, what) is not None for what in _MEASURES)


def _summary(member: Member, nodes: Mapping[str, Node]) -> bool:
    """It leaves no files, and all that it looks at was bred and lives in its own round."""
    node = nodes[member.id]
    here = all(place(id)[0] == node.round for id in node.through)
    bred = bool(node.parents) and all(nodes[parent].parents for parent in node.parents)
    return member.recipe.publish == "nothing" and here and bred


def _with_places(nodes: Mapping[str, Node], places: Mapping[str, str]) -> dict[str, Node]:
    also = dict[str, list[str]]()
    for id in sorted(places, key=by_place):
        if places[id] != id:
            also.setdefault(places[id], []).append(id)
    return {id: replace(node, also=tuple(also.get(id, ()))) for id, node in nodes.items()}


def _winner(made: Mapping[str, Member], places: Mapping[str, str], nodes: Mapping[str, Node], rounds: int) -> str:
    """Whom the last round's slot of that name stands for, or the best of the last round that was measured."""
    slot = name(max(0, rounds - 1), WINNER)
    if (origin := places.get(slot, slot)) in nodes:
        parents = nodes[origin].parents
        if origin != slot or len(parents) == 1 and _of(made[origin]) is not None:
            return parents[0] if origin == slot else origin
    alive = dict[int, list[Node]]()
    for id, origin in places.items():
        if origin in nodes and nodes[origin].score is not None:
            alive.setdefault(place(id)[0], []).append(nodes[origin])
    for round in reversed(range(rounds)):
        if there := sorted(alive.get(round, []), key=lambda node: by_place(node.id)):
            return max(there, key=lambda node: (not node.summary, fitness(node))).id
    return ""

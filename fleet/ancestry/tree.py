"""A family tree: who descends from whom, how well each did, and the winner's line. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet.recipe import round_and_slot

WINNER = "winner"  # the slot that names a run's result
_HUGE = 1e150


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
        return round_and_slot(self.id)[0]

    @property
    def slot(self) -> str:
        return round_and_slot(self.id)[1]


@dataclass(frozen=True)
class Tree:
    nodes: Mapping[str, Node]  # by id; parents come before their children
    measure: str = ""  # what fitness is: "score", or "loss", whose negative is the score; empty: nothing was measured
    winner: str = ""

    def measured(self, node: Node) -> float:
        """The score of one that has it, as it was measured."""
        score = node.score or 0.0
        return -score if self.measure == "loss" else score

    def is_member(self, node: Node) -> bool:
        """The winner's slot is none of its own where it only says who has won."""
        return node.slot != WINNER or node.id == self.winner


@dataclass(frozen=True)
class Line:
    """The winner's descent, the oldest first."""

    all: tuple[str, ...] = ()  # every ancestor, and the winner
    main: tuple[str, ...] = ()  # through the fitter parent each time


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
    line, nodes = line_of(tree), sorted(tree.nodes.values(), key=lambda node: by_place(node.id))
    return {
        "measure": tree.measure, "winner": tree.winner or None, "main_line": list(line.main), "line": list(line.all),
        "members": [_described(node) for node in nodes],
    }  # fmt: skip


def by_place(id: str) -> tuple[int, list[int | str]]:
    """An order in which m2 comes before m10."""
    round, slot = round_and_slot(id)
    return round, natural(slot)


def natural(text: str) -> list[int | str]:
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"([0-9]+)", text))]


def finite(value: Any) -> float | None:
    """A number with which one can reckon and draw; whole numbers may be of any size on the disk."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _HUGE
    return float(value) if good else None


def _described(node: Node) -> dict[str, Any]:
    return {
        "id": node.id, "name": node.name, "round": node.round, "slot": node.slot, "parents": list(node.parents),
        "technique": node.technique, "score": node.score, "carried": bool(node.also), "also": list(node.also),
        "failed": node.failed, "summary": node.summary,
    }  # fmt: skip

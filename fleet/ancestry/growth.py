"""From a run's members to their family tree. Pure.

A member that was carried over is one node, however many rounds it lives; tools and evaluations of others make none.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fleet import faults
from fleet.ancestry.tree import WINNER, Node, Tree, by_place, finite, fitness
from fleet.history import History
from fleet.plain import plain
from fleet.recipe import Member, NotYet, name, place

_MEASURES = ("score", "loss")  # of members' metrics; where there are scores, losses do not count
_LONGEST = 200
_GENE = "genome_"  # what a maker says of a genome that was settled while making


def tree(history: History) -> Tree:
    """Of what is finished; the history must have looked."""
    return grown(finished_members(history), history.first)


def finished_members(history: History) -> list[Member]:
    found = []
    for round in range(history.last + 1):
        history.look_back(round)
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
    nodes = _with_places(_related(made, places, _scores(made, places, measure)), places)
    return Tree(nodes, measure, _winner(made, places, nodes, rounds))


def alone(member: Member) -> Node:
    """A member as if it had no relatives, for whoever asks for its genome only."""
    return _node(member, (), {}, None)


# -- inside ------------------------------------------------------------------------------------------------------------


def _scores(made: Mapping[str, Member], places: Mapping[str, str], measure: str) -> dict[str, float]:
    """Who was not measured when it was made has what its first evaluation found."""
    found = dict[str, float]()
    for id, member in made.items():
        if (score := _number(member, measure)) is not None:
            whose = places.get(at, "") if (at := _looked_at(member)) else id
            found.setdefault(whose, -score if measure == "loss" else score)
    return found


def _looked_at(member: Member) -> str:
    """Whom it stands for, if it is no model of its own."""
    recipe = member.recipe
    return recipe.parents[0] if recipe.role in ("look", "winner") and recipe.parents else ""


def _related(made: Mapping[str, Member], places: Mapping[str, str], scores: Mapping[str, float]) -> dict[str, Node]:
    nodes = dict[str, Node]()
    for id, member in made.items():
        if member.recipe.role != "tool" and not _looked_at(member):
            nodes[id] = _node(member, _through(member, places, nodes), places, scores.get(id))
    return nodes


def _through(member: Member, places: Mapping[str, str], nodes: Mapping[str, Node]) -> list[str]:
    """Each parent that is there, once, as it was named."""
    once = dict[str, str]()
    for id in member.recipe.parents:
        if (origin := places.get(id, "")) in nodes and not nodes[origin].failed:
            once.setdefault(origin, id)
    return [*once.values()]


def _node(member: Member, through: Sequence[str], places: Mapping[str, str], score: float | None) -> Node:
    recipe = member.recipe
    named, given = recipe.args.get("name"), recipe.role == "given"
    technique = recipe.args.get("technique") or ("" if given else recipe.task)
    settled = {key.removeprefix(_GENE): value for key, value in member.metrics.items() if key.startswith(_GENE)}
    return Node(
        member.id,
        (plain(named, _LONGEST).strip() if isinstance(named, str) else "") or member.id,
        tuple(places[id] for id in through),
        tuple(through),
        plain(technique, _LONGEST),
        score,
        failed=member.absent,
        genome={**recipe.genome, **settled},
        summary=recipe.role == "summary",
    )


def _number(member: Member, what: str) -> float | None:
    return finite(member.metrics.get(what))


def _with_places(nodes: Mapping[str, Node], places: Mapping[str, str]) -> dict[str, Node]:
    also = dict[str, list[str]]()
    for id in sorted(places, key=by_place):
        if places[id] != id:
            also.setdefault(places[id], []).append(id)
    return {id: replace(node, also=tuple(also.get(id, ()))) for id, node in nodes.items()}


def _winner(made: Mapping[str, Member], places: Mapping[str, str], nodes: Mapping[str, Node], rounds: int) -> str:
    """Whom the last round's slot of that name stands for, or the best of the last round that was measured."""
    slot = name(max(0, rounds - 1), WINNER)
    origin = places.get(slot, "")
    stands_for = places.get(_looked_at(made[slot]), "") if origin == slot else origin
    if stands_for in nodes:
        return stands_for
    alive = dict[int, list[Node]]()
    for id, origin in places.items():
        if origin in nodes and nodes[origin].score is not None:
            alive.setdefault(place(id)[0], []).append(nodes[origin])
    for round in reversed(range(rounds)):
        if there := sorted(alive.get(round, []), key=lambda node: by_place(node.id)):
            return max(there, key=lambda node: (not node.summary, fitness(node))).id
    return ""

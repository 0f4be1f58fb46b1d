"""From a run's members to their family tree. Pure.

A member that was carried over is one node, however many rounds it lives; tools and evaluations of others make none.
"""

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from fleet import faults
from fleet.ancestry.tree import WINNER, Node, Tree, by_place, finite, fitness
from fleet.history import History
from fleet.plain import plain
from fleet.recipe import Member, NotYet, name, round_and_slot

_MEASURES = ("score", "loss")  # of members' metrics; where there are scores, losses do not count
_LONGEST = 200
_GENE = "genome_"  # what a maker says of a genome that was drawn while making


def tree(history: History) -> Tree:
    """Of what is finished; the history must have looked."""
    return grown(finished_members(history), history.first_open)


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
    every = {member.id: member for member in members}
    places = {id: member.origin for id, member in every.items()}  # every place -> where that member was made
    made = {id: member for id, member in every.items() if member.origin == id}
    measured = {what for member in made.values() for what in _MEASURES if finite(member.metrics.get(what)) is not None}
    measure = next((what for what in _MEASURES if what in measured), "")
    nodes = _related(made, places, _scores(made, places, measure))
    return Tree(nodes, measure, _winner(made, places, nodes, rounds))


def alone(member: Member) -> Node:
    """A member as if it had no relatives, for whoever asks for its genome only."""
    return _node(member, (), {}, None, ())


# -- inside ------------------------------------------------------------------------------------------------------------


def _scores(made: Mapping[str, Member], places: Mapping[str, str], measure: str) -> dict[str, float]:
    """Who was not measured when it was made has what its first evaluation found."""
    found = dict[str, float]()
    for id, member in made.items():
        if (score := finite(member.metrics.get(measure))) is not None:
            whose = places.get(at, "") if (at := _looked_at(member)) else id
            found.setdefault(whose, -score if measure == "loss" else score)
    return found


def _looked_at(member: Member) -> str:
    """Whom it stands for, if it is no model of its own."""
    recipe = member.recipe
    return recipe.parents[0] if recipe.role in ("look", "winner") and recipe.parents else ""


def _related(made: Mapping[str, Member], places: Mapping[str, str], scores: Mapping[str, float]) -> dict[str, Node]:
    nodes, also = dict[str, Node](), dict[str, list[str]]()
    for id, origin in places.items():
        if origin != id:
            also.setdefault(origin, []).append(id)
    for id, member in made.items():
        if member.recipe.role != "tool" and not _looked_at(member):
            there = sorted(also.get(id, ()), key=by_place)
            nodes[id] = _node(member, _through(member, places, nodes), places, scores.get(id), there)
    return nodes


def _through(member: Member, places: Mapping[str, str], nodes: Mapping[str, Node]) -> list[str]:
    """Each parent that is there, once, as it was named."""
    once = dict[str, str]()
    for id in member.recipe.parents:
        if (origin := places.get(id, "")) in nodes and not nodes[origin].failed:
            once.setdefault(origin, id)
    return [*once.values()]


def _node(
    member: Member, through: Sequence[str], places: Mapping[str, str], score: float | None, also: Sequence[str]
) -> Node:
    recipe = member.recipe
    named, given = recipe.args.get("name"), recipe.role == "given"
    technique = recipe.args.get("technique") or ("" if given else recipe.task)
    drawn = {key.removeprefix(_GENE): value for key, value in member.metrics.items() if key.startswith(_GENE)}
    return Node(
        member.id,
        (plain(named, _LONGEST).strip() if isinstance(named, str) else "") or member.id,
        tuple(places[id] for id in through),
        tuple(through),
        plain(technique, _LONGEST),
        score,
        tuple(also),
        failed=member.absent,
        genome={**recipe.genome, **drawn},
        summary=recipe.role == "summary",
    )


def _winner(made: Mapping[str, Member], places: Mapping[str, str], nodes: Mapping[str, Node], rounds: int) -> str:
    """Whom the last round's slot of that name stands for, or the best of the last round that was measured."""
    slot = name(max(0, rounds - 1), WINNER)
    origin = places.get(slot, "")
    stands_for = places.get(_looked_at(made[slot]), "") if origin == slot else origin
    if stands_for in nodes:
        return stands_for
    alive = [(round_and_slot(id)[0], nodes[origin]) for id, origin in places.items() if origin in nodes]
    measured = [(round, node) for round, node in alive if round < rounds and node.score is not None]
    measured.sort(key=lambda each: by_place(each[1].id))
    best = max(measured, key=lambda each: (each[0], not each[1].summary, fitness(each[1])), default=None)
    return best[1].id if best else ""

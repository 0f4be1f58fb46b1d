"""From a run's members to their family tree. Pure.

A member that was carried over is one node, however many rounds it lives. Its parents are those that its recipe's
merge names in `of`; without that, the recipe's parents but for mere tools, such as a tokenizer or a text. A recipe
whose merge says `at` is a look at that member, and makes none.
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
    """Who was not measured when it was made has what the first look at it found."""
    found = dict[str, float]()
    for id, member in made.items():
        if (score := _number(member, measure)) is not None:
            whose = places.get(at, "") if (at := _looked_at(member)) else id
            found.setdefault(whose, -score if measure == "loss" else score)
    return found


def _looked_at(member: Member) -> str:
    return at if isinstance(at := member.recipe.merge.get("at"), str) else ""


def _related(made: Mapping[str, Member], places: Mapping[str, str], scores: Mapping[str, float]) -> dict[str, Node]:
    nodes, roots = dict[str, Node](), dict[str, frozenset[str]]()
    named = {places[id] for member in made.values() for id in _of(member) or () if id in places}
    for id, member in made.items():
        if _looked_at(member):
            continue
        through = _through(member, places, nodes, roots)
        node = _node(member, through, places, scores.get(id))
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


def _node(member: Member, through: Sequence[str], places: Mapping[str, str], score: float | None) -> Node:
    merge = member.recipe.merge
    named, technique = merge.get("name"), merge.get("technique") or merge.get("method") or ""
    settled = {key.removeprefix(_GENE): value for key, value in member.metrics.items() if key.startswith(_GENE)}
    return Node(
        member.id,
        (plain(named, _LONGEST).strip() if isinstance(named, str) else "") or member.id,
        tuple(places[id] for id in through),
        tuple(through),
        plain(technique, _LONGEST),
        score,
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
    origin = places.get(slot, "")
    stands_for = [places.get(id, "") for id in _of(made[slot]) or ()] if origin == slot else [origin]
    if len(stands_for) == 1 and stands_for[0] in nodes:
        return stands_for[0]
    alive = dict[int, list[Node]]()
    for id, origin in places.items():
        if origin in nodes and nodes[origin].score is not None:
            alive.setdefault(place(id)[0], []).append(nodes[origin])
    for round in reversed(range(rounds)):
        if there := sorted(alive.get(round, []), key=lambda node: by_place(node.id)):
            return max(there, key=lambda node: (not node.summary, fitness(node))).id
    return ""

"""From registers and notes to the numbers of the page. Pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from fleet.ancestry.growth import alone, grown
from fleet.ancestry.tree import Node, Tree, finite
from fleet.recipe import Member, place
from fleet.report.diaries import Story
from fleet.report.facts import MEASURES, Moved, Round, Spread
from fleet.report.registers import Sheet
from fleet.status import metrics_text


def summed_up(found: Sheet) -> Round:
    values, leader = dict[tuple[str, str], list[float]](), dict[tuple[str, str], tuple[float, str]]()
    averaged, tokens = dict[str, float](), 0.0
    for id, member in found.members.items():
        if not member.metrics:
            continue
        tokens += (finite(member.metrics.get("tokens")) or 0.0) if id in found.made else 0.0
        role, questions = member.recipe.role, member.recipe.questions
        for measure in MEASURES:
            if (value := finite(member.metrics.get(measure))) is None:
                continue
            if role == "summary":
                averaged[measure] = value
            elif role != "given":
                key = questions, measure
                values.setdefault(key, []).append(value)
                leader[key] = min(leader.get(key, (float("inf"), "")), (-value if measure == "score" else value, id))
    absent = sum(bool(member.absent) for member in found.members.values())
    spreads = {key: Spread.of(each) for key, each in values.items()}
    who = {key: id for key, (_, id) in leader.items()}
    return Round(found.round, len(found.plan), len(found.members), absent, tokens, spreads, averaged, who)


def dated(each: Round, at: Mapping[str, Mapping[bool, float]]) -> Round:
    there = at.get(str(each.number), {})
    return replace(each, at=there.get(False, 0.0), averaged_at=there.get(True, 0.0))


def last_made(all: Iterable[Story], summaries: Set[str]) -> dict[str, dict[bool, float]]:
    """By round: when the last of its members was made, and when the averaged model was evaluated."""
    found = dict[str, dict[bool, float]]()
    for notes in all:
        for at, _, id, _ in notes.makes:
            there = found.setdefault(id.partition("/")[0], {})
            there[id in summaries] = max(there.get(id in summaries, 0.0), at)
    return found


def moved_by(all: Sequence[Story]) -> tuple[list[Moved], float, float]:
    made = sorted((at, bytes) for notes in all for at, _, _, bytes in notes.makes)
    total, points, every = 0.0, list[Moved](), max(1, len(made) // 1000)
    for n, (at, bytes) in enumerate(made):
        total += bytes
        if n % every == 0 or n + 1 == len(made):
            points.append(Moved(at, total))
    return points, sum(n.written for n in all), sum(n.read for n in all)


def command_of(started: Mapping[str, Any]) -> str:
    """Of a launch: what was given by hand, or the launcher, which alone notes its code."""
    return str(started.get("command", ""))


def with_genomes(found: Sheet) -> list[Node]:
    return [alone(member) for member in found.members.values() if not member.absent]


def tree_of(sheets: list[Sheet]) -> Tree:
    members = [member for each in sheets for member in each.members.values()]
    if not members:
        return Tree({})
    return grown(members, max(each.round for each in sheets if each.members) + 1)


def last_members(sheets: list[Sheet]) -> list[tuple[str, str]]:
    complete = [each for each in sheets if each.complete]
    if not complete:
        return []
    return [(id, member.absent or metrics_text(member.metrics)) for id, member in complete[-1].members.items()][-50:]


def name_of(member: Member) -> str:
    """Of a given model: what its recipe calls it, or the model that it merges with nothing."""
    args = member.recipe.args
    recipe = args.get("recipe")
    models = recipe.get("models") if isinstance(recipe, dict) else None
    model = models[0].get("model") if isinstance(models, list) and models and isinstance(models[0], dict) else None
    return str(args.get("name") or model or place(member.id)[1])

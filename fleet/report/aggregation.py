"""From registers and notes to the numbers of the page: totals, spreads, the best. Pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import accumulate

from fleet.ancestry.tree import Tree, finite
from fleet.ancestry.tree_builder import grown
from fleet.recipe import Member, name, round_and_slot
from fleet.report.facts import MEASURES, DonorScore, Round, Spread
from fleet.report.registers import RoundRegisters
from fleet.report.worker_stories import WorkerStory
from fleet.status import metrics_text


def summed_up(found: RoundRegisters) -> Round:
    values, leader = dict[tuple[str, str], list[float]](), dict[tuple[str, str], tuple[float, str]]()
    averaged, averaged_on, tokens = dict[str, float](), "", 0.0
    looked_at = names_of_looks(found)
    for id, member in found.members.items():
        if not member.metrics or id in looked_at.values():  # whoever is asked anew counts by that
            continue
        tokens += (finite(member.metrics.get("tokens")) or 0.0) if id in found.made else 0.0
        role, questions = member.recipe.role, member.recipe.evaluated_on
        for measure in MEASURES:
            if (value := finite(member.metrics.get(measure))) is None:
                continue
            if role == "summary":
                averaged[measure], averaged_on = value, questions
            elif role != "given":
                key = questions, measure
                values.setdefault(key, []).append(value)
                worth, called = -value if measure == "score" else value, looked_at.get(id, id)
                leader[key] = min(leader.get(key, (float("inf"), "")), (worth, called))
    spreads, leaders = {key: Spread.of(each) for key, each in values.items()}, {k: id for k, (_, id) in leader.items()}
    counts = len(found.plan), len(found.members)
    return Round(found.round, *counts, tokens, spreads, averaged, leaders, averaged_on=averaged_on)


def names_of_looks(found: RoundRegisters) -> dict[str, str]:
    """By the look: the member that is looked at, as it is called in this round, if it goes on here."""
    here = {recipe.parents[0]: name(found.round, recipe.slot) for recipe in found.plan if recipe.carried}
    looks = ((recipe.slot, recipe.parents[0]) for recipe in found.plan if recipe.role == "look")
    return {name(found.round, slot): here.get(parent, parent) for slot, parent in looks}


def dated(each: Round, at: Mapping[str, Mapping[bool, float]]) -> Round:
    there = at.get(str(each.number), {})
    return replace(each, at=there.get(False, 0.0), averaged_at=there.get(True, 0.0))


def last_made(all: Iterable[WorkerStory], summaries: Set[str]) -> dict[str, dict[bool, float]]:
    """By round: when the last of its members was made, and when the averaged model was evaluated."""
    found = dict[str, dict[bool, float]]()
    for notes in all:
        for at, _, id, _ in notes.makes:
            there = found.setdefault(id.partition("/")[0], {})
            there[id in summaries] = max(there.get(id in summaries, 0.0), at)
    return found


def moved_by(all: Sequence[WorkerStory]) -> list[tuple[float, float]]:
    """When, and how many bytes until then."""
    made = sorted((at, bytes) for notes in all for at, _, _, bytes in notes.makes)
    upto = accumulate(bytes for _, bytes in made)
    points = [(at, total) for (at, _), total in zip(made, upto, strict=True)]
    every = max(1, len(points) // 1000)
    return [each for n, each in enumerate(points) if n % every == 0 or n + 1 == len(points)]


def tree_of(sheets: list[RoundRegisters]) -> Tree:
    members = [member for each in sheets for member in each.members.values()]
    return grown(members, max((each.round for each in sheets if each.members), default=-1) + 1)


def last_members(sheets: list[RoundRegisters]) -> list[tuple[str, str]]:
    complete = [each.members for each in sheets if each.complete]
    last = complete[-1].items() if complete else ()
    return [(id, member.absent or metrics_text(member.metrics)) for id, member in last][-50:]


def donors_of(found: RoundRegisters) -> dict[tuple[str, str], DonorScore]:
    """Given models that are measured, by the measure."""
    given = [member for member in found.members.values() if member.recipe.role == "given"]
    known = [(member, measure, finite(member.metrics.get(measure))) for member in given for measure in MEASURES[:2]]
    return {
        (member.id, measure): DonorScore(_name(member), member.recipe.evaluated_on, measure, value)
        for member, measure, value in known
        if value is not None
    }


def _name(member: Member) -> str:
    """Of a given model: what its recipe calls it, or the model that it merges with nothing."""
    args = member.recipe.args
    recipe = args.get("recipe")
    models = recipe.get("models") if isinstance(recipe, dict) else None
    model = models[0].get("model") if isinstance(models, list) and models and isinstance(models[0], dict) else None
    return str(args.get("name") or model or round_and_slot(member.id)[1])

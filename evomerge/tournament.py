"""What the tournament proposes, as recipes of a run: the first generation, then children of the one before. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from evomerge.config import BITS, EvaluationSettings, EvolutionSettings, TournamentConfig
from evomerge.formula import Formula, in_words, makeup
from evomerge.variation import Child, Pool, Scored, first, next_generation, ranked
from fleet.recipe import Member, Past, Recipe, kept_as, round_and_slot
from merge.search.search_strategy import CHECK, QuestionArgs, SearchStrategy
from train.fitness_config import FINALISTS, KNOWN
from train.splits import EvalSplit


class FormulaArgs(QuestionArgs):
    """What the task is told that builds a model by its formula and evaluates it."""

    name: str
    technique: str = ""
    formula: dict[str, Any]


@dataclass(frozen=True)
class Tournament(SearchStrategy):
    c: TournamentConfig

    def last_generation(self, round: int, history: Past) -> int | None:
        return ended_after(self.e, scores(history, round - 1))

    def generation(self, round: int, history: Past) -> list[Recipe]:
        pool = Pool(self.c.merge_settings, self.names, int(history[CHECK].metrics["layers"]))
        if round == 1:
            numbers = {name: f"1/model-{n}" for n, name in enumerate(self.names)}
            made = first(pool, self.e.population_size, self.e.seed)
            children = [Child(one, in_words(one), tuple(numbers[name] for name in one.models)) for one in made]
            return [*self.given("validation", history), *self.members(1, children)]
        last = members_of(history, round - 1)
        children = next_generation(
            [*map(as_scored, last)], pool, self.e, [self.e.seed, round], worth(self.c.evaluation_settings)
        )
        known = [self.calibration(history)] if round == 2 and self.fitness_from == "irt" else []
        return [*known, *self.members(round, children, self.interview(round, last))]

    def interview(self, round: int, last: Sequence[Member]) -> dict[str, Any]:
        """How children are asked."""
        if self.fitness_from == "irt":
            return {"few": KNOWN, "draw": round}
        whole = [one for one in last if "score" in one.metrics and not one.metrics.get("given_up")]
        best = ranked([*map(as_scored, whole)])[:1] if self.fitness_from == "racing" else []
        return {"rival": best[0].id} if best else {}

    def finals(self, last: int, history: Past) -> list[Recipe]:
        """The best by their estimates answer all questions; everybody stays within reach."""
        there = {member.id: member for member in members_of(history, last) if "score" in member.metrics}
        best = [there[one.id] for one in ranked([*map(as_scored, there.values())])[:FINALISTS]]
        looks = [
            Recipe(
                f"look-{round_and_slot(one.id)[1]}",
                "score",
                (one.id,),
                role="look",
                args={**_model_of(one), "on": "validation", "earlier": one.id},
                optional=True,
            )
            for one in best
            if "standard_error" in one.metrics
        ]
        return [*(kept_as(round_and_slot(id)[1], id) for id in there), *looks] if looks else []

    def winner(self, last: int, history: Past) -> Recipe | None:
        if self.finals(last, history):
            there = [*members_of(history, last + 1, "kept"), *members_of(history, last + 1, "look")]
            there = [one for one in there if "standard_error" not in one.metrics]  # estimates do not count any more
        else:
            there = members_of(history, last)
        order = ranked([as_scored(one) for one in there if "score" in one.metrics])
        if not order:
            return None
        best = next(one for one in there if one.id == order[0].id)
        args = {**_model_of(best), "on": "test"}
        return Recipe("winner", "score", (best.id.replace("/look-", "/"),), role="winner", args=args)

    def given(self, on: EvalSplit, history: Past) -> list[Recipe]:
        formulas = {name: Formula(blend=name).model_dump(mode="json") for name in self.names}
        args = [FormulaArgs(name=name, formula=formula, on=on).plain() for name, formula in formulas.items()]
        return [Recipe(f"model-{n}", "score", role="given", args=each) for n, each in enumerate(args)]

    @property
    def e(self) -> EvolutionSettings:
        return self.c.evolution_settings

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.c.models]

    @property
    def fitness_from(self) -> str:
        return self.c.evaluation_settings.fitness_from

    def members(
        self, round: int, children: Sequence[Child], how: Mapping[str, Any] = MappingProxyType({})
    ) -> list[Recipe]:
        return [self.member(round, n, child, how) for n, child in enumerate(children)]

    def member(self, round: int, n: int, child: Child, how: Mapping[str, Any]) -> Recipe:
        if child.carried:
            return Recipe(f"m{n}", parents=child.parents)
        name, formula = f"{child.technique.replace('+', '-')}-{round}.{n}", child.formula
        plain = formula.model_dump(mode="json")
        args = FormulaArgs(name=name, technique=child.technique, formula=plain, on="validation", **how).plain()
        needs = (KNOWN,) if "few" in how and round == 2 else ()
        # what a reader wants to follow over the generations; a child inherits its formula
        shown = {"share": makeup(formula), "layers": len(formula.path), "technique": in_words(formula)}
        return Recipe(f"m{n}", "score", child.parents, needs, args=args, genome=shown, optional=True)


def _model_of(one: Member) -> dict[str, Any]:
    """Of a recipe's arguments what it makes."""
    return {key: one.recipe.args[key] for key in ("name", "technique", "formula") if key in one.recipe.args}


def formula_of(recipe: Recipe) -> Formula:
    return Formula.model_validate(recipe.args["formula"])


def members_of(history: Past, round: int, role: str = "member") -> list[Member]:
    """What a round made, of one role; all must be finished."""
    return [history[f"{round}/{recipe.slot}"] for recipe in history.plan(round) if recipe.role == role]


def as_scored(member: Member) -> Scored:
    return scored(member.id, formula_of(member.recipe), member.metrics)


def scored(id: str, formula: Formula, metrics: Mapping[str, Any]) -> Scored:
    return Scored(id, formula, metrics.get("score"), json.loads(metrics.get("solved", "{}")))


def worth(e: EvaluationSettings) -> dict[str, float]:
    """How much solving each objective's questions is worth, in all."""
    return {BITS: e.text_weight, **{task.key: abs(task.weight) for task in e.tasks}}


def scores(history: Past, last: int) -> list[list[float]]:
    """Of the generations so far."""
    found = []
    for round in range(1, last + 1):
        there = history.once("scores", round, partial(_scores, history, round))
        if there is None:
            break
        found.append(there)
    return found


def _scores(history: Past, round: int) -> list[float] | None:
    members = members_of(history, round)
    return [member.metrics["score"] for member in members if "score" in member.metrics] if members else None


def ended_after(e: EvolutionSettings, scores: Sequence[Sequence[float]]) -> int | None:
    """The number of the generation after which the search ended: nothing got better for so long, or there were enough;
    None while it goes on."""
    best, at = float("-inf"), 0
    for n, generation in enumerate(scores, 1):
        if not generation:
            return n
        if max(generation) > best:
            best, at = max(generation), n
        if n - at >= e.patience or n >= e.num_generations:
            return n
    return None

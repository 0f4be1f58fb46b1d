"""What the tournament proposes, as recipes of a run: the first generation, then children of the one before. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from evomerge.config import EvolutionSettings, TournamentConfig
from evomerge.formula import Formula, in_words, makeup
from evomerge.variation import Child, Pool, Scored, first, next_generation, ranked
from fleet.recipe import Member, Past, Recipe
from merge.search.search_strategy import CHECK, QuestionArgs, SearchStrategy
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
        return last_generation(self.e, scores(history, round - 1))

    def generation(self, round: int, history: Past) -> list[Recipe]:
        pool = Pool(self.c.merge_settings, self.names, int(history[CHECK].metrics["layers"]))
        if round == 1:
            numbers = {name: f"1/model-{n}" for n, name in enumerate(self.names)}
            made = first(pool, self.e.population_size, self.e.seed)
            children = [Child(one, in_words(one), tuple(numbers[name] for name in one.models)) for one in made]
            return [*self.given("validation", history), *self.members(1, children)]
        population = [as_scored(member) for member in members_of(history, round - 1)]
        return self.members(round, next_generation(population, pool, self.e, [self.e.seed, round]))

    def winner(self, last: int, history: Past) -> Recipe | None:
        alive = {member.id: member for member in members_of(history, last) if "score" in member.metrics}
        order = ranked([as_scored(member) for member in alive.values()])
        if not order:
            return None
        best = alive[order[0].id]
        return Recipe("winner", "score", (best.id,), role="winner", args={**best.recipe.args, "on": "test"})

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

    def members(self, round: int, children: Sequence[Child]) -> list[Recipe]:
        return [self.member(round, n, child) for n, child in enumerate(children)]

    def member(self, round: int, n: int, child: Child) -> Recipe:
        if child.carried:
            return Recipe(f"m{n}", parents=child.parents)
        name, formula = f"{child.technique.replace('+', '-')}-{round}.{n}", child.formula
        plain = formula.model_dump(mode="json")
        args = FormulaArgs(name=name, technique=child.technique, formula=plain, on="validation").plain()
        # what a reader wants to follow over the generations; a child inherits its formula
        shown = {"share": makeup(formula), "layers": len(formula.path), "technique": in_words(formula)}
        return Recipe(f"m{n}", "score", child.parents, args=args, genome=shown, optional=True)


def formula_of(recipe: Recipe) -> Formula:
    return Formula.model_validate(recipe.args["formula"])


def members_of(history: Past, round: int, role: str = "member") -> list[Member]:
    """A generation, all of it finished; or the given models of a round."""
    return [history[f"{round}/{recipe.slot}"] for recipe in history.plan(round) if recipe.role == role]


def as_scored(member: Member) -> Scored:
    return Scored(member.id, formula_of(member.recipe), member.metrics.get("score"))


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


def last_generation(e: EvolutionSettings, scores: Sequence[Sequence[float]]) -> int | None:
    """Which generation is the last one, if it has been: nothing got better for so long, or there were enough."""
    best, at = float("-inf"), 0
    for n, generation in enumerate(scores, 1):
        if not generation:
            return n
        if max(generation) > best:
            best, at = max(generation), n
        if n - at >= e.patience or n >= e.num_generations:
            return n
    return None

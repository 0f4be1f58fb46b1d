"""What CMA-ES proposes, as recipes of a run. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet.recipe import Past, Recipe
from fleet.tasks import Args
from merge.evolve.cma_es import CmaState, Generation, Search
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_space import Space
from merge.merge_recipe import alone
from merge.search.search_strategy import CHECK, QuestionArgs, SearchStrategy
from train.fitness_config import FINALISTS, KNOWN
from train.splits import EvalSplit

Points = Sequence[Sequence[float]]


class MergeArgs(Args):
    recipe: dict[str, Any]  # of the merge engine


class ScoreArgs(MergeArgs, QuestionArgs):
    """What is merged, and what it is asked."""


class TwinArgs(QuestionArgs):
    twin: str  # who has the same recipe


@dataclass(frozen=True)
class Candidate:
    """One point that was tried, as the search's user sees it."""

    generation: int
    index: int
    point: tuple[float, ...]
    recipe: str  # a digest: equal ones have equal recipes
    score: float | None  # None: it failed
    given_up: bool = False
    twin: bool = False  # another one had the same recipe, and was scored for both
    estimated: bool = False  # from a few questions

    @property
    def id(self) -> str:
        return f"{self.generation}/c{self.index}"


@dataclass(frozen=True)
class MergeSearch(SearchStrategy):
    c: SearchConfig
    _strategy: list[CmaState] = field(default_factory=list, compare=False)  # what was told some generations already

    def copies(self) -> list[Recipe]:
        names = self.c.models if self.c.reshard else []
        args = [MergeArgs(recipe=alone(name)).plain() for name in names]
        return [Recipe(f"model-{n}", "merge", (), (CHECK,), "tool", each) for n, each in enumerate(args)]

    def last_generation(self, round: int, history: Past) -> int | None:
        """What no candidate of the first generation can do, others cannot either."""
        if round > (last := self.generations(self.search(self.space(history)))):
            return last
        past = self.past(round - 1, history)
        return round - 1 if past and best(past) is None else None

    def past(self, last: int, history: Past) -> Sequence[Sequence[Candidate]]:
        space = self.space(history)
        found = (history.once("candidates", n, partial(candidates, space, history, n)) for n in range(1, last + 1))
        return list(found)

    def generation(self, round: int, history: Past) -> list[Recipe]:
        space = self.space(history)
        search, past = self.search(space), self.past(round - 1, history)
        points = self.next(search, past)[: self.c.max_fevals - (round - 1) * search.population]
        given = self.given("validation", history) if round == 1 else []
        known = [self.calibration(history)] if round == 2 and self.c.fitness_from == "irt" else []
        return [*known, *self.candidates(round, points, space, past), *given]

    def given(self, on: EvalSplit, history: Past) -> list[Recipe]:
        dtype = self.space(history).dtype  # the numbers that candidates have
        rounded = {"out_dtype": dtype} if dtype else {}
        return [self._score(f"donor-{n}", "given", alone(name, **rounded), on) for n, name in enumerate(self.c.models)]

    def finals(self, last: int, history: Past) -> list[Recipe]:
        """The best by their estimates, as far as these are only that; and what all estimates together point at."""
        past, space = self.past(last, history), self.space(history)
        first = sorted((one for each in past for one in each if one.score is not None and not one.twin), key=_by_score)
        points: list[tuple[Sequence[float], str]] = [(one.point, one.id) for one in first[:FINALISTS] if one.estimated]
        if points:
            points.append((self.search(space).middle(_heard(past)), ""))
        return [
            Recipe(
                f"c{n}",
                "score",
                (),
                self.ground(),
                args=ScoreArgs(recipe=space.recipe(point), on="validation", earlier=earlier).plain(),
                genome={"point": point},
                optional=True,
            )
            for n, (point, earlier) in enumerate(points)
        ]

    def winner(self, last: int, history: Past) -> Recipe | None:
        if not self.c.holdout:
            return None
        past = self.past(last, history)
        if self.finals(last, history):
            past = [[one for one in each if not one.estimated] for each in past]
            past = [*past, candidates(self.space(history), history, last + 1)]
        if not (found := best(past)):
            return None
        return self._score("winner", "winner", self.space(history).recipe(found.point), "test")

    def next(self, search: Search, past: Sequence[Sequence[Candidate]]) -> Points:
        if not self._strategy or self._strategy[0].number > len(past):
            self._strategy[:] = [CmaState(search)]
        return search.next(_heard(past), self._strategy[0])

    def generations(self, search: Search) -> int:
        return -(-self.c.max_fevals // search.population)

    def space(self, history: Past) -> Space:
        known = history[CHECK].metrics
        return Space(self.c.genome, int(known["layers"]), str(known["dtype"]))

    def search(self, space: Space) -> Search:
        start = space.start(self.c.seed if self.c.random_init else None)
        return Search(tuple(start), self.c.sigma0, self.c.population_size, self.c.seed)

    def candidates(self, round: int, points: Points, space: Space, past: Sequence[Sequence[Candidate]]) -> list[Recipe]:
        """Nothing is scored twice: a point with the recipe of an earlier one has its score."""
        known = {one.recipe: f"{one.generation}/c{one.index}" for each in past for one in each if not one.twin}
        rival = best(past) if self.c.fitness_from == "racing" else None
        how: dict[str, Any] = {"rival": rival.id} if rival else {}
        if self.c.fitness_from == "irt" and round > 1:
            how = {"few": KNOWN, "draw": round}
        found: list[Recipe] = []
        for n, point in enumerate(points):
            recipe, id = space.recipe(point), f"{round}/c{n}"
            twin = known.setdefault(digest_of(recipe), id)
            more: dict[str, Any] = {"genome": {"point": point}, "optional": True}
            if twin != id:
                there = (twin,) if twin.startswith(f"{round}/") else ()
                args = TwinArgs(twin=twin, on="validation").plain()
                found.append(Recipe(f"c{n}", "twin", (), (*self.ground(), *there), args=args, **more))
                continue
            merged = []
            if self.c.buffered:
                args = MergeArgs(recipe=recipe).plain()
                merged = [Recipe(f"m{n}", "merge", (), self.ground(), "tool", args, optional=True)]
            needs = (*self.ground(), *(f"{round}/{each.slot}" for each in merged))
            needs = (*needs, *([KNOWN] if "few" in how and round == 2 else []))
            args = ScoreArgs(recipe=recipe, on="validation", **how).plain()
            found += [*merged, Recipe(f"c{n}", "score", (), needs, args=args, **more)]
        return found

    def ground(self) -> tuple[str, ...]:
        """What round 0 makes: its check of everything, and on request the models in one file each."""
        names = self.c.models if self.c.reshard else []
        return CHECK, *(f"0/model-{n}" for n in range(len(names)))

    def _score(self, slot: str, role: str, recipe: dict[str, Any], on: EvalSplit) -> Recipe:
        args = ScoreArgs(recipe=recipe, on=on).plain()
        return Recipe(slot, "score", (), self.ground(), role, args, optional=True)


def _heard(past: Sequence[Sequence[Candidate]]) -> list[Generation]:
    return [Generation([one.point for one in each], [one.score for one in each]) for each in past]


def candidates(space: Space, history: Past, round: int) -> list[Candidate]:
    """A generation, all of it finished."""
    found = []
    for recipe in history.plan(round):
        if "point" in recipe.genome:
            member = history[f"{round}/{recipe.slot}"]
            point, twin = tuple(recipe.genome["point"]), recipe.task == "twin"
            came = member.metrics if member else {}
            how = {"given_up": bool(came.get("given_up")), "twin": twin, "estimated": "standard_error" in came}
            found.append(
                Candidate(round, int(recipe.slot[1:]), point, digest_of(space.recipe(point)), came.get("score"), **how)
            )
    return found


def digest_of(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(str(recipe).encode()).hexdigest()[:32]


def best(past: Sequence[Sequence[Candidate]]) -> Candidate | None:
    """The best score; of equal ones the first. One that was given up in a race is behind somebody."""
    good = [one for each in past for one in each if one.score is not None and not one.given_up]
    return min(good, key=_by_score, default=None)


def _by_score(one: Candidate) -> tuple[float, int, int]:
    """The best first, of equal ones the first that was tried."""
    return -(one.score or 0.0), one.generation, one.index

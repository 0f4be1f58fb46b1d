"""The search as a run: round 0 looks whether it can work, each round after it is a generation, the last one looks at
the questions that were held out."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet.recipe import Past, Recipe
from merge.evolve.search import CmaState, Generation, Search
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_space import Space
from merge.evolve.search_tasks import MergeArgs, ScoreArgs, TwinArgs

CHECK = "0/check"
Points = Sequence[Sequence[float]]


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


@dataclass(frozen=True)
class MergeSearch:
    c: SearchConfig
    _strategy: list[CmaState] = field(default_factory=list, compare=False)  # what was told some generations already

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round == 0:
            copies = [alone(name) for name in (self.c.models if self.c.reshard else [])]
            files = [
                Recipe(f"model-{n}", "merge", (), (CHECK,), "tool", MergeArgs(recipe=copy).plain())
                for n, copy in enumerate(copies)
            ]
            return [Recipe("check", "check", role="tool"), *files]
        space = self.space(history)
        search = self.search(space)
        last = self.generations(search)
        if round > last + 1 or (round == last + 1 and not self.c.holdout):
            return []
        past = [history.once("candidates", n, partial(candidates, space, history, n)) for n in range(1, round)]
        if round == last + 1:
            return self.finals(past, space)
        if past and best(past) is None:
            return []  # what no candidate of a generation can do, others cannot either
        points = self.next(search, past)[: self.c.max_fevals - (round - 1) * search.population]
        return [*self.generation(round, points, space, past), *(self.donors(space.dtype) if round == 1 else [])]

    def next(self, search: Search, past: Sequence[Sequence[Candidate]]) -> Points:
        if not self._strategy or self._strategy[0].number > len(past):
            self._strategy[:] = [CmaState(search)]
        told = [Generation([one.point for one in each], [one.score for one in each]) for each in past]
        return search.next(told, self._strategy[0])

    def generations(self, search: Search) -> int:
        return -(-self.c.max_fevals // search.population)

    def space(self, history: Past) -> Space:
        known = history[CHECK].metrics
        return Space(self.c.genome, int(known["layers"]), str(known["dtype"]))

    def search(self, space: Space) -> Search:
        start = space.start(self.c.seed if self.c.random_init else None)
        return Search(tuple(start), self.c.sigma0, self.c.population_size, self.c.seed)

    def generation(self, round: int, points: Points, space: Space, past: Sequence[Sequence[Candidate]]) -> list[Recipe]:
        """Nothing is scored twice: a point with the recipe of an earlier one has its score."""
        known = {one.recipe: f"{one.generation}/c{one.index}" for each in past for one in each if not one.twin}
        rival = best(past) if self.c.race else None
        found: list[Recipe] = []
        for n, point in enumerate(points):
            recipe, id = space.recipe(point), f"{round}/c{n}"
            twin = known.setdefault(digest_of(recipe), id)
            more: dict[str, Any] = {"genome": {"point": point}, "optional": True}
            if twin != id:
                there = (twin,) if twin.startswith(f"{round}/") else ()
                args = TwinArgs(twin=twin, on="tasks").plain()
                found.append(Recipe(f"c{n}", "twin", (), (*self.ground(), *there), args=args, **more))
                continue
            against = {"rival": f"{rival.generation}/c{rival.index}"} if rival else {}
            merged = []
            if self.c.buffered:
                args = MergeArgs(recipe=recipe).plain()
                merged = [Recipe(f"m{n}", "merge", (), self.ground(), "tool", args, optional=True)]
            needs = (*self.ground(), *(f"{round}/{each.slot}" for each in merged))
            args = ScoreArgs(recipe=recipe, on="tasks", **against).plain()
            found += [*merged, Recipe(f"c{n}", "score", (), needs, args=args, **more)]
        return found

    def ground(self) -> tuple[str, ...]:
        """What round 0 makes: a look at everything, and on request the models in one file each."""
        names = self.c.models if self.c.reshard else []
        return CHECK, *(f"0/model-{n}" for n in range(len(names)))

    def donors(self, dtype: str, held: bool = False) -> list[Recipe]:
        """Each model alone, to compare with."""
        return [self._look(f"donor-{n}", "given", alone(name, dtype), held) for n, name in enumerate(self.c.models)]

    def finals(self, past: Sequence[Sequence[Candidate]], space: Space) -> list[Recipe]:
        if (winner := best(past)) is None:
            return []
        return [self._look("winner", "winner", space.recipe(winner.point), True), *self.donors(space.dtype, True)]

    def _look(self, slot: str, role: str, recipe: dict[str, Any], held: bool) -> Recipe:
        args = ScoreArgs(recipe=recipe, on="held-out" if held else "tasks").plain()
        return Recipe(slot, "score", (), self.ground(), role, args, optional=True)


def alone(model: str, dtype: str = "") -> dict[str, Any]:
    """A model as it is; or in the numbers that candidates have."""
    rounded = {"out_dtype": dtype} if dtype else {}
    return {"merge_method": "passthrough", "models": [{"model": model}], **rounded}


def candidates(space: Space, history: Past, round: int) -> list[Candidate]:
    """A generation, all of it finished."""
    found = []
    for recipe in history.plan(round):
        if "point" in recipe.genome:
            member = history[f"{round}/{recipe.slot}"]
            point, twin = tuple(recipe.genome["point"]), recipe.task == "twin"
            came = (member.metrics.get("score"), bool(member.metrics.get("given_up"))) if member else (None, False)
            found.append(Candidate(round, int(recipe.slot[1:]), point, digest_of(space.recipe(point)), *came, twin))
    return found


def digest_of(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(str(recipe).encode()).hexdigest()[:32]


def best(past: Sequence[Sequence[Candidate]]) -> Candidate | None:
    """The best score; of equal ones the first. One that was given up in a race is behind somebody."""
    good = [one for each in past for one in each if one.score is not None and not one.given_up]
    return max(good, key=lambda one: (one.score, -one.generation, -one.index), default=None)

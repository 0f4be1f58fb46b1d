"""Plans of 4,096 slots: what they cost to make, to write, to read and to keep grows with their slots and no faster."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from diloco import DiLoCo
from edt import EDT
from edt_evomerge import EvoMerge
from fleet.plan_format import recipes_in, record_of
from fleet.recipe import Member, NotYet, Recipe, Strategy, check, name, round_and_slot
from fleet.store import REGISTER_LIMIT, proven
from merge.evolve.merge_search import MergeSearch
from merge.evolve.search_config import SearchConfig
from train.posttrain.posttrain_config import PosttrainConfig
from train.training_config import TrainConfig

LARGE, SECONDS = 4096, 30.0  # what a busy machine may take for a plan of so many slots


@dataclass
class Known:
    """A past in which everything planned is finished, with numbers made up for each member."""

    metrics: Callable[[str, Recipe], Mapping[str, Any]]
    plans: dict[int, tuple[Recipe, ...]] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)

    def __getitem__(self, id: str) -> Member:
        if id not in self.members:
            raise NotYet(id)
        return self.members[id]

    def round(self, round: int) -> list[Member]:
        return [self[name(round, recipe.slot)] for recipe in self.plan(round)]

    def plan(self, round: int) -> tuple[Recipe, ...]:
        return self.plans[round]

    def once(self, what: str, round: int, make: Callable[[], Any]) -> Any:
        return make()

    def take(self, round: int, recipes: tuple[Recipe, ...]) -> None:
        self.plans[round] = recipes
        for recipe in recipes:
            id = name(round, recipe.slot)
            if recipe.carried:
                old = self[recipe.parents[0]]
                self.members[id] = Member(id, old.origin, old.recipe, old.metrics, {})
            else:
                self.members[id] = Member(id, id, recipe, self.metrics(id, recipe), {})


def luck(id: str) -> float:
    round, slot = round_and_slot(id)
    return float(np.random.default_rng([round, *slot.encode()]).random())


def trained(id: str, recipe: Recipe) -> Mapping[str, Any]:
    return {"loss": luck(id)}


def asked(id: str, recipe: Recipe) -> Mapping[str, Any]:
    fit = luck(id)
    return {"fitness": fit, "objectives": json.dumps({"one": fit, "two": round(luck(id + "x"), 2)})}


def searched(id: str, recipe: Recipe) -> Mapping[str, Any]:
    return {"layers": 32, "dtype": "bfloat16", "score": luck(id)}


def diloco(size: int, **more: Any) -> Strategy:
    return DiLoCo(TrainConfig(population_size=size, **more))


def edt(size: int, **more: Any) -> Strategy:
    return EDT(TrainConfig(population_size=size, **more))


def breeding(size: int, selection: str, **more: Any) -> Strategy:
    keys = {"initial_population": ("a", "b"), "mutation_datasets": ("skill:one", "skill:two"), **more}
    if selection in ("pareto", "archive"):
        keys["fitness"] = ("one", "two")
    else:
        keys["fitness"] = ("one",)
    return EvoMerge(PosttrainConfig(population_size=size, selection=selection, **keys))


def searching(size: int) -> Strategy:
    genome = {"models": ("a", "b", "c"), "merge_method": "linear", "layer_granularity": 8}
    keys = {"genome": genome, "tasks": ({"name": "t"},), "population_size": size, "max_fevals": 10**6}
    return MergeSearch(SearchConfig(**keys))


KEPT = {"elitism": 2, "previous_generation": True}
METHODS: dict[str, tuple[Callable[[int], Strategy], Callable[[str, Recipe], Mapping[str, Any]]]] = {
    "diloco": (diloco, trained),
    "diloco, elastic": (lambda size: diloco(size, quorum=0.5), trained),
    "edt, hypercube": (edt, trained),
    "edt, large groups": (lambda size: edt(size, group_size=size // 2), trained),
    "edt, large groups by chance": (lambda size: edt(size, group_size=size // 2, selection="matching"), trained),
    **{
        f"edt, {rule}": (
            lambda size, rule=rule: edt(size, selection=rule, elitism=2, previous_generation=True),
            trained,
        )
        for rule in ("rank", "tournament", "random")
    },
    "edt, many parents": (lambda size: edt(size, selection="rank", group_size=256), trained),
    **{
        f"edt-evomerge, {rule}": (lambda size, rule=rule: breeding(size, rule), asked)
        for rule in ("rank", "tournament", "random", "matching", "pareto")
    },
    "edt-evomerge, archive": (lambda size: breeding(size, "archive", elitism=0), asked),
    "edt-evomerge, hurried": (lambda size: breeding(size, "matching", elitism=0), asked),
    "merge-search": (searching, searched),
}


@dataclass(frozen=True)
class Cost:
    bytes: int
    names: int  # of inputs, each list counted once
    seconds: float  # to plan, to write, to read and to check


def cost(strategy: Strategy, metrics: Callable[[str, Recipe], Mapping[str, Any]], rounds: int = 3) -> Cost:
    """The largest plan of a few rounds."""
    past, found = Known(metrics), list[Cost]()
    for round in range(rounds + 1):
        began = time.process_time()
        recipes = strategy.plan(round, past)
        data, _ = proven({"by": "somebody", **record_of(recipes)}, "plan")
        read = recipes_in(json.loads(data.split(b"\n")[0]))
        check(round, read)
        took = time.process_time() - began
        assert read == tuple(recipes)
        past.take(round, read)
        lists = {id(names): len(names) for recipe in read for names in (recipe.parents, recipe.needs)}
        found.append(Cost(len(data), sum(lists.values()), took))
    return max(found, key=lambda one: one.bytes)


QUICK = ("diloco", "edt, large groups", "edt-evomerge, hurried")


@pytest.mark.parametrize(
    "method", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.slow]) for each in METHODS]
)
def test_a_plan_costs_what_its_slots_cost(method):
    made, metrics = METHODS[method]
    small, large = cost(made(LARGE // 4), metrics), cost(made(LARGE), metrics)
    assert large.bytes < REGISTER_LIMIT
    assert large.bytes < 4.5 * small.bytes and large.names < 4.5 * small.names
    assert large.seconds < SECONDS

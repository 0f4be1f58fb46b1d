"""EDT, Evolutionary Distributed Training: a population of models that train, take an outer step each, and breed.

    for every generation:
        each child:  start at the mean of its parents' weights, with the mean of their optimizers' moments;
                     inherit the fittest parent's genome, mutated;
                     take INNER_STEPS on its slot's own batches;
                     take an outer step of its own (with OUTER_LR 1 and no momentum: stay where
                     training has led); be evaluated; publish weights and moments
        now and then the averaged model of the generation is evaluated, on text that selects nobody

Where everybody is a parent equally often (hypercube, matching), the population's mean weights and mean momentum go
the way of DiLoCo, though nobody ever waits for all others.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import own_loop_join
from fleet.recipe import AHEAD, Member, Past, Recipe, Unplannable, kept_as
from train.exchange_config import ExchangeConfig
from train.parent_selection import GROUPINGS, select_parents, unfitness
from train.recipe_arguments import (
    FIRST,
    ChildArgs,
    EvaluationArgs,
    ShardArgs,
    first_weights,
    last_of,
    round_zero,
    training_inputs,
    unique,
)

ALGORITHM = "edt"


@dataclass(frozen=True)
class EDT:
    c: ExchangeConfig

    def plan(self, generation: int, history: Past) -> list[Recipe]:
        if generation > self.c.max_generations:
            return []
        if generation == 0:
            return round_zero(self.c)
        # the newest generation that is surely finished when this one may be planned
        self.check_survivors(generation - AHEAD - 1, history)
        slots = range(self.c.population_size)
        if generation == 1:
            children = [self.child(k, 1, (first_weights(self.c, k),)) for k in slots]
        elif self.c.draws_parents:
            children = self.children_of_the_fit(generation, history)
        else:
            children = self.children_of_groups(generation, history)
        return [*children, *self.mean_parts(generation), *self.evaluation(generation)]

    def check_survivors(self, generation: int, history: Past) -> None:
        """Where slots may be absent, all of them might: of a generation that is finished, somebody has to be there."""
        if generation < 1 or self.c.quorum == 1:
            return
        members = [history[f"{generation}/m{k}"] for k in range(self.c.population_size)]
        if not any(members):
            why = f"nobody is left in generation {generation}: {members[0].absent}"
            raise Unplannable(f"{why}; an earlier one can be exported, and a new run begin with it")

    # -- everybody is a parent equally often ------------------------------------------------------------------------

    def group_slots(self, generation: int) -> dict[int, list[int]]:
        """The slots of each slot's group: its parents."""
        c = self.c
        return GROUPINGS[c.selects](generation, c.population_size, c.parents_of_a_child, self.rng(generation))

    def children_of_groups(self, generation: int, history: Past) -> list[Recipe]:
        """Whoever has the same parents has the same list of them: however large a group is, it is there once."""
        groups, made = self.groups(generation), defaultdict[tuple[str, ...], list[str]](list)
        for recipe in history.plan(generation - 1):
            if recipe.task == "mean-part":
                made[recipe.parents].append(f"{generation - 1}/{recipe.slot}")
        # no `before`: a slot is in its own group, so its last member is among the parents
        needs = {group: (*made[group], *training_inputs(self.c)) for group in groups.values()}
        return [self.child(k, generation, group, needs[group], parts=len(made[group])) for k, group in groups.items()]

    def groups(self, generation: int) -> dict[int, tuple[str, ...]]:
        """Each slot's parents by their names, in the order of the slots."""
        slots = self.group_slots(generation)
        groups = {group[0]: group for group in slots.values()}
        ids = {first: tuple(f"{generation - 1}/m{p}" for p in group) for first, group in groups.items()}
        return {k: ids[slots[k][0]] for k in range(self.c.population_size)}

    def mean_parts(self, generation: int) -> list[Recipe]:
        """Where the next generation begins: a group's mean is made once, in parts, and read by all of the group. A part
        is named after a member, whose worker will rather make it than others. Two have no use for that."""
        count = self.c.mean_parts
        if count < 2 or generation == self.c.max_generations:
            return []
        found, surplus = list[Recipe](), itertools.count(self.c.population_size)  # of groups with too few members
        for group in dict.fromkeys(self.groups(generation + 1).values()):
            slots = (int(id.rpartition("/m")[2]) for id in group)
            for part, number in zip(range(count), itertools.chain(slots, surplus), strict=False):
                args = ShardArgs(shard=part).plain()
                found.append(Recipe(f"mean-{number}", "mean-part", group, (FIRST,), "tool", args))
        return found

    # -- the fitter are parents more often --------------------------------------------------------------------------

    def children_of_the_fit(self, generation: int, history: Past) -> list[Recipe]:
        pool, slots = self.pool(generation, history), range(self.c.population_size)
        elite = [Recipe(f"m{k}", parents=(pool[k].id,)) for k in slots[: min(self.c.elitism, len(pool))]]
        parents = {k: self.pick_parents(pool, self.rng(generation, k)) for k in slots[len(elite) :]}
        children = [self.child(k, generation, ids) for k, ids in parents.items()]
        # with PREVIOUS_GENERATION, the generation before stays within reach for one more round
        carried = slots if self.c.previous_generation else ()
        return [*elite, *children, *(kept_as(f"p{k}", f"{generation - 1}/m{k}") for k in carried)]

    def pool(self, generation: int, history: Past) -> list[Member]:
        """The last generation, and with PREVIOUS_GENERATION the one before; the fittest first. DiLoCo's replicas and
        shards, which stand in the round that a fork of it goes on from, are called otherwise."""
        there = [recipe.slot for recipe in history.plan(generation - 1) if recipe.role in ("member", "kept")]
        members = [history[f"{generation - 1}/{slot}"] for slot in there if slot[0] in "mp" and slot[1:].isdigit()]
        once = {member.origin: member for member in members if member}
        return sorted(once.values(), key=lambda member: (unfitness(member.metrics), member.origin))

    def pick_parents(self, pool: Sequence[Member], rng: np.random.Generator) -> tuple[str, ...]:
        places = select_parents(self.c.selects, len(pool), self.c.parents_of_a_child, 2, rng)
        return tuple(pool[place].id for place in sorted(places))

    # -- recipes ----------------------------------------------------------------------------------------------------

    def child(
        self, k: int, generation: int, parents: tuple[str, ...], needs: tuple[str, ...] = (), **args: Any
    ) -> Recipe:
        before, steps = last_of(f"m{k}", generation), self.c.steps_in(generation)
        args = ChildArgs(round=generation, slot=k, steps=steps, before=before, on="validation", **args).plain()
        needs = needs or unique(before, *training_inputs(self.c), but=parents)
        return Recipe(f"m{k}", "child", parents, needs, args=args, optional=self.c.quorum < 1)

    def evaluation(self, generation: int) -> list[Recipe]:
        if generation % self.c.average_every and generation != self.c.max_generations:
            return []
        members = tuple(f"{generation}/m{k}" for k in range(self.c.population_size))
        args = EvaluationArgs(on="test").plain()
        return [Recipe("average", "mean", members, tuple(training_inputs(self.c)), "summary", args, optional=True)]

    def rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.c.seed, *key])


join = own_loop_join.joining(ALGORITHM, EDT)  # for a training loop of your own: docs/own-loop.md


def command() -> None:
    import edt_es
    import edt_evomerge
    from train.training_commands import run

    run(ALGORITHM, __doc__, EDT, edt_evomerge.METHOD, edt_es.METHOD)


if __name__ == "__main__":
    command()

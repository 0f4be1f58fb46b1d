"""EDT, Evolutionary Distributed Training: a population of models that train, take an outer step each, and breed.

    python edt.py --config evolution.json --workers 2

    for every generation:
        each child:  start at the mean of its parents' outer steps, with the mean of their momenta;
                     inherit the fittest parent's genome, mutated;
                     take INNER_STEPS on its slot's own batches;
                     take an outer step of its own; be evaluated; publish both
        now and then the averaged model of the generation is evaluated

Where everybody is a parent equally often (hypercube, matching), the population's mean weights and mean momentum go
the way of DiLoCo, though nobody ever waits for all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleet.recipe import AHEAD, Member, Past, Recipe, Unplannable, kept_as
from train.config import TrainConfig
from train.parent_selection import chosen
from train.pretraining_tasks import ChildArgs, LookArgs
from train.round_zero import first_weights, last_of, round_zero, tools, unique

ALGORITHM = "edt"


@dataclass(frozen=True)
class EDT:
    c: TrainConfig

    def plan(self, generation: int, history: Past) -> list[Recipe]:
        if generation > self.c.max_generations:
            return []
        if generation == 0:
            return round_zero(self.c)
        self.check_descent(generation - AHEAD - 1, history)
        slots = range(self.c.population_size)
        if generation == 1:
            children = [self.child(k, 1, (first_weights(self.c, k),)) for k in slots]
        elif self.c.selects_by_fitness:
            children = self.chosen(generation, history)
        else:
            children = self.in_families(generation)
        return [*children, *self.look(generation)]

    def check_descent(self, generation: int, history: Past) -> None:
        """Where slots may be absent, all of them might: of a generation that is finished, somebody has to be there."""
        if generation < 1 or self.c.quorum == 1:
            return
        members = [history[f"{generation}/m{k}"] for k in range(self.c.population_size)]
        if not any(members):
            why = f"nobody is left in generation {generation}: {members[0].absent}"
            raise Unplannable(f"{why}; an earlier one can be exported, and a new run begin with it")

    # -- everybody is a parent equally often ------------------------------------------------------------------------

    def families(self, generation: int) -> dict[int, list[int]]:
        """Each slot's parents: all slots of its group."""
        slots, size = range(self.c.population_size), self.c.parents_of_a_child
        found: dict[int, list[int]] = {}
        if self.c.selects == "hypercube":
            for k in slots:
                if k not in found:
                    group = hypercube(k, generation, self.c.population_size, size)
                    found |= dict.fromkeys(group, group)
            return found
        order = [int(k) for k in self.dice(generation).permutation(self.c.population_size)]
        groups = [sorted(order[begin : begin + size]) for begin in range(0, len(order), size)]
        return {k: group for group in groups for k in group}

    def in_families(self, generation: int) -> list[Recipe]:
        """Whoever has the same parents has the same list of them: however large a group is, it is there once."""
        families, needs = self.families(generation), tuple(tools(self.c))
        groups = {group[0]: tuple(f"{generation - 1}/m{p}" for p in group) for group in families.values()}
        children = [groups[families[k][0]] for k in range(self.c.population_size)]  # each has itself for a parent
        return [self.child(k, generation, parents, needs) for k, parents in enumerate(children)]

    # -- the fitter are parents more often --------------------------------------------------------------------------

    def chosen(self, generation: int, history: Past) -> list[Recipe]:
        pool = self.pool(generation, history)
        elite = [Recipe(f"m{k}", parents=(pool[k].id,)) for k in range(min(self.c.elitism, len(pool)))]
        carried = self.carried(generation)
        children = []
        for k in range(len(elite), self.c.population_size):
            parents = self.choose(pool, self.dice(generation, k))
            children.append(self.child(k, generation, parents))
        return [*elite, *children, *carried]

    def pool(self, generation: int, history: Past) -> list[Member]:
        """The last generation, and with PREVIOUS_GENERATION the one before; the fittest first."""
        bred = [recipe.slot for recipe in history.plan(generation - 1) if recipe.role in ("member", "kept")]
        members = [history[f"{generation - 1}/{slot}"] for slot in bred]
        once = {member.origin: member for member in members if member}
        return sorted(once.values(), key=lambda member: (member.metrics["loss"], member.origin))

    def carried(self, generation: int) -> list[Recipe]:
        """The generation before stays within reach as p0, p1, ... for one more round."""
        if not self.c.previous_generation:
            return []
        return [kept_as(f"p{k}", f"{generation - 1}/m{k}") for k in range(self.c.population_size)]

    def choose(self, pool: Sequence[Member], dice: np.random.Generator) -> tuple[str, ...]:
        return tuple(pool[i].id for i in sorted(chosen(self.c.selects, len(pool), self.c.parents_of_a_child, 2, dice)))

    # -- recipes ----------------------------------------------------------------------------------------------------

    def child(self, k: int, generation: int, parents: tuple[str, ...], needs: tuple[str, ...] = ()) -> Recipe:
        before = last_of(f"m{k}", generation)
        steps = self.c.steps_in(generation)
        args = ChildArgs(round=generation, slot=k, steps=steps, before=before, on="held-out").plain()
        needs = needs or unique(before, *tools(self.c), but=parents)
        return Recipe(f"m{k}", "child", parents, needs, args=args, optional=self.c.quorum < 1)

    def look(self, generation: int) -> list[Recipe]:
        if generation % self.c.average_every and generation != self.c.max_generations:
            return []
        members = tuple(f"{generation}/m{k}" for k in range(self.c.population_size))
        args = LookArgs(on="held-out").plain()
        return [Recipe("average", "mean", members, tuple(tools(self.c)), "summary", args, optional=True)]

    def dice(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.c.seed, *key])


def hypercube(k: int, generation: int, population: int, size: int) -> list[int]:
    """The slots that differ from k only in this generation's directions; after a few generations everybody's work has
    reached everybody."""
    directions, wide = population.bit_length() - 1, size.bit_length() - 1
    bits = [1 << ((generation * wide + i) % directions) for i in range(wide)] if directions else []
    group = {k}
    for bit in bits:
        group |= {member ^ bit for member in group}
    return sorted(group)


if __name__ == "__main__":
    from edt_evomerge import METHOD
    from train.pretrain_command import run

    run(ALGORITHM, __doc__, EDT, METHOD)

"""EDT-EvoMerge: a population of fine-tuned language models that compete, merge, and learn.

python edt.py --config configs/posttrain.json

the founders: the given models, evaluated; copies of them, fine-tuned, where the population has room for more
for every generation:
    everybody answers the same questions, drawn anew for this generation
    the best go on unchanged
    each other place: parents are chosen, merged layer by layer, and the child learns from data that its genome
                      chooses, which mixes its parents' genomes and is sometimes mutated
at the end the winner, and every model that it all began with, answer questions that nobody was chosen by
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet.recipe import Member, Past, Recipe
from train.breeding import method
from train.posttrain import dna
from train.posttrain.config import PosttrainConfig
from train.posttrain.fitness import rival_of
from train.posttrain.selection import Rival, couple, matched, ordered

ALGORITHM = "edt-evomerge"


@dataclass(frozen=True)
class EvoMerge:
    c: PosttrainConfig

    def plan(self, generation: int, history: Past) -> list[Recipe]:
        if generation == 0:
            return self.ground()
        if generation == 1:
            return self.looked_at(1, self.founders())
        if generation <= self.c.max_generations:
            return self.looked_at(generation, self.bred(generation, history))
        return self.finals(generation, history) if generation == self.c.max_generations + 1 else []

    # -- what a run needs once ----------------------------------------------------------------------------------------

    def ground(self) -> list[Recipe]:
        """The given models in one form, and the data as tokens."""
        inits = [
            Recipe(f"init-{n}", ("0/init-0",) if n else (), {"kind": "init", "entry": n, "name": short(name), "of": []})
            for n, name in enumerate(self.c.initial_population)
        ]
        data = [
            Recipe(f"data-{n}", ("0/init-0",), {"kind": "data", "source": n, "of": []})
            for n in range(len(self.c.mutation_datasets))
        ]
        return [*inits, *data]

    def data(self) -> list[str]:
        return [f"0/data-{n}" for n in range(len(self.c.mutation_datasets))]

    # -- generations --------------------------------------------------------------------------------------------------

    def founders(self) -> list[Recipe]:
        """Each given model at least once where it fits; who stands there again learns something of his own."""
        given, size = len(self.c.initial_population), self.c.population_size
        more = [int(n) for n in self.dice(1).integers(given, size=max(0, size - given))]
        chosen = [*range(given), *more] if given <= size else sorted(map(int, self.dice(1).permutation(given)[:size]))
        members = []
        for k, n in enumerate(chosen):
            if k < given or self.c.mutation == "none":
                members.append(Recipe(f"m{k}", (f"0/init-{n}",)))
            else:
                members.append(self.child(1, k, [f"0/init-{n}"], dna.founding(self.c, self.dice(1, k))))
        return members

    def bred(self, generation: int, history: Past) -> list[Recipe]:
        if self.c.selection == "matching" and not self.c.elitism:  # nobody waits for everybody's fitness
            ids = [f"{generation - 1}/m{k}" for k in range(self.c.population_size)]
            families = [matched(ids, k, self.dice(generation)) for k in range(self.c.population_size)]
            genomes = {id: self.genome(history.plan(generation - 1), id) for id in ids}
            return [self.bred_of(generation, k, family, genomes) for k, family in enumerate(families)]
        order = self.order(generation - 1, history)
        genomes = {one.id: history[one.id].recipe.genome or dna.plain(self.c) for one in order}
        elite = [Recipe(f"m{k}", (one.id,)) for k, one in enumerate(order[: self.c.elitism])]
        children = [
            self.bred_of(generation, k, self.parents(generation, k, order), genomes)
            for k in range(len(elite), self.c.population_size)
        ]
        return [*elite, *children]

    def parents(self, generation: int, k: int, order: Sequence[Rival]) -> list[str]:
        if self.c.selection == "matching":
            return matched([one.id for one in order], k, self.dice(generation))
        return couple(order, self.c.selection, 2, self.c.tournament_size, self.dice(generation, k))

    def bred_of(self, generation: int, k: int, parents: Sequence[str], genomes: Mapping[str, dna.Genome]) -> Recipe:
        genome = dna.child(self.c, [genomes[id] for id in parents], self.dice(generation, k, 2))
        return self.child(generation, k, list(dict.fromkeys(parents)), genome)

    def child(self, generation: int, k: int, parents: list[str], genome: dna.Genome) -> Recipe:
        technique = str(self.c.crossover["method"]) if len(parents) > 1 else "copy"
        merge = {"kind": "child", "of": parents, "technique": technique}
        train = {"how": self.c.mutation, "round": generation, "slot": k} if self.c.mutation != "none" else {}
        needed = (*parents, "0/init-0", *self.data())
        return Recipe(
            f"m{k}", tuple(dict.fromkeys(needed)), merge, train, self.questions(generation), "weights", genome
        )

    def looked_at(self, generation: int, members: list[Recipe]) -> list[Recipe]:
        """Who was not made in this generation answers its questions, too."""
        looks = [
            Recipe(
                member.slot.replace("m", "look-"),
                tuple(dict.fromkeys((*member.parents, "0/init-0", *self.data()))),
                {"kind": "look", "at": member.parents[0], "of": []},
                {},
                self.questions(generation),
                "nothing",
            )
            for member in members
            if member.carried
        ]
        return [*members, *looks]

    def finals(self, generation: int, history: Past) -> list[Recipe]:
        best = self.order(generation - 1, history)[0].id
        return [
            self.judged("winner", best),
            *(self.judged(f"start-{n}", f"0/init-{n}") for n in range(len(self.c.initial_population))),
        ]

    def judged(self, slot: str, id: str) -> Recipe:
        of = [id] if slot == "winner" else []
        needed = tuple(dict.fromkeys((id, "0/init-0", *self.data())))
        return Recipe(slot, needed, {"kind": "look", "at": id, "of": of}, {}, {"on": "judging"}, "nothing")

    # -- who is how good ----------------------------------------------------------------------------------------------

    def order(self, generation: int, history: Past) -> list[Rival]:
        """A generation by its fitness, the best first."""
        found = []
        for recipe in history.plan(generation):
            if recipe.slot[0] == "m" and (member := self.measured(generation, recipe, history)):
                found.append(rival_of(self.c, f"{generation}/{recipe.slot}", member.metrics))
        return ordered(found, self.c.selection == "pareto")

    def measured(self, generation: int, recipe: Recipe, history: Past) -> Member:
        slot = recipe.slot.replace("m", "look-") if recipe.carried else recipe.slot
        return history[f"{generation}/{slot}"]

    def genome(self, plan: Sequence[Recipe], id: str) -> dna.Genome:
        """A given model has none of its own yet."""
        recipe = next(recipe for recipe in plan if id.endswith(f"/{recipe.slot}"))
        return recipe.genome or dna.plain(self.c)

    def questions(self, generation: int) -> dict[str, Any]:
        return {"on": "choosing", "generation": generation}

    def dice(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.c.seed, *key])


def short(model: str) -> str:
    """Its name without the way to it."""
    return model.rstrip("/").rpartition("/")[2]


METHOD = method(ALGORITHM, __doc__ or "", EvoMerge)

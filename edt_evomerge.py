"""EDT-EvoMerge: a population of fine-tuned language models that compete, merge, and learn.

    the first members: the given models, evaluated; copies of them, fine-tuned, where the population has room for more
    for every generation:
        everybody answers the same questions, drawn anew for this generation
        the best go on unchanged; the best so far is never lost
        each other place: parents are chosen, merged layer by layer, and the child learns from data that its
                          genome chooses, which mixes its parents' genomes and is sometimes mutated
    at the end the winner, and every model that it all began with, answer held-out questions

docs/post-training.md explains it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet.recipe import Past, Recipe, kept_as, round_and_slot
from train.fitness_config import FINALISTS, KNOWN
from train.member import posttraining_genome
from train.parent_selection import (
    RULES,
    Rival,
    archived,
    attracted,
    by_fitness,
    exploited,
    matched,
    select_parents,
    spans,
)
from train.posttrain import rollout_recipes
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_fitness import rival_of
from train.recipe_arguments import FIRST, EvaluationArgs, InitArgs, PosttrainChildArgs, SourceArgs, unique
from train.training_commands import breeding

ALGORITHM = "edt-evomerge"


@dataclass(frozen=True)
class EvoMerge:
    c: PosttrainConfig

    def plan(self, generation: int, history: Past) -> list[Recipe]:
        if generation == 0:
            return self.round_zero()
        if generation == 1:
            return self.with_rollouts_and_looks(1, self.first_members(), history)
        last = self.c.max_generations
        if generation <= last:
            members = self.with_rollouts_and_looks(generation, self.children(generation, history), history)
            return [*members, *rollout_recipes.carried(self.c, history.plan(generation - 1), generation)]
        ending = [self.finals] if self.asks_few(last) else []
        ending = [*ending, self.final_evaluations]
        return ending[generation - last - 1](generation, history) if generation <= last + len(ending) else []

    # -- what a run needs once ----------------------------------------------------------------------------------------

    def round_zero(self) -> list[Recipe]:
        """The given models in one form, and the data as tokens."""
        inits = [InitArgs(entry=n, name=short_name(name)).plain() for n, name in enumerate(self.c.models)]
        data = [SourceArgs(source=n, name=name).plain() for n, name in enumerate(posttraining_genome.names(self.c))]
        return [
            *(Recipe(f"init-{n}", "init", (), (FIRST,) if n else (), "given", args) for n, args in enumerate(inits)),
            *(Recipe(f"data-{n}", "data", (), (FIRST,), "tool", args) for n, args in enumerate(data)),
        ]

    def needs(self, parents: Sequence[str], base: str = "") -> tuple[str, ...]:
        """What all need beside their parents: the first model's tokenizer, and the data."""
        data = (f"0/data-{n}" for n in range(len(self.c.mutation_datasets)))
        return unique(base, FIRST, *data, but=parents)

    # -- generations --------------------------------------------------------------------------------------------------

    def first_members(self) -> list[Recipe]:
        """Each given model at least once where it fits; who stands there again learns something of his own."""
        given, size = len(self.c.initial_population), self.c.population_size
        more = [int(n) for n in self.rng(1).integers(given, size=max(0, size - given))]
        chosen = [*range(given), *more] if given <= size else sorted(map(int, self.rng(1).permutation(given)[:size]))
        members = []
        for k, n in enumerate(chosen):
            if k < given or self.c.mutation == "none":
                members.append(Recipe(f"m{k}", parents=(f"0/init-{n}",)))
            else:
                members.append(
                    self.child(1, k, (f"0/init-{n}",), posttraining_genome.first_genome(self.c, self.rng(1, k)))
                )
        return members

    def children(self, generation: int, history: Past) -> list[Recipe]:
        genomes = self.genomes(generation - 1, history)
        if self.plans_ahead:
            ids = [f"{generation - 1}/m{k}" for k in range(self.c.population_size)]
            pairs = [matched(ids, k, self.rng(generation)) for k in range(self.c.population_size)]
            return [self.child_of(generation, k, pair, genomes, history) for k, pair in enumerate(pairs)]
        order = self.order(generation - 1, history)
        if self.c.selection == "pbt":
            return [*self.exploiting(generation, order, genomes, history), *self.kept(generation, history, ())]
        best = enumerate(order[: self.c.elitism])
        elite = [Recipe(f"m{k}", parents=(one.id,), genome=genomes[one.id]) for k, one in best]
        kept = self.archive(order, genomes) if self.c.archives else self.kept(generation, history, elite)
        rival = ""
        if self.c.fitness_from == "racing":
            fittest = self.best(generation - 1, history)
            there = next(one.slot for one in (*elite, *kept) if one.parents == (fittest,))
            rival = f"{generation}/{evaluation_of(there)}"
        children = [
            self.child_of(generation, k, self.parents(generation, k, order), genomes, history, rival)
            for k in range(len(elite), self.c.population_size)
        ]
        return [*elite, *children, *kept]

    def kept(self, generation: int, history: Past, elite: Sequence[Recipe]) -> list[Recipe]:
        """The fittest so far, if it has no place yet."""
        fittest = self.best(generation - 1, history)
        return [] if any(one.parents == (fittest,) for one in elite) else [kept_as("best", fittest)]

    def archive(self, order: Sequence[Rival], genomes: Mapping[str, posttraining_genome.Genome]) -> list[Recipe]:
        """The fittest of each cell, in places of their own; the fittest of all is one of them."""
        ids = [one.id for one in order]
        return [Recipe(f"cell-{n}", parents=(id,), role="kept", genome=genomes[id]) for n, id in enumerate(ids)]

    def exploiting(
        self,
        generation: int,
        order: Sequence[Rival],
        genomes: Mapping[str, posttraining_genome.Genome],
        history: Past,
    ) -> Iterator[Recipe]:
        """Population based training: the worst become the best ones' copies with changed genes."""
        ids = [one.id for one in order]
        for k in range(self.c.population_size):
            own, rng = f"{generation - 1}/m{k}", self.rng(generation, k)
            parent = exploited(ids, own, rng)
            genome = genomes[parent] if parent == own else posttraining_genome.mutated(self.c, genomes[parent], rng)
            yield self.child(generation, k, (parent,), genome, self.others_rollouts(generation, k, history))

    @property
    def plans_ahead(self) -> bool:
        """Everybody is a parent equally often and nobody goes on unchanged: nobody waits for all others' fitness."""
        return self.c.selection == "matching" and not self.c.elitism

    def parents(self, generation: int, k: int, order: Sequence[Rival]) -> list[str]:
        if self.c.selection == "matching":
            return matched(sorted(one.id for one in order), k - self.c.elitism, self.rng(generation))
        rng, alone = self.rng(generation, k), self.c.mates == "attraction"
        picked = select_parents(self.c.selection, len(order), 1 if alone else 2, self.c.tournament_size, rng)
        if alone:
            picked.append(attracted(order, picked[0], rng))
        return [order[n].id for n in picked]

    def child_of(
        self,
        generation: int,
        k: int,
        parents: Sequence[str],
        genomes: Mapping[str, posttraining_genome.Genome],
        history: Past,
        rival: str = "",
    ) -> Recipe:
        genome = posttraining_genome.child(self.c, [genomes[id] for id in parents], self.rng(generation, k, 2))
        return self.child(generation, k, unique(*parents), genome, self.others_rollouts(generation, k, history), rival)

    def others_rollouts(self, generation: int, k: int, history: Past) -> tuple[str, ...]:
        """Whose rollouts a child learns from besides its own."""
        return rollout_recipes.shared(self.c, history.plan(generation - 1), generation - 1, k)

    def child(
        self,
        generation: int,
        k: int,
        parents: tuple[str, ...],
        genome: posttraining_genome.Genome,
        others: tuple[str, ...] = (),
        rival: str = "",
    ) -> Recipe:
        technique = str(self.c.crossover["method"]) if len(parents) > 1 else "copy"
        base = f"0/init-{self.c.models.index(self.c.base_model)}" if self.c.base_model else ""
        learns_by = self.c.mutation if self.c.mutation != "none" else ""
        own = f"{generation}/{rollout_recipes.slot_of(k)}" if learns_by == "grpo" else ""
        asked = {**self.asked(generation), **({"rival": rival} if rival else {})}
        asked = {**asked, **({"own_rollouts_id": own, "others_rollouts_ids": [*others]} if own else {})}
        args = PosttrainChildArgs(**asked, slot=k, technique=technique, base=base, learns_by=learns_by)
        more = (*self.calibration_ids(generation), *((rival,) if rival else ()))
        needs = (*unique(own, *others), *self.needs(parents, base), *more)
        return Recipe(f"m{k}", "child", parents, needs, args=args.plain(), genome=genome)

    def with_rollouts_and_looks(self, generation: int, members: list[Recipe], history: Past) -> list[Recipe]:
        """The plan of a generation: before children that learn from rewards, their `rollouts`; for each member that is
        carried over, a `look` at this generation's questions, in a race before the children."""
        asked, carried = EvaluationArgs(**self.asked(generation)), [one for one in members if one.carried]
        looks = [self.evaluation(evaluation_of(m.slot), m.parents[0], asked, generation=generation) for m in carried]
        answering = [
            rollout_recipes.of_child(child, self.needs) for child in members if child.args.get("own_rollouts_id")
        ]
        if self.c.fitness_from == "racing":
            return [*carried, *looks, *answering, *(one for one in members if not one.carried)]
        calibration = [self.calibration(history)] if self.calibration_ids(generation) else []
        return [*calibration, *answering, *members, *looks]

    def evaluation(self, slot: str, id: str, asked: EvaluationArgs, role: str = "look", generation: int = 0) -> Recipe:
        return Recipe(slot, "look", (id,), (*self.needs((id,)), *self.calibration_ids(generation)), role, asked.plain())

    def asked(self, generation: int) -> dict[str, Any]:
        few = {"calibration": KNOWN} if self.asks_few(generation) else {}
        return {"on": "validation", "generation": generation, **few}

    def asks_few(self, generation: int) -> bool:
        return self.c.fitness_from == "irt" and generation > 1

    def calibration_ids(self, generation: int) -> tuple[str, ...]:
        """The second generation reads the calibration made beside it; later ones need not wait for it."""
        return (KNOWN,) if self.asks_few(generation) and generation == 2 else ()

    def calibration(self, history: Past) -> Recipe:
        there = [f"1/{recipe.slot}" for recipe in history.plan(1) if recipe.task in ("child", "look")]
        return Recipe(round_and_slot(KNOWN)[1], "calibrate", (), (*there,), "tool")

    def finals(self, generation: int, history: Past) -> list[Recipe]:
        """The best by their estimates answer all questions."""
        last = generation - 1
        at = {f"{last}/{recipe.slot}": answers_of(recipe) for recipe in history.plan(last)}
        best = [one.id for one in by_fitness(self.rivals(last, history))[:FINALISTS]]
        asked = {id: EvaluationArgs(on="validation", generation=last, earlier=f"{last}/{at[id]}") for id in best}
        looks = [self.evaluation(evaluation_of(round_and_slot(id)[1]), id, asked[id]) for id in best]
        return [*(kept_as(round_and_slot(id)[1], id) for id in best), *looks]

    def final_evaluations(self, generation: int, history: Past) -> list[Recipe]:
        best, asked = self.best(generation - 1, history), EvaluationArgs(on="test")
        starts = range(len(self.c.initial_population))
        return [
            self.evaluation("winner", best, asked, "winner"),
            *(self.evaluation(f"start-{n}", f"0/init-{n}", asked) for n in starts),
        ]

    # -- who is how good ----------------------------------------------------------------------------------------------

    def order(self, generation: int, history: Past) -> list[Rival]:
        """A generation by its fitness, the best first; of an archive, at most as many as have room in a generation."""
        found = [one for one in self.rivals(generation, history) if not one.id.endswith("/best")]
        rule = RULES.get(self.c.selection)
        if self.c.archives:
            over = history.once("spans", 1, lambda: spans(self.rivals(1, history)))
            return archived(found, over, self.c.archive_steps)[: self.c.population_size]
        return rule.order(found) if rule else by_fitness(found)

    def best(self, generation: int, history: Past) -> str:
        """The fittest so far: who was it before answers this generation's questions, too."""
        return by_fitness(self.rivals(generation, history))[0].id

    def rivals(self, generation: int, history: Past) -> list[Rival]:
        found = []
        for recipe in history.plan(generation):
            if recipe.role in ("member", "kept"):
                metrics = history[f"{generation}/{answers_of(recipe)}"].metrics
                found.append(rival_of(self.c, f"{generation}/{recipe.slot}", metrics))
        return found

    def genomes(self, generation: int, history: Past) -> dict[str, posttraining_genome.Genome]:
        """Of a generation; a given model has none of its own yet."""
        plain = posttraining_genome.unmutated(self.c)
        return {f"{generation}/{recipe.slot}": recipe.genome or plain for recipe in history.plan(generation)}

    def rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.c.seed, *key])


def evaluation_of(slot: str) -> str:
    """Where a member that was made before answers."""
    return f"look-{slot}"


def answers_of(recipe: Recipe) -> str:
    """Where a generation's questions were answered by one of its members."""
    return evaluation_of(recipe.slot) if recipe.carried else recipe.slot


def short_name(model: str) -> str:
    """Its name without the way to it."""
    return model.rstrip("/").rpartition("/")[2]


METHOD = breeding(ALGORITHM, __doc__, EvoMerge)

if __name__ == "__main__":
    from fleet.start import main

    main(METHOD)

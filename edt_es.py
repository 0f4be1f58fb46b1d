"""Evolution strategies: one language model that learns from rewards, by random neighbours, without gradients.

    for every round:
        each pair:  the round's model, perturbed by its own random numbers, and by their opposites, answers the
                    round's questions; what is published is two rewards
        every worker moves the model that it has in memory by the list of all rewards: towards those that were better
    every PUBLISH_EVERY rounds: the weights are published, and answer held-out questions
    at the end the last model, and the one that it all began with, answer held-out questions

docs/rl.md explains it.
"""

from dataclasses import dataclass

from edt_evomerge import EvoMerge
from fleet.recipe import Past, Recipe, kept_as
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import ES
from train.recipe_arguments import FIRST, EvaluationArgs, PerturbationArgs, PublishArgs, StepArgs, unique
from train.training_commands import breeding

MODEL, STEP = "model", "step"


@dataclass(frozen=True)
class EvolutionStrategies:
    c: PosttrainConfig

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round == 0:
            return self._like.round_zero()
        if round <= self.c.max_generations:
            return self.round(round)
        return self.final_evaluations(round) if round == self.c.max_generations + 1 else []

    def round(self, round: int) -> list[Recipe]:
        """Nothing here depends on rewards: rounds are planned ahead."""
        base, since = self.base(round), self.since(round)
        pairs = self.c.population_size // 2
        named = {"base": base, **({"since": since} if since else {})}
        needs = unique(since, base, *self._like.needs(()))
        members = [
            Recipe(f"p{k}", "pair", (), needs, "tool", PerturbationArgs(generation=round, pair=k, **named).plain())
            for k in range(pairs)
        ]
        rewards = tuple(f"{round}/{each.slot}" for each in members)
        if self.publishes(round):
            args = PublishArgs(on="validation", generation=round, pairs=pairs, **named).plain()
            return [*members, Recipe(MODEL, "publish", (base,), (*rewards, *unique(*needs, but=(base,))), args=args)]
        args = StepArgs(pairs=pairs, **({"since": since} if since else {})).plain()
        step = Recipe(STEP, "step", (), (*rewards, *unique(since)), "tool", args)
        return [*members, step, *([kept_as(MODEL, base)] if base != FIRST else [])]

    def publishes(self, round: int) -> bool:
        return round % self.c.of_es.publish_every == 0 or round == self.c.max_generations

    def base(self, round: int) -> str:
        """Whose weights were published last before this round."""
        return f"{round - 1}/{MODEL}" if round > self.c.of_es.publish_every else FIRST

    def since(self, round: int) -> str:
        """What knows the rewards of the rounds since then, if there are any."""
        return f"{round - 1}/{STEP}" if round > 1 and not self.publishes(round - 1) else ""

    def final_evaluations(self, round: int) -> list[Recipe]:
        asked = EvaluationArgs(on="test")
        return [
            self._like.evaluation("winner", f"{round - 1}/{MODEL}", asked, "winner"),
            self._like.evaluation("start-0", FIRST, asked),
        ]

    @property
    def _like(self) -> EvoMerge:
        """What a population of one needs, too."""
        return EvoMerge(self.c)


METHOD = breeding(ES, __doc__, EvolutionStrategies, "member.es_tasks")

if __name__ == "__main__":
    from fleet.start import main

    main(METHOD)

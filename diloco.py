"""DiLoCo: replicas train on their own data for many steps, then one outer step brings their changes together.

    for every round:
        each replica:  start at the global model; take INNER_STEPS on its own batches; publish the change
        each shard:    average the replicas' changes in its range of the model; take a step of Nesterov momentum
        the global model, which is all shards together, is evaluated

With OVERLAP nobody waits for a disk that takes no longer than training: two halves of the replicas take turns, and
while one trains, the other's changes come together; or, with FRAGMENTS, all train on while a part's do.
docs/exchange.md explains it.
"""

from dataclasses import dataclass
from functools import partial

import own_loop_join
from fleet.recipe import Past, Recipe, kept_as
from train.exchange_config import ExchangeConfig
from train.recipe_arguments import (
    EvaluationArgs,
    ShardArgs,
    Turn,
    first_weights,
    last_of,
    round_zero,
    shards_in,
    training_inputs,
    unique,
)

ALGORITHM = "diloco"
LATE = "late"  # slots of shards as they were before this round
SHARD, HALF = "shard", "half"  # tasks: a range of the model after all of a round have come together, or half of them


@dataclass(frozen=True)
class DiLoCo:
    c: ExchangeConfig

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round > self.c.max_generations:
            return []
        if round == 0:
            return [*round_zero(self.c, one_start=True), *map(self.first_shard, range(self.c.shard_count))]
        shards, plan = range(shards_in(history.plan(0))), list[Recipe]()
        exchanged = self.c.exchanged_in(round, len(shards))
        for slots, begin, old, new in self.turns(round, history, shards):
            replicas = [self.replica(k, round, begin) for k in slots]
            changes = tuple(f"{round}/{replica.slot}" for replica in replicas)
            step = partial(self.shard, new, changes)
            plan += [*replicas, *((step if s in exchanged else self.carried)(s, f"{old}-{s}") for s in shards)]
        if self.c.comes_late:
            plan += (kept_as(f"{LATE}-{s}", f"{round - 1}/{SHARD}-{s}") for s in exchanged)
        return [*plan, self.evaluation(round, len(shards))]

    def turns(self, round: int, history: Past, shards: range) -> list[tuple[range, tuple[str, ...], str, str]]:
        """Who trains from which shards, and which ones their changes make others of."""
        slots, last, before = range(self.c.population_size), f"{round - 1}/{SHARD}", history.plan(round - 1)
        if not self.c.in_halves:
            late = {recipe.slot for recipe in before} if self.c.comes_late else set[str]()  # none in a fork's first one
            names = (f"{LATE if f'{LATE}-{s}' in late else SHARD}-{s}" for s in shards)
            return [(slots, tuple(f"{round - 1}/{each}" for each in names), last, SHARD)]
        halved = any(recipe.task == HALF for recipe in before)
        first = f"{round - 1}/{HALF}" if halved else last  # what the other half has learned meanwhile is not in it
        from_first, from_last = (tuple(f"{each}-{s}" for s in shards) for each in (first, last))
        return [(slots[::2], from_first, last, HALF), (slots[1::2], from_last, f"{round}/{HALF}", SHARD)]

    def replica(self, k: int, round: int, shards: tuple[str, ...]) -> Recipe:
        before = last_of(f"replica-{k}", round)
        turn = Turn(round=round, slot=k, steps=self.c.steps_in(round), before=before)
        return Recipe(
            f"replica-{k}", "replica", shards, unique(before, *training_inputs(self.c)),
            args=turn.plain(), optional=self.c.quorum < 1,
        )  # fmt: skip

    def shard(self, task: str, changes: tuple[str, ...], s: int, old: str) -> Recipe:
        return Recipe(f"{task}-{s}", task, (*changes, old), args=ShardArgs(shard=s, old=old).plain())

    def carried(self, s: int, old: str) -> Recipe:
        """Of a fragment whose turn it is not."""
        return Recipe(f"{SHARD}-{s}", parents=(old,))

    def first_shard(self, s: int) -> Recipe:
        return Recipe(f"shard-{s}", "cut", (first_weights(self.c),), args=ShardArgs(shard=s).plain())

    def evaluation(self, round: int, shards: int) -> Recipe:
        needs, args = tuple(training_inputs(self.c)), EvaluationArgs(on="test").plain()
        whole = tuple(f"{round}/{SHARD}-{s}" for s in range(shards))
        return Recipe("global", "global", whole, needs, "summary", args, optional=True)


join = own_loop_join.joining(ALGORITHM, DiLoCo)  # for a training loop of your own: docs/own-loop.md


def command() -> None:
    from train.training_commands import run

    run(ALGORITHM, __doc__, DiLoCo)


if __name__ == "__main__":
    command()

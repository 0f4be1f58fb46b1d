"""DiLoCo: replicas train on their own data for many steps, then one outer step brings their changes together.

python diloco.py --config evolution.json --workers 2

for every round:
    each replica:  start at the global model; take INNER_STEPS on its own batches; publish the change
    each shard:    average the replicas' changes in its range of the model; take a step of Nesterov momentum
    the global model, which is all shards together, is evaluated
"""

from dataclasses import dataclass

from fleet.recipe import Past, Recipe
from train.config import TrainConfig
from train.training_recipes import (
    EvaluationArgs,
    ShardArgs,
    Turn,
    first_weights,
    last_of,
    round_zero,
    shards_in,
    tools,
    unique,
)

ALGORITHM = "diloco"


@dataclass(frozen=True)
class DiLoCo:
    c: TrainConfig

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round > self.c.max_generations:
            return []
        if round == 0:
            return [*round_zero(self.c, one_start=True), *map(self.first_shard, range(self.c.shard_count))]
        count = shards_in(history.plan(0))
        replicas = [self.replica(k, round, count) for k in range(self.c.population_size)]
        changes = tuple(f"{round}/{replica.slot}" for replica in replicas)
        shards = [self.shard(s, round, changes) for s in range(count)]
        return [*replicas, *shards, self.evaluation(round, count)]

    def replica(self, k: int, round: int, shards: int) -> Recipe:
        before = last_of(f"replica-{k}", round)
        turn = Turn(round=round, slot=k, steps=self.c.steps_in(round), before=before)
        return Recipe(
            f"replica-{k}", "replica", self.shards(round - 1, shards), unique(before, *tools(self.c)),
            args=turn.plain(), optional=self.c.quorum < 1,
        )  # fmt: skip

    def shard(self, s: int, round: int, changes: tuple[str, ...]) -> Recipe:
        old = f"{round - 1}/shard-{s}"
        return Recipe(f"shard-{s}", "shard", (*changes, old), args=ShardArgs(shard=s, old=old).plain())

    def first_shard(self, s: int) -> Recipe:
        return Recipe(f"shard-{s}", "cut", (first_weights(self.c),), args=ShardArgs(shard=s).plain())

    def evaluation(self, round: int, shards: int) -> Recipe:
        needs, args = tuple(tools(self.c)), EvaluationArgs(on="held-out").plain()
        return Recipe("global", "global", self.shards(round, shards), needs, "summary", args, optional=True)

    def shards(self, round: int, count: int) -> tuple[str, ...]:
        return tuple(f"{round}/shard-{s}" for s in range(count))


if __name__ == "__main__":
    from train.training_commands import run

    run(ALGORITHM, __doc__, DiLoCo)

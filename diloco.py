"""DiLoCo: replicas train on their own data for many steps, then one outer step brings their changes together.

python diloco.py --config evolution.json --workers 2

for every round:
    each replica:  start at the global model; take INNER_STEPS of AdamW on its own batches; publish the change
    each shard:    average the replicas' changes in its range of the model; take a step of Nesterov momentum
    the global model, which is all shards together, is evaluated
"""

from dataclasses import dataclass

from fleet.recipe import Past, Recipe
from train.config import TrainConfig
from train.groundwork import first_weights, ground, last_of, tools, unique

ALGORITHM = "diloco"


@dataclass(frozen=True)
class DiLoCo:
    c: TrainConfig

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round > self.c.max_generations:
            return []
        if round == 0:
            return [*ground(self.c, one_start=True), *map(self.first_shard, range(self.c.shard_count))]
        replicas = [self.replica(k, round) for k in range(self.c.population_size)]
        shards = [self.shard(s, round) for s in range(self.c.shard_count)]
        return [*replicas, *shards, self.look(round)]

    def replica(self, k: int, round: int) -> Recipe:
        before = last_of(self.c, f"replica-{k}", round)
        parents = unique(*self.shards(round - 1), before, *tools(self.c))
        train = {"round": round, "slot": k, "steps": self.c.inner_steps, "before": before}
        optional = self.c.quorum < 1
        return Recipe(f"replica-{k}", parents, {"method": "replica"}, train, publish="change", optional=optional)

    def shard(self, s: int, round: int) -> Recipe:
        replicas = [f"{round}/replica-{k}" for k in range(self.c.population_size)]
        old = f"{round - 1}/shard-{s}"
        return Recipe(f"shard-{s}", unique(*replicas, old), {"method": "shard", "shard": s, "old": old})

    def first_shard(self, s: int) -> Recipe:
        return Recipe(f"shard-{s}", (first_weights(self.c),), {"method": "cut", "shard": s})

    def look(self, round: int) -> Recipe:
        parents = unique(*self.shards(round), *tools(self.c))
        return Recipe(
            "global", parents, {"method": "global"}, evaluate={"on": "held-out"}, publish="nothing", optional=True
        )

    def shards(self, round: int) -> list[str]:
        return [f"{round}/shard-{s}" for s in range(self.c.shard_count)]


if __name__ == "__main__":
    from train.command import run

    run(ALGORITHM, __doc__, DiLoCo)

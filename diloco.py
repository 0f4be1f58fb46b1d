"""DiLoCo: replicas train on their own data for many steps, then one outer step brings their changes together.

    for every round:
        each replica:  start at the global model; take INNER_STEPS on its own batches; publish the change
        each shard:    average the replicas' changes in its range of the model; take a step of Nesterov momentum
        the global model, which is all shards together, is evaluated

With OVERLAP, two halves of the replicas take turns: while one trains, the other's changes come together, and nobody
waits for a disk that takes no longer than training. With FRAGMENTS, each round brings one part of the model together,
in turn. docs/exchange.md explains both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.recipe import Past, Recipe, kept_as
from train.training_config import TrainConfig
from train.training_recipes import (
    EvaluationArgs,
    ReplicaArgs,
    ShardArgs,
    first_weights,
    in_turn,
    last_of,
    round_zero,
    shards_in,
    training_inputs,
    unique,
)

ALGORITHM = "diloco"
SHARD, HALF = "shard", "half"  # tasks: a range of the model after all of a round have come together, or half of them
HOME = "home-"  # so begins the name under which a slot's state stays within reach


@dataclass(frozen=True)
class DiLoCo:
    c: TrainConfig

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round > self.c.max_generations:
            return []
        if round == 0:
            return [*round_zero(self.c, one_start=True), *map(self.first_shard, range(self.c.shard_count))]
        shards, plan = range(shards_in(history.plan(0))), list[Recipe]()
        homes = self.homes(history.plan(round - 1), round - 1) if self.c.keeps_home else {}
        for slots, begin, old, new in self.turns(round, history):
            replicas = [self.replica(k, round, tuple(f"{begin}-{s}" for s in shards), homes) for k in slots]
            changes = tuple(f"{round}/{replica.slot}" for replica in replicas)
            plan += [*replicas, *(self.shard(round, new, s, changes, f"{old}-{s}") for s in shards)]
        return [*plan, *self.homes_kept(round, homes), self.evaluation(round, len(shards))]

    def turns(self, round: int, history: Past) -> list[tuple[range, str, str, str]]:
        """Who trains from which model, and which one their changes make another of."""
        slots, last = range(self.c.population_size), f"{round - 1}/{SHARD}"
        if not self.c.overlap:
            return [(slots, last, last, SHARD)]
        halved = any(recipe.task == HALF for recipe in history.plan(round - 1))
        first = f"{round - 1}/{HALF}" if halved else last  # what the other half has learned meanwhile is not in it
        return [(slots[::2], first, last, HALF), (slots[1::2], last, f"{round}/{HALF}", SHARD)]

    def replica(self, k: int, round: int, shards: tuple[str, ...], homes: Mapping[str, str]) -> Recipe:
        slot, before = f"replica-{k}", last_of(f"replica-{k}", round)
        home, more = homes.get(slot, ""), dict[str, Any]()
        if self.c.keeps_home:
            more = {"fragments": self.c.fragments, "home": home, "publishes": self.publishes(k, round)}
        turn = ReplicaArgs(round=round, slot=k, steps=self.c.steps_in(round), before=before, **more)
        return Recipe(
            slot, "replica", shards, unique(before, home, *training_inputs(self.c)),
            args=turn.plain(), optional=self.c.quorum < 1,
        )  # fmt: skip

    def shard(self, round: int, task: str, s: int, changes: tuple[str, ...], old: str) -> Recipe:
        if not in_turn(s, round, self.c.fragments):
            return kept_as(f"{task}-{s}", old)
        return Recipe(f"{task}-{s}", task, (*changes, old), args=ShardArgs(shard=s, old=old).plain())

    # -- what stays with a slot ---------------------------------------------------------------------------------------

    def publishes(self, k: int, round: int) -> bool:
        """Not all slots in one round."""
        return (round + k) % self.c.home_every == 0

    def homes(self, plan: Sequence[Recipe], round: int) -> dict[str, str]:
        """Of each slot, the last replica whose state is published, as that round has it."""
        kept = {
            recipe.slot.removeprefix(HOME): f"{round}/{recipe.slot}" for recipe in plan if recipe.slot.startswith(HOME)
        }
        return kept | {recipe.slot: f"{round}/{recipe.slot}" for recipe in plan if recipe.args.get("publishes")}

    def homes_kept(self, round: int, homes: Mapping[str, str]) -> list[Recipe]:
        """Within reach of the next round."""
        slots = ((k, f"replica-{k}") for k in range(self.c.population_size))
        return [
            kept_as(HOME + slot, homes[slot]) for k, slot in slots if slot in homes and not self.publishes(k, round)
        ]

    def first_shard(self, s: int) -> Recipe:
        return Recipe(f"shard-{s}", "cut", (first_weights(self.c),), args=ShardArgs(shard=s).plain())

    def evaluation(self, round: int, shards: int) -> Recipe:
        needs, args = tuple(training_inputs(self.c)), EvaluationArgs(on="test").plain()
        whole = tuple(f"{round}/{SHARD}-{s}" for s in range(shards))
        return Recipe("global", "global", whole, needs, "summary", args, optional=True)


def command() -> None:
    from train.training_commands import run

    run(ALGORITHM, __doc__, DiLoCo)


if __name__ == "__main__":
    command()

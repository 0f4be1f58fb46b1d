"""The methods' shapes: sharded DiLoCo, EDT with matching, EDT with rank selection, an ask/tell search, a tournament."""

import math
import random
from dataclasses import dataclass

from fleet.recipe import Member, Past, Recipe, Strategy
from tests.toy.config import ToyConfig


def at(round: int, *slots: str) -> tuple[str, ...]:
    return tuple(f"{round}/{slot}" for slot in slots)


def rng(*key: object) -> random.Random:
    return random.Random(repr(key))


def given(slot: str, start: int, /, **args: object) -> Recipe:
    return Recipe(slot, "init", role="given", args={"start": start, **args})


@dataclass(frozen=True)
class Toy:
    c: ToyConfig

    def seeds(self) -> tuple[int, ...]:
        return self.c.initial_population or (self.c.seed,)

    def inits(self) -> list[Recipe]:
        return [given(f"init-{i}", seed) for i, seed in enumerate(self.seeds())]

    def first(self, k: int) -> tuple[str, ...]:
        return at(0, f"init-{k % len(self.seeds())}")

    def train(self, slot: int, round: int, lr: float = 1.0) -> dict[str, object]:
        return {
            "seed": self.c.seed, "slot": slot, "round": round, "steps": self.c.inner_steps, "lr": 0.05 * lr,
            "outer_lr": self.c.outer_lr, "momentum": self.c.outer_momentum, "nesterov": self.c.outer_nesterov,
        }  # fmt: skip

    @property
    def held_out(self) -> dict[str, object]:
        return {"on": "validation", "batch": self.c.eval_batch_size}

    @property
    def elastic(self) -> bool:
        return self.c.quorum < 1


class DiLoCo(Toy):
    def plan(self, round: int, history: Past) -> list[Recipe]:
        shards = range(self.c.shards)
        cut = {"shards": self.c.shards}
        if round > self.c.max_generations:
            return []
        if round == 0:
            first = given("init-0", self.seeds()[0])
            return [first] + [Recipe(f"shard-{s}", "cut", at(0, "init-0"), args={"shard": s, **cut}) for s in shards]
        old, new = (at(r, *(f"shard-{s}" for s in shards)) for r in (round - 1, round))
        names = [f"replica-{k}" for k in range(self.c.population_size)]
        change = {**cut, "publish": "change"}
        replicas = [
            Recipe(slot, "assemble", old, args=self.train(k, round) | change, optional=self.elastic)
            for k, slot in enumerate(names)
        ]
        step = {**cut, **self.train(0, 0), "steps": 0}
        outer = [
            Recipe(f"shard-{s}", "outer", (*at(round, *names), old[s]), args={**step, "shard": s, "old": old[s]})
            for s in shards
        ]
        publish = "weights" if round == self.c.max_generations else "nothing"
        look = {**self.held_out, "publish": publish}
        return [*replicas, *outer, Recipe("global", "assemble", new, role="summary", args=look)]


class Matching(Toy):
    def partners(self, round: int) -> dict[int, int]:
        order = list(range(self.c.population_size))
        rng(self.c.seed, round, "matching").shuffle(order)
        return dict(zip(order[::2] + order[1::2], order[1::2] + order[::2], strict=True))

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round > self.c.max_generations:
            return []
        if round == 0:
            return self.inits()
        partner = self.partners(round) if self.c.population_size % 2 == 0 else {}
        members = [self.child(k, round, sorted({k, partner.get(k, k)})) for k in range(self.c.population_size)]
        last = round == self.c.max_generations
        parents = at(round, *(x.slot for x in members))
        look = {**self.held_out, "publish": "weights" if last else "nothing"}
        return [*members, Recipe("average", "mean", parents, role="summary", args=look)]

    def child(self, k: int, round: int, pair: list[int]) -> Recipe:
        parents = at(round - 1, *(f"m{p}" for p in pair)) if round > 1 else self.first(k)
        args = {**self.train(k, round), **self.held_out, "publish": "step"}
        return Recipe(f"m{k}", "mean", parents, args=args, optional=self.elastic)


class Rank(Toy):
    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round > self.c.max_generations:
            return []
        if round == 0:
            return self.inits()
        if round == 1:
            return [self.child(k, 1, self.first(k), {"lr": 1.0}) for k in range(self.c.population_size)]
        ranked = sorted((m for m in history.round(round - 1) if m), key=lambda m: (m.metrics["loss"], m.id))
        roll = rng(self.c.seed, round, "rank")
        elite = min(self.c.elitism, len(ranked))
        plan = [Recipe(f"m{k}", parents=(ranked[k].id,)) for k in range(elite)]  # carried over, unchanged
        chances = [len(ranked) - i for i in range(len(ranked))]
        for k in range(elite, self.c.population_size):
            a, b = roll.choices(ranked, chances)[0], roll.choices(ranked, chances)[0]
            genome = {"lr": roll.choice((a, b)).recipe.genome["lr"]}
            if roll.random() < self.c.mutation_probability:
                genome = {"lr": genome["lr"] * math.exp(self.c.mutation_strength * roll.gauss(0, 1))}
            plan.append(self.child(k, round, tuple(dict.fromkeys((a.id, b.id))), genome))
        return plan

    def child(self, k: int, round: int, parents: tuple[str, ...], genome: dict[str, float]) -> Recipe:
        args = {**self.train(k, round, genome["lr"]), **self.held_out, "publish": "step"}
        return Recipe(f"m{k}", "mean", parents, args=args, genome=genome, optional=self.elastic)


class Search(Toy):
    """Ask: points around a mean. Tell: the mean of the better half is the next one; failures rank last."""

    donors = 3

    def plan(self, round: int, history: Past) -> list[Recipe]:
        if round > self.c.max_generations + 1:
            return []
        if round == 0:
            return [given(f"donor-{d}", self.c.seed + d) for d in range(self.donors)]
        donors = at(0, *(f"donor-{d}" for d in range(self.donors)))
        told = [history.round(r) for r in range(1, round)]
        if round == self.c.max_generations + 1:
            good = [m for members in told for m in members if m]
            best = (
                min(good, key=lambda m: (m.metrics["loss"], m.id)).recipe.genome["x"] if good else [1 / self.donors] * 3
            )
            return [Recipe("best", "linear", donors, args={"weights": best, **self.held_out})]
        test = {**self.held_out, "cliff": self.c.cliff, "publish": "nothing"}
        return [
            Recipe(f"c{k}", "linear", donors, args={"weights": x, **test}, genome={"x": x}, optional=True)
            for k, x in enumerate(self.ask(told, round))
        ]

    def ask(self, told: list[list[Member]], round: int) -> list[list[float]]:
        mean, spread = [1 / self.donors] * self.donors, 0.4
        for members in told:
            better = sorted((m for m in members if m), key=lambda m: (m.metrics["loss"], m.id))[
                : len(members) // 2 or 1
            ]
            if better:
                points = [m.recipe.genome["x"] for m in better]
                mean, spread = [math.fsum(column) / len(points) for column in zip(*points, strict=True)], spread * 0.9
        roll = rng(self.c.seed, round, "ask")
        return [[x + spread * roll.gauss(0, 1) for x in mean] for _ in range(self.c.population_size)]


class Tournament(Toy):
    def plan(self, round: int, history: Past) -> list[Recipe]:
        roll = rng(self.c.seed, round, "tournament")
        if round == 0:
            return [given(f"donor-{d}", self.c.seed + d, **self.train(d, 0)) for d in range(3)]
        if round == 1:
            pairs = [roll.sample(range(3), 2) for _ in range(self.c.population_size)]
            return [self.child(k, at(0, *(f"donor-{d}" for d in pair)), roll.random()) for k, pair in enumerate(pairs)]
        if history.plan(round - 1)[0].slot == "winner":
            return []
        now = sorted((m for m in history.round(round - 1) if m), key=lambda m: (m.metrics["loss"], m.id))
        if round > self.c.max_generations:
            return [Recipe("winner", parents=(now[0].id,), role="winner")]
        plan = [Recipe("m0", parents=(now[0].id,))]
        for k in range(1, self.c.population_size):
            a, b = sorted(roll.sample(range(len(now)), 2))
            share = min(1.0, max(0.0, now[a].recipe.genome["t"] + 0.2 * roll.gauss(0, 1)))
            plan.append(self.child(k, (now[a].id, now[b].id), share))
        return plan

    def child(self, k: int, parents: tuple[str, ...], share: float) -> Recipe:
        args = {"weights": [1 - share, share], **self.held_out}
        return Recipe(f"m{k}", "linear", parents, args=args, genome={"t": share})


STRATEGIES = {"diloco": DiLoCo, "matching": Matching, "rank": Rank, "search": Search, "tournament": Tournament}


def strategy(config: ToyConfig) -> Strategy:
    return STRATEGIES[config.algorithm](config)

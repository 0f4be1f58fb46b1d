"""Which rollouts a plan has: a child's own, those that others share, and old ones that are carried along. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence

from fleet.recipe import Recipe
from train.posttrain.posttrain_config import PosttrainConfig
from train.recipe_arguments import RolloutArgs

_SLOT = re.compile(r"r([0-9]+)(?:-([0-9]+))?")  # whose they are, and how many generations old


def slot_of(k: int, age: int = 0) -> str:
    return f"r{k}-{age}" if age else f"r{k}"


def of_child(child: Recipe, needs: Callable[[Sequence[str], str], tuple[str, ...]]) -> Recipe:
    """What a child's parents make of it before it learns, by the child's own genome."""
    generation, k, base = (child.args[key] for key in ("generation", "slot", "base"))
    args = RolloutArgs(generation=generation, slot=k, base=base).plain()
    return Recipe(slot_of(k), "rollouts", child.parents, needs(child.parents, base), "tool", args, child.genome)


def carried(c: PosttrainConfig, before: Sequence[Recipe], generation: int) -> list[Recipe]:
    """Those of the generation before that are of use for another one."""
    return [
        Recipe(slot_of(k, age + 1), parents=(f"{generation - 1}/{slot_of(k, age)}",), role="tool")
        for k, age in _there(c, before)
        if age + 1 < c.of_grpo.staleness
    ]


def shared(c: PosttrainConfig, before: Sequence[Recipe], generation: int, k: int) -> tuple[str, ...]:
    """Others' that a slot may learn from in the generation after that one."""
    return tuple(f"{generation}/{slot_of(other, age)}" for other, age in _there(c, before) if other != k)


def _there(c: PosttrainConfig, plan: Sequence[Recipe]) -> Iterator[tuple[int, int]]:
    if c.grpo and c.grpo.share:
        found = (_SLOT.fullmatch(recipe.slot) for recipe in plan)
        yield from ((int(each[1]), int(each[2] or 0)) for each in found if each)

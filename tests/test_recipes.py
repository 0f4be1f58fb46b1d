"""What a recipe may be: a task with its arguments, its inputs, its role; refused before anybody acts on it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fleet.recipe import ROLES, Recipe, alike, check, kept_as, reads
from fleet.tasks import Args, Task, dispatcher
from fleet.work import Failed, Work


class CutArgs(Args):
    shard: int
    old: str = ""


def work(task: str, **args: Any) -> Work:
    return cast(Work, SimpleNamespace(id="3/m0", early=False, recipe=Recipe("m0", task, args=args)))


@pytest.mark.parametrize(
    "recipe, why",
    [
        (Recipe("M0", "x"), "lower-case letters"),
        (Recipe("m0", "x", role="king"), "its role is 'king', not one of member, "),
        (Recipe("m0"), "no task, and not one parent that is carried over"),
        (Recipe("m0", parents=("2/a", "2/b")), "no task"),
        (Recipe("m0", parents=("2/a",), needs=("0/text",)), "no task"),
        (Recipe("m0", parents=("2/a",), args={"x": 1}), "no task"),
        (Recipe("m0", "x", ("1/a",)), "its input 1/a is out of reach"),
        (Recipe("m0", "x", (), ("1/a",)), "its input 1/a is out of reach"),
        (Recipe("m0", "x", (), ("3/later",)), "its input 3/later stands after it, or nowhere"),
        (Recipe("m0", "x", ("4/a",)), "4/a is out of reach"),
    ],
)
def test_a_plan_is_refused_with_its_slot(recipe, why):
    with pytest.raises(ValueError, match=why) as error:
        check(3, [Recipe("first", "x"), recipe, Recipe("later", "x")])
    assert "the plan of round 3, slot " in str(error.value)


def test_every_role_may_stand_in_a_plan():
    check(3, [Recipe(f"m{n}", "x", role=role) for n, role in enumerate(ROLES)])
    check(3, [kept_as("best", "2/m1"), Recipe("look", "x", ("3/best",), ("0/text",), "look")])


def test_inputs_are_parents_first_and_lists_that_are_shared_are_looked_at_once():
    parents, needs = ("2/a", "2/b"), ("0/text",)
    several = [Recipe(f"m{n}", "x", parents, needs) for n in range(3)]
    assert several[0].inputs == ("2/a", "2/b", "0/text")
    assert [*alike(several)] == [reads(several[0])]


def test_who_makes_a_task_has_its_arguments_as_a_record():
    make = dispatcher({"cut": Task(lambda runtime, work, args: {"got": args, "by": runtime}, CutArgs)})
    assert make("me", work("cut", shard=2)) == {"got": CutArgs(shard=2), "by": "me"}
    assert CutArgs(shard=2).plain() == {"shard": 2}


@pytest.mark.parametrize("args", [{}, {"shard": "2"}, {"shard": 2, "whole": True}, {"shard": 2.0}])
def test_arguments_of_another_shape_are_a_verdict_on_the_recipe(args):
    with pytest.raises(Failed, match="3/m0: its recipe's arguments are not those of cut"):
        dispatcher({"cut": Task(lambda runtime, work, args: {}, CutArgs)})(None, work("cut", **args))


def test_a_task_that_nobody_knows_is_a_verdict():
    with pytest.raises(Failed, match="3/m0: no task is called fly; there are: cut"):
        dispatcher({"cut": Task(lambda runtime, work, args: {}, CutArgs)})(None, work("fly"))

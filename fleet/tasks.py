"""What a method can make, by the names that recipes give: each function with a frozen record of its arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fleet.work import Failed, Work

R = TypeVar("R")
Metrics = Mapping[str, Any]


class Args(BaseModel):
    """Of one task; a strategy writes them into its recipes, and whoever makes it has the same record again."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def plain(self) -> dict[str, Any]:
        """As they stand in a plan: what was said, no defaults."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True)
class Task(Generic[R]):
    """A function of the worker's runtime, the work and its arguments."""

    make: Callable[[R, Work, Any], Metrics]
    args: type[Args] = Args
    early: bool = False  # it has something to write before all inputs are there, and asks whether they are


def dispatcher(tasks: Mapping[str, Task[R]]) -> Callable[[R, Work], Metrics]:
    """Makes a recipe by the function of the task that it names."""

    def make(runtime: R, work: Work) -> Metrics:
        if not (task := tasks.get(work.recipe.task)):
            raise Failed(f"{work.id}: no task is called {work.recipe.task}; there are: {', '.join(tasks)}")
        return task.make(runtime, work, arguments(task.args, work)) if task.early or not work.early else {}

    return make


def arguments(kind: type[Args], work: Work) -> Args:
    try:
        return kind.model_validate(dict(work.recipe.args))
    except ValidationError as error:
        raise Failed(f"{work.id}: its recipe's arguments are not those of {work.recipe.task}: {error}") from None

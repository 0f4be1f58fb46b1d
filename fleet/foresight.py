"""What a worker is likely to make next, and which files it will read then: those that the last one of the same slot
has read. Whoever is wrong here has read something in vain, nothing else."""

from collections.abc import Callable, Iterator
from zlib import crc32

from fleet import faults
from fleet.history import History
from fleet.payload import InputMember
from fleet.recipe import NotYet, Recipe, round_and_slot
from fleet.work import Work

FilesRead = dict[str, dict[str, set[str]]]  # by a slot's last recipe: of its inputs, by the task that had made them
Has = Callable[[str], bool]


def files_read(work: Work) -> dict[str, set[str]]:
    """Names of the files that a recipe has read while it was made, by the task that had made the input."""
    read = dict[str, set[str]]()
    for id, input in work.inputs.items():
        read.setdefault(work.history.recipe(id).task, set()).update(input.used)
    return read


def likelihood_key(history: History, worker: str, has: Has, id: str, recipe: Recipe) -> tuple[int, int, int]:
    """To sort recipes by: this worker makes the one with the least key next, most likely. Old rounds first, then what
    goes on from what this worker has; ties are broken by the worker's name, so that all differ."""
    own = has(previous_in_slot(id)) + sum(has(history.origin(input)) for input in recipe.inputs)
    return round_and_slot(id)[0], -own, crc32((worker + id).encode())


def previous_in_slot(id: str) -> str:
    """The member of its slot in the round before."""
    round, slot = round_and_slot(id)
    return f"{round - 1}/{slot}"


def awaited(history: History, id: str, recipe: Recipe, read: FilesRead) -> Iterator[tuple[InputMember, str]]:
    """Files of what it is made of, as far as they are there."""
    known = read.get(round_and_slot(id)[1], {})
    for parent in recipe.inputs if known else ():
        names = known.get(history.recipe(parent).task)
        if names and (input := _present(history, parent)):
            yield from ((input, name) for name in sorted(names) if name in input.files)


def _present(history: History, id: str) -> InputMember | None:
    try:
        return history.files(id) if history.finished(id) and history[id] else None
    except (faults.Fault, NotYet):
        return None

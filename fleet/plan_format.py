"""A plan as it stands in its register: what several recipes name together is written, and kept in memory, once. Pure.

    {"groups": [["1/m0", "1/m1", ...]], "recipes": [{"slot": "m0", "task": "child", "parents": [0, "1/m9"], ...}, ...]}

A number among the parents, or what else is needed, is that group. Short lists stay as they are, so that a small run's
plan is easy to read.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from fleet.recipe import Recipe, from_json, to_json

MOST = 1 << 22  # names of inputs in a plan, each shared list counted once: some 32 MB in memory
_WORTH = 8  # names that a group has at least
_LISTS = ("parents", "needs")

Names = tuple[str, ...]
Coded = tuple[str | int, ...]


def record_of(recipes: Sequence[Recipe]) -> dict[str, Any]:
    """What is written."""
    coder = _Coder(recipes)
    coded = [_coded(recipe, coder) for recipe in recipes]
    return {**({"groups": coder.groups} if coder.groups else {}), "recipes": coded}


def recipes_in(record: Mapping[str, Any]) -> tuple[Recipe, ...]:
    """What is read, if it is a plan; lists that are alike are one."""
    names = _Names(record.get("groups", []))
    return tuple(from_json(_whole(value, names)) for value in record["recipes"])


def _coded(recipe: Recipe, coder: "_Coder") -> dict[str, Any]:
    value = to_json(recipe)
    return {**value, **{key: coder.coded(value[key]) for key in _LISTS if key in value}}


def _whole(value: Any, names: "_Names") -> Any:
    if not isinstance(value, dict):
        return value  # which from_json refuses
    lists = {key: coded for key in _LISTS if isinstance(coded := value.get(key), (list, tuple))}  # read, or just made
    return {**value, **{key: names.whole(coded) for key, coded in lists.items()}}


class _Coder:
    """Finds the runs of names that several lists have in common."""

    def __init__(self, recipes: Sequence[Recipe]) -> None:
        lists = Counter(names for recipe in recipes for names in (recipe.parents, recipe.needs) if names)
        users = defaultdict[str, list[int]](list)
        for n, names in enumerate(lists):
            for name in names:
                users[name].append(n)
        numbers = dict[tuple[int, ...], int]()
        alike = {name: numbers.setdefault(tuple(used), len(numbers)) for name, used in users.items()}
        self._runs = {names: [*_runs(names, alike)] for names in lists}
        uses = Counter[Names]()
        for names, times in lists.items():
            uses.update({run: times for run in self._runs[names] if len(run) >= _WORTH})
        shared = [run for run, times in uses.items() if times > 1]
        self._number = {run: n for n, run in enumerate(shared)}
        self.groups = [[*run] for run in shared]
        self._known = dict[Names, Coded]()

    def coded(self, names: Names) -> Coded:
        if names not in self._known:
            runs = ((self._number[run],) if run in self._number else run for run in self._runs[names])
            self._known[names] = tuple(each for run in runs for each in run)
        return self._known[names]


def _runs(names: Names, alike: Mapping[str, int]) -> Iterator[Names]:
    """Cut where the next name is in other lists than the one before."""
    for _, run in groupby(names, alike.__getitem__):
        yield tuple(run)


class _Names:
    """The names that a list stands for."""

    def __init__(self, groups: Any) -> None:
        self._groups: list[Names] = [tuple(_checked(group)) for group in groups]
        self._known = dict[Coded, Names]()
        self._count = 0

    def whole(self, coded: Any) -> Names:
        key = tuple(coded)
        if key not in self._known:
            parts = [self._part(each) for each in key]
            self._count += sum(map(len, parts))
            if self._count > MOST:
                raise ValueError(f"more than {MOST:,} names of members stand in one plan")
            self._known[key] = tuple(chain.from_iterable(parts))
        return self._known[key]

    def _part(self, coded: Any) -> Names:
        if type(coded) is int and 0 <= coded < len(self._groups):
            return self._groups[coded]
        if isinstance(coded, str):
            return (coded,)
        raise ValueError(f"neither a member's name nor a group's number: {str(coded)[:200]}")


def _checked(names: Any) -> Sequence[str]:
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"not a list of members' names: {str(names)[:200]}")
    return names

"""Recipes, members and their names: what is planned and what came of it. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

AHEAD = 4  # round r + AHEAD may be planned once all rounds below r are finished
ROLES = (
    "member",  # a model that goes on, or might
    "kept",  # carried over only to stay within reach
    "summary",  # a look at what several members come to together
    "look",  # another evaluation of its one parent
    "given",  # what was there before the run
    "tool",  # no model: a tokenizer, a text, a check
    "winner",  # stands for its one parent at the end
)

T = TypeVar("T")

_SLOT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_ID = re.compile(rf"(0|[1-9][0-9]{{0,4}})/({_SLOT.pattern})")


class NotYet(Exception):
    """Somebody asked for what is not finished. The loop catches it; strategies must not."""


class Unplannable(Exception):
    """What a strategy cannot go on from, or has planned though it cannot be: whoever asks it hears the same."""


@dataclass(frozen=True)
class Recipe:
    """What to make. The run itself reads slot, parents, needs and optional, and the role to choose what to make next;
    its readers and strategies read the role, too; the rest is the maker's."""

    slot: str  # its name in the round: "replica-3"
    task: str = ""  # names the function that makes it; without one it is its parent, carried over
    parents: tuple[str, ...] = ()  # members that it descends from: "12/replica-3"
    needs: tuple[str, ...] = ()  # what else it reads
    role: str = "member"
    args: Mapping[str, Any] = field(default_factory=dict)  # of the task
    genome: Mapping[str, Any] = field(default_factory=dict)  # where the strategy draws it; EDT's is in the metrics
    optional: bool = False  # may fail or come too late without stopping the run

    @property
    def carried(self) -> bool:
        return not self.task

    @property
    def inputs(self) -> tuple[str, ...]:
        """The members whose files it reads, in the order of the plan; who is named twice there is here, too."""
        return self.parents + self.needs

    @property
    def split_in_words(self) -> str:
        """For people, of a look at all together: on what, since that is other text than its members'."""
        return f" ({self.evaluated_on})" if self.role == "summary" and self.evaluated_on else ""

    @property
    def evaluated_on(self) -> str:
        """What it is measured on, if that has a name."""
        return str(self.args.get("on", ""))


@dataclass(frozen=True)
class Member:
    """A finished recipe as strategies see it: only what follows from the configuration."""

    id: str  # its place in the round it was asked for
    origin: str  # where it was made: another place if it was carried over
    recipe: Recipe  # the one it was made by
    metrics: Mapping[str, Any]
    digests: Mapping[str, str]  # file name -> checksum
    absent: str = ""  # "failed" or "closed": there are no files and no metrics

    def __bool__(self) -> bool:
        return not self.absent

    @property
    def diverged(self) -> str:
        """Where its training came to NaN or infinite numbers: what people are told. Who carries it over has no part."""
        if not self.metrics.get("diverged") or self.id != self.origin:
            return ""
        rounds = self.metrics.get("diverged_in_a_row", 1)
        return round_and_slot(self.id)[1] + (f" ({rounds} rounds in a row)" if rounds != 1 else "")

    @property
    def lost(self) -> str:
        """Where what its slot had on one machine alone was not there when it was made: what people are told."""
        lost = self.metrics.get("lost_own") and self.id == self.origin
        return f"{round_and_slot(self.id)[1]} lost what it had not exchanged" if lost else ""


class Past(Protocol):
    """What a strategy may look at: finished members, by name."""

    def __getitem__(self, id: str) -> Member: ...
    def round(self, round: int) -> list[Member]: ...
    def plan(self, round: int) -> Sequence[Recipe]: ...
    def once(self, what: str, round: int, make: Callable[[], T]) -> T: ...  # make(), remembered of a finished round


class Strategy(Protocol):
    """A pure function from the past to what the next round should make; nothing more to make ends the run."""

    def plan(self, round: int, history: Past) -> list[Recipe]: ...


@lru_cache(1 << 13)
def round_and_slot(id: str) -> tuple[int, str]:
    """The round and the slot that a member's name says."""
    if not (match := _ID.fullmatch(id)):
        raise ValueError(f"{id!r} is not the name of a member, which looks like 12/replica-3")
    return int(match[1]), match[2]


def name(round: int, slot: str) -> str:
    return f"{round}/{slot}"


def folder(round: int) -> str:
    return f"rounds/{round:05d}"


def kept_as(slot: str, id: str) -> Recipe:
    """A member of an earlier round stays within reach under this name."""
    return Recipe(slot, parents=(id,), role="kept")


def alike(recipes: Iterable[Recipe]) -> dict[tuple[int, int], Recipe]:
    """One of each group that reads the same: thousands of recipes may share their lists."""
    return {reads(recipe): recipe for recipe in recipes}


def reads(recipe: Recipe) -> tuple[int, int]:
    return id(recipe.parents), id(recipe.needs)


_EMPTY = asdict(Recipe(""))


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Only what differs from an empty recipe, so that plans stay small and easy to read."""
    return {key: value for key in _EMPTY if (value := getattr(recipe, key)) != _EMPTY[key]}


def from_json(value: Any) -> Recipe:
    """A recipe as it stands in a plan; refuses any other shape."""
    if not isinstance(value, dict) or not value.keys() <= _EMPTY.keys():
        raise ValueError(f"not a recipe: {str(value)[:200]}")
    value = {**value, "parents": tuple(value.get("parents", ())), "needs": tuple(value.get("needs", ()))}
    for key, got in value.items():
        if type(got) is not type(_EMPTY[key]):
            raise ValueError(f"recipe: {key} is {got!r}")
    return Recipe(**value)


def check(round: int, recipes: Sequence[Recipe]) -> None:
    """A plan is data that everyone will act on for ever: slots unique, inputs known and within reach."""
    seen, known = set[str](), set[tuple[int, int]]()  # lists of inputs that are looked at already: most are shared
    for recipe in recipes:
        where = f"the plan of round {round}, slot {recipe.slot!r}"
        if not _SLOT.fullmatch(recipe.slot):
            raise ValueError(f"{where}: a slot's name is lower-case letters, digits, '-' and '_'")
        if recipe.slot in seen:
            raise ValueError(f"{where}: stands there twice")
        if recipe.role not in ROLES:
            raise ValueError(f"{where}: its role is {recipe.role!r}, not one of {', '.join(ROLES)}")
        if recipe.carried and (len(recipe.parents) != 1 or recipe.needs or recipe.args):
            raise ValueError(f"{where}: no task, and not one parent that is carried over")
        for input in () if reads(recipe) in known else recipe.inputs:
            where_from, slot = round_and_slot(input)
            if where_from == round and slot not in seen:
                raise ValueError(f"{where}: its input {input} stands after it, or nowhere")
            if where_from > round or where_from not in (0, round - 1, round):
                raise ValueError(
                    f"{where}: its input {input} is out of reach; inputs lie in the same round, "
                    "the one before, or round 0 (carry over what shall live longer)"
                )
        seen.add(recipe.slot)
        known.add(reads(recipe))

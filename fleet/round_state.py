"""What is known of one round: its plan, and what listings and registers have told of its slots."""

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleet import faults, payload
from fleet.plan_format import recipes_in
from fleet.recipe import Member, Recipe, check, folder, name, round_and_slot

_NUMBER = "(0|[1-9][0-9]{0,4})"  # as we write them; names that only look alike (00, other scripts' digits) are not ours
_REGISTER = re.compile(rf"([a-z0-9][a-z0-9_-]{{0,63}})\.{_NUMBER}\.(?:(done|void)|(claim|left)\.{_NUMBER})")


class Register(NamedTuple):
    """SLOT.VERSION.done, SLOT.VERSION.void, SLOT.VERSION.claim.N, SLOT.VERSION.left.N"""

    slot: str
    version: int
    kind: str
    number: int


def parse(name: str) -> Register | None:
    """A register's name in a listing; nothing for a name that none of us writes."""
    if not (match := _REGISTER.fullmatch(name)):
        return None
    slot, version, outcome, claim, number = match.groups()
    return Register(slot, int(version), outcome or claim, int(number or 0))


@dataclass
class SlotState:
    """What the listings have shown of one slot. A version is void when its files turned out to be damaged."""

    version: int = 0
    void: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    claims: dict[int, int] = field(default_factory=dict)  # version -> how many claims it had
    left: set[tuple[int, int]] = field(default_factory=set)  # (version, claim) that was given up

    @property
    def finished(self) -> bool:
        return self.version in self.done

    @property
    def held(self) -> bool:
        """Claimed, and not given up."""
        count = self.claims.get(self.version, 0)
        return count > 0 and (self.version, count - 1) not in self.left

    def take(self, said: Register) -> None:
        """Learn that a register of this slot exists."""
        match said:
            case (_, version, "done", _):
                self.done.add(version)
            case (_, version, "claim", number):
                self.claims[version] = max(self.claims.get(version, 0), number + 1)
            case (_, version, "left", number):
                self.left.add((version, number))
            case (_, version, "void", _):
                self.void.add(version)
        while self.version in self.void:
            self.version += 1


@dataclass(frozen=True)
class Outcome:
    """A slot's done register: the member, and beside it what depends on the machine that made it."""

    member: Member
    version: int
    attempt: str
    files: payload.Files
    why: str  # of an absent member
    by: str
    seconds: float
    record: dict[str, Any]  # as it stands there


@dataclass
class RoundState:
    """Registers never change, so it only grows; it is forgotten as a whole."""

    plan: tuple[Recipe, ...]
    recipes: dict[str, Recipe]
    made: list[str]  # the members that are really made there, not carried over
    origins: dict[str, str] = field(default_factory=dict)  # of those that are carried over
    slots: dict[str, SlotState] = field(default_factory=lambda: defaultdict(SlotState))
    names: set[str] | None = None  # nothing was listed yet
    safe: set[str] = field(default_factory=set)  # names that no crash of the server can take back
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    told: dict[str, tuple[int, dict[str, Any]]] | None = None  # by its summary: of members, the version and its record
    doubted: bool = False  # something that was there is gone, or void: what others have seen of it does not count

    def unseen(self) -> "RoundState":
        """For whoever has seen nothing of it yet."""
        return RoundState(self.plan, self.recipes, self.made)

    def versions(self) -> list[int]:
        """Of all that is made there. Another thread may ask, and so nothing is added."""
        return [state.version if (state := self.slots.get(id)) else 0 for id in self.made]

    def forget(self) -> None:
        """Look at it afresh."""
        self.doubted = True
        self.names = None
        self.safe.clear()
        self.slots.clear()


def planned(round: int, record: dict[str, Any]) -> RoundState:
    """A round whose plan says so."""
    try:
        recipes = recipes_in(record)
        check(round, recipes)
    except (KeyError, TypeError, ValueError) as error:
        raise faults.Damaged(f"{folder(round)}/plan: {error}") from None
    by_name = {name(round, recipe.slot): recipe for recipe in recipes}
    return RoundState(recipes, by_name, [id for id, recipe in by_name.items() if not recipe.carried])


def outcome(id: str, recipe: Recipe, record: dict[str, Any], version: int) -> Outcome:
    """What a done register says; refuses any other shape."""
    try:
        files = payload.files_of(record["files"])
        digests = {name: known for name, (_, known) in files.items()}
        if not isinstance(record["metrics"], dict) or not isinstance(record["attempt"], str):
            raise ValueError("metrics or attempt have another shape")
        if record["attempt"] and not payload.NAME.fullmatch(record["attempt"]):
            raise ValueError(f"attempt {record['attempt']!r}")
        member = Member(id, id, recipe, record["metrics"], digests, str(record["absent"]))
        more = (str(record["why"]), str(record["by"]), float(record["seconds"]), record)
        return Outcome(member, version, record["attempt"], files, *more)
    except (KeyError, TypeError, ValueError) as error:
        raise faults.Damaged(f"{register(id, version)}: {error}") from None


def register(id: str, version: int, kind: str = "done") -> str:
    """Where it stands."""
    round, slot = round_and_slot(id)
    return f"{folder(round)}/{slot}.{version}.{kind}"

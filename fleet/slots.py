"""What a round's listing says: the names of registers, and what they tell of each slot. Pure."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_NUMBER = "(0|[1-9][0-9]{0,4})"  # as we write them; names that only look alike (00, other scripts' digits) are not ours
_REGISTER = re.compile(rf"([a-z0-9][a-z0-9_-]{{0,63}})\.{_NUMBER}\.(?:(done|void)|(claim|left)\.{_NUMBER})")


class Register(NamedTuple):
    """SLOT.VERSION.done, SLOT.VERSION.void, SLOT.VERSION.claim.N, SLOT.VERSION.left.N"""

    slot: str
    version: int
    kind: str
    number: int


def parse(name: str) -> Register | None:
    """A register's name; nothing for a name that none of us writes."""
    if not (match := _REGISTER.fullmatch(name)):
        return None
    slot, version, outcome, claim, number = match.groups()
    return Register(slot, int(version), outcome or claim, int(number or 0))


@dataclass
class Slot:
    """What the listings have shown of one slot. A version is void when its files turned out to be damaged."""

    version: int = 0
    void: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    claims: dict[int, int] = field(default_factory=dict)  # version -> how many claims it had
    left: set[tuple[int, int]] = field(default_factory=set)  # (version, claim) that was given up

    @property
    def finished(self) -> bool:
        return self.version in self.done

    def take(self, register: Register) -> None:
        """Learn that a register of this slot exists."""
        match register:
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

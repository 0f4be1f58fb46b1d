"""A round as its registers say it: read once, quickly, by somebody who only looks. Nothing is synced for that."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fleet import faults, round_state, summary
from fleet.recipe import Member, Recipe, folder, name
from fleet.round_state import Outcome, SlotState, parse
from fleet.store import REGISTER_LIMIT, Store, Value


@dataclass
class RoundRegisters:
    """One round, as far as it is seen."""

    round: int
    plan: tuple[Recipe, ...]
    members: dict[str, Member] = field(default_factory=dict)  # finished ones, by their place in this round
    made: dict[str, Outcome] = field(default_factory=dict)  # those that were made here
    slots: dict[str, SlotState] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.members) == len(self.plan)

    def maker(self, id: str) -> tuple[str, str]:
        """Who made it, and on which machine."""
        outcome = self.made.get(id)
        return (outcome.by, str(outcome.record.get("machine", ""))) if outcome else ("", "")


def registers_of(
    store: Store, round: int, carried: Mapping[str, Member], before: RoundRegisters | None = None
) -> RoundRegisters | None:
    """A round, or nothing if it is not planned; `carried` are members that may be, `before` is an older look."""
    listed = store.names(folder(round))
    if before is None and "plan" not in listed:
        return None
    plan = before.plan if before else round_state.planned(round, quickly(store, f"{folder(round)}/plan")).plan
    found = RoundRegisters(round, plan)
    slots = {recipe.slot for recipe in found.plan}
    done = summary.read(store, round, quickly)[0] if summary.NAME in listed else {}
    for register in map(parse, listed):
        if register and register.slot in slots:  # people leave other files there, too
            found.slots.setdefault(name(round, register.slot), SlotState()).take(register)
    for recipe in found.plan:
        id = name(round, recipe.slot)
        slot = found.slots.setdefault(id, SlotState())
        if recipe.carried:
            parent = carried.get(recipe.parents[0], found.members.get(recipe.parents[0]))
            if parent is not None:  # an absent one counts as false
                found.members[id] = replace(parent, id=id)
        elif slot.finished:
            try:
                version, record = done.get(recipe.slot, (-1, {}))
                if version != slot.version:
                    record = quickly(store, round_state.register(id, slot.version))
                found.made[id] = round_state.outcome(id, recipe, record, slot.version)
            except (faults.Damaged, faults.Refused, faults.Unfit) as error:
                gone = Member(id, id, recipe, {}, {}, "not readable")
                found.made[id] = Outcome(gone, -1, "", {}, f"{error}; restore it from a backup", "", 0.0, {})
            found.members[id] = found.made[id].member
    return found


def quickly(store: Store, register: str) -> Value:
    """What stands in a register. A long run has a hundred thousand of them; whatever is odd is read with patience."""
    try:
        line, _, seal = store.load(register, REGISTER_LIMIT).partition(b"\n")
        if hashlib.sha256(line).hexdigest()[:16].encode() == seal.strip():
            value = json.loads(line.decode())
            if isinstance(value, dict):
                return value
    except (faults.Fault, ValueError, RecursionError):
        pass
    return store.read(register)

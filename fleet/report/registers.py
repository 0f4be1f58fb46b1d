"""A round as its registers say it: read once, quickly, by somebody who only looks. Nothing is synced for that."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet import faults, summary
from fleet.ancestry.tree import finite
from fleet.known import Slot, parse
from fleet.plans import recipes_in
from fleet.recipe import Member, Recipe, check, folder, name, place
from fleet.store import REGISTER_LIMIT, Store, Value


@dataclass
class Sheet:
    """One round, as far as it is seen."""

    round: int
    plan: tuple[Recipe, ...]
    members: dict[str, Member] = field(default_factory=dict)  # finished ones, by their place in this round
    seconds: dict[str, float] = field(default_factory=dict)  # of those that were made here
    by: dict[str, str] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)  # of absent ones
    slots: dict[str, Slot] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.members) == len(self.plan)


def sheet(store: Store, round: int, known: Mapping[str, Member], before: Sheet | None = None) -> Sheet | None:
    """A round, or nothing if it is not planned; `known` are members that may be carried, `before` is an older look."""
    listed = store.names(folder(round))
    if before is None and "plan" not in listed:
        return None
    found = Sheet(round, before.plan if before else _plan(store, round))
    slots = {recipe.slot for recipe in found.plan}
    done = summary.read(store, round, quickly)[0] if summary.NAME in listed else {}
    for register in map(parse, listed):
        if register and register.slot in slots:  # people leave other files there, too
            found.slots.setdefault(name(round, register.slot), Slot()).take(register)
    for recipe in found.plan:
        id = name(round, recipe.slot)
        slot = found.slots.setdefault(id, Slot())
        if recipe.carried:
            parent = known.get(recipe.parents[0], found.members.get(recipe.parents[0]))
            if parent is not None:  # an absent one counts as false
                found.members[id] = Member(
                    id, parent.origin, parent.recipe, parent.metrics, parent.digests, parent.absent
                )
        elif slot.finished:
            try:
                version, record = done.get(recipe.slot, (-1, {}))
                if version != slot.version:
                    record = quickly(store, f"{folder(round)}/{recipe.slot}.{slot.version}.done")
                _take(found, id, recipe, record)
            except (faults.Damaged, faults.Refused, faults.Unfit) as error:
                found.members[id] = Member(id, id, recipe, {}, {}, "not readable")
                found.why[id], found.by[id], found.machine[id] = f"{error}; restore it from a backup", "", ""
    return found


def quickly(store: Store, register: str) -> Value:
    """What stands in a register. A long run has a hundred thousand of them; whatever is odd is read with patience."""
    try:
        line, _, seal = store.disk.read(register, REGISTER_LIMIT).partition(b"\n")
        if hashlib.sha256(line).hexdigest()[:16].encode() == seal.strip():
            value = json.loads(line.decode())
            if isinstance(value, dict):
                return value
    except (faults.Fault, ValueError, RecursionError):
        pass
    return store.read(register)


def _plan(store: Store, round: int) -> tuple[Recipe, ...]:
    try:
        recipes = recipes_in(quickly(store, f"{folder(round)}/plan"))
        check(round, recipes)
    except (KeyError, TypeError, ValueError) as error:
        raise faults.Damaged(f"{folder(round)}/plan: {error}") from None
    return recipes


def _take(found: Sheet, id: str, recipe: Recipe, record: Mapping[str, Any]) -> None:
    metrics, files = record.get("metrics"), record.get("files")
    if not (isinstance(metrics, dict) and isinstance(files, dict)):
        raise faults.Damaged(f"{folder(place(id)[0])}/{recipe.slot}: metrics or files have another shape")
    absent = str(record.get("absent", ""))
    found.members[id] = Member(id, id, recipe, metrics, dict.fromkeys(files, ""), absent)
    found.seconds[id] = max(0.0, finite(record.get("seconds")) or 0.0)
    found.by[id], found.machine[id] = str(record.get("by", "")), str(record.get("machine", ""))
    if absent:
        found.why[id] = str(record.get("why", ""))

"""Which worker's logger writes to a sink: the holder of the last claim, as long as it looks alive."""

import re

from fleet import faults
from fleet.claims import Watch
from fleet.store import Store, Value

FOLDER = "metrics"
_NAME = re.compile(r"([a-z]+)\.([0-9]{5})\.(claim|left)")


def claims(store: Store, kind: str) -> int:
    """How many there have been."""
    return max(_numbers(store, kind, "claim"), default=-1) + 1


def taken(store: Store, watch: Watch, kind: str, launch: int) -> int | None:
    """Claim a sink, if nobody has it; the claim's number."""
    number = claims(store, kind)
    if number and number - 1 not in _numbers(store, kind, "left") and not watch.dead(_read(store, kind, number - 1)):
        return None
    mine = {"by": store.name, "identity": [*store.host.identity], "launch": launch, "machine": store.host.name}
    return number if store.settle(_path(kind, number, "claim"), mine) == mine else None


def leave(store: Store, kind: str, number: int, why: str) -> None:
    store.settle(_path(kind, number, "left"), {"why": why})


def _read(store: Store, kind: str, number: int) -> Value:
    try:
        return store.read(_path(kind, number, "claim"))
    except (faults.Missing, faults.Damaged, faults.Refused):
        return {}


def _numbers(store: Store, kind: str, what: str) -> set[int]:
    found = (_NAME.fullmatch(name) for name in store.names(FOLDER))
    return {int(each[2]) for each in found if each and (each[1], each[3]) == (kind, what)}


def _path(kind: str, number: int, what: str) -> str:
    return f"{FOLDER}/{kind}.{number:05d}.{what}"

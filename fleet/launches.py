"""Launches: each start of a run has a number; orders to its workers are registers that name it."""

import contextlib
import re
from typing import Any

from fleet import faults, results_version
from fleet.errors import cut
from fleet.store import Store, Value

_NAME = re.compile(r"([0-9]{5})\.(start|stop)")


def begin(store: Store, operational: dict[str, Any], code: str = "", command: str = "", seats: int = 0) -> int:
    """Register a new launch, with the settings that do not change results, its code's hash, how many seats are started
    at least, and for people the command that was given; returns its number. Who joins it later has the same code."""
    number = latest(store) + 1
    token = store.host.token()
    record = {"by": token, "operational": operational, "code": code, "command": command, "seats": seats}
    record |= {"hash": results_version.code_hash()}
    while store.settle(path(number, "start"), record)["by"] != token:
        number += 1
    return number


def latest(store: Store) -> int:
    """The newest launch, or 0."""
    return max((int(m[1]) for n in store.names("launches") if (m := _NAME.fullmatch(n))), default=0)


def settings(store: Store, launch: int) -> dict[str, Any]:
    found = store.confirmed(path(launch, "start"))["operational"]
    if not isinstance(found, dict):
        raise faults.Damaged(f"{path(launch, 'start')}: operational is {found!r}")
    return found


def seats(store: Store, launch: int) -> int:
    """How many it was begun with, at least; nobody knows of a launch that is not there."""
    with contextlib.suppress(faults.Missing):
        found = store.confirmed(path(launch, "start")).get("seats")
        return found if isinstance(found, int) else 0
    return 0


def stop(store: Store, launch: int, why: str, again: bool = True) -> Value:
    """Ask the workers of this launch and of earlier ones to end; a later launch goes on, and may do better or not."""
    return store.settle(path(launch, "stop"), {"by": store.name, "why": cut(why), "again": again})


def goes_on(store: Store, launch: int) -> bool:
    """Whether another launch may come further than this one, which was stopped."""
    with contextlib.suppress(faults.Missing):
        return not ended(store) and store.confirmed(path(launch, "stop")).get("again", True) is not False
    return True


def end(store: Store, why: str) -> Value:
    """The run is over for good, wherever it has got to."""
    return store.settle("launches/end", {"by": store.name, "why": cut(why)})


def ended(store: Store) -> bool:
    return "end" in store.names("launches")


def ordered(store: Store, launch: int) -> str:
    """Why a worker of this launch should end, or nothing."""
    names = store.names("launches")
    if "end" in names:
        return f"the run was ended by {store.confirmed('launches/end').get('why')}"
    stops = [int(m[1]) for n in names if (m := _NAME.fullmatch(n)) and m[2] == "stop"]
    if stops and max(stops) >= launch:
        return str(store.confirmed(path(max(stops), "stop")).get("why"))
    return ""


def path(launch: int, kind: str) -> str:
    return f"launches/{launch:05d}.{kind}"

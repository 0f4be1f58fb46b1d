"""A finished round in one file, for whoever comes late or looks back: a copy of what its registers say, nothing more.

It names the version of each record. Whoever reads it lists the round as well, and takes from it only what is of the
version that counts; all else, and everything if it is damaged, lost or not there, is read from the registers.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fleet import faults
from fleet.recipe import folder
from fleet.store import Store, Unreadable, Value

NAME = "summary"

Done = dict[str, tuple[int, dict[str, Any]]]  # slot -> version, and what stands in that version's register


def write(store: Store, round: int, done: Done, origins: Mapping[str, str]) -> None:
    """Of a round that is complete for good. Not synced: it can be lost without harm, and nobody has to write it."""
    value = {"by": store.name, "done": {slot: [*each] for slot, each in done.items()}, "origins": dict(origins)}
    with contextlib.suppress(faults.Fault, Unreadable):  # too much for one file stays where it is
        store.settle(f"{folder(round)}/{NAME}", value, durable=False)


def read(store: Store, round: int, look: Callable[[Store, str], Value] = Store.read) -> tuple[Done, dict[str, str]]:
    """What was made there, and where those were made that are carried over; by slot."""
    try:
        value = look(store, f"{folder(round)}/{NAME}")
        return dict(_done(value["done"])), {str(slot): str(id) for slot, id in value["origins"].items()}
    except (faults.Missing, faults.Damaged, faults.Refused, KeyError, TypeError, ValueError, AttributeError):
        return {}, {}


def _done(value: Any) -> Iterator[tuple[str, tuple[int, dict[str, Any]]]]:
    for slot, (version, record) in value.items():
        if type(version) is not int or version < 0 or not isinstance(record, dict):
            raise ValueError(f"{slot}: {version!r}")
        yield slot, (version, record)

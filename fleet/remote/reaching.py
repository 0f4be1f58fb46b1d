"""What a machine says of a bucket before a run begins there: whether it reaches it, with whose credentials, how fast,
and who has won a race of conditional puts. `agent.reach` runs it from the copy of the code, with the machine's own
variables.
"""

import json
import os
import sys
import time
from contextlib import suppress
from statistics import median
from typing import Any

from fleet import faults
from fleet.credentials import source_of
from fleet.errors import UserError
from fleet.objects import Objects
from fleet.plain import say

_TRIES, _SIZE = 5, 8 << 20
_FOLDER = ".check"


def reached(base: str, round: str, name: str) -> dict[str, Any]:
    """All machines offer their names for the same one; what stands there at the end is the same for all."""
    objects = Objects(base)
    race, own = f"{_FOLDER}/{round}.race", f"{_FOLDER}/{round}.{name}"
    with suppress(faults.Exists):
        objects.put(race, name.encode(), new=True)
    times, data = [], os.urandom(_SIZE)
    for _ in range(_TRIES):
        began = time.perf_counter()
        stands = objects.get(race, 100).decode(errors="replace")
        times.append(time.perf_counter() - began)
    objects.put(own, data)
    up = time.perf_counter()
    objects.put(own, data)
    down = time.perf_counter()
    whole = objects.get(own, _SIZE) == data
    end = time.perf_counter()
    try:
        objects.put(own, b"", new=True)
        raise faults.Unfit(f"{base}: this store knows no conditional puts (If-None-Match); use another one")
    except faults.Exists:
        objects.remove(own)
    if not whole:
        raise faults.Unfit(f"{base}: what is read there is not what was written")
    speed = {"up": _SIZE / (down - up), "down": _SIZE / (end - down)}
    return {"stands": stands, "seconds": median(times), "source": source_of(base), **speed}


def left(base: str, round: str) -> dict[str, Any]:
    Objects(base).remove(f"{_FOLDER}/{round}.race")
    return {}


def main(verb: str, *words: str) -> None:
    try:
        answer = reached(*words) if verb == "reached" else left(*words)
    except (UserError, faults.Fault) as error:
        answer = {"problem": str(error)}
    say(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])

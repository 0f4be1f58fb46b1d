"""Who has not been heard of for a while, said before anybody counts as dead."""

import contextlib
from collections import defaultdict

from fleet import faults, worker_notes
from fleet.claims import pulse_at, pulse_of, pulsing
from fleet.plain import plain
from fleet.progress import duration
from fleet.store import Store

_PATIENCE = 0.6  # of the seconds after which a worker looks dead: what a network disk shows may be half a minute old


def last_heard(store: Store, worker: str) -> float:
    """When its pulse was written, by the disk's clock; 0 where there is none."""
    return next(iter(store.stamp(pulse_at(worker))[2:3]), 0) / 1e9


def silent(store: Store, launch: int, dead_seconds: float) -> list[str]:
    """Of a launch, a line for each machine that is not heard of, or for single workers of it. Moments of the disk's
    clock are compared with each other; this machine's clock, which may be anything, counts where nobody is heard of."""
    machines, limit = defaultdict[str, dict[str, float]](dict), _PATIENCE * dead_seconds
    for worker in pulsing(store):
        with contextlib.suppress(faults.Fault):
            pulse, moment = pulse_of(store, worker), last_heard(store, worker)
            if pulse.get("launch") == launch and moment:
                machines[plain(pulse.get("machine"), 64)][plain(worker, 64)] = moment
    newest = max((moment for workers in machines.values() for moment in workers.values()), default=0.0)
    if machines and (ago := worker_notes.now(store) - newest) > limit:
        return [f"nobody has been heard of for {duration(ago)}, if this machine's clock is right"]
    return [line for name in sorted(machines) for line in _of(name, machines[name], newest, limit)]


def _of(machine: str, workers: dict[str, float], newest: float, limit: float) -> list[str]:
    late = {worker: newest - moment for worker, moment in workers.items() if newest - moment > limit}
    if len(late) == len(workers):
        return [f"machine {machine} has not been heard of for {duration(min(late.values()))}"]
    return [f"worker {worker} has not been heard of for {duration(ago)}" for worker, ago in late.items()]

"""Waiting: how soon a worker starts what another's publication made possible, and what it costs until then."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.figures import NONE, goal, table
from benchmarks.workers import Toys, cpu_of, toys
from fleet import claims, planning
from fleet.disk_store import DiskStore
from fleet.history import History
from fleet.host import Host
from fleet.processes import options
from fleet.run import open_run
from fleet.store import Store
from fleet.worker import Worker
from tests.toy.strategies import strategy

# -- the delay ---------------------------------------------------------------------------------------------------------

PAIRS = {1.0: 2, 2.0: 3, 3.0: 4, 12.0: 8}  # seconds of waiting -> so many pairs of workers at once
QUICK_PAIRS = {1.0: 2, 3.0: 3}


def delay(place: Path, quick: bool) -> Table:
    """One worker makes a chain of members, each of which the other is waiting for to evaluate."""
    note = "from the publisher's event to the waiting worker's, which comes after its claim; stamps of 1 ms"
    columns = ("waited", "publications", "median ms", "90% below", "longest", "goal")
    shown = table("From publication to the other worker's start", *columns, note=note)
    with contextlib.ExitStack() as stack:
        runs = [
            (seconds, stack.enter_context(_pair(place, seconds, n)))
            for seconds, count in (QUICK_PAIRS if quick else PAIRS).items()
            for n in range(count)
        ]
        time.sleep(15 if quick else 45)
        found = {seconds: list[float]() for seconds, _ in runs}
        for seconds, run in runs:
            found[seconds] += _delays(run, 0.8 * seconds)
    for seconds, delays in found.items():
        _row(shown, f"about {seconds:g} s", delays)
    _row(shown, "all", [each for delays in found.values() for each in delays])
    return shown


def _row(shown: Table, name: str, delays: list[float]) -> None:
    if not delays:
        shown.add_row(name, "0", *[NONE] * 4)
        return
    late = sorted(delays)[int(0.9 * len(delays))]
    figures = [f"{1000 * each:.0f}" for each in (median(delays), late, max(delays))]
    shown.add_row(name, str(len(delays)), *figures, goal(median(delays) < 0.1, "median under 100 ms"))


@contextlib.contextmanager
def _pair(place: Path, seconds: float, n: int) -> Iterator[Toys]:
    silent = 10_000.0  # no pulse tells one worker how fast the other is
    with toys(place, f"delay-{seconds:g}-{n}", population_size=1, dead_seconds=silent) as run:
        run.start(["maker"], sleep=seconds)
        run.start(["waiter"], sleep=0.0)
        yield run


def _delays(run: Toys, at_least: float) -> list[float]:
    """Of evaluations that were waited for; the event before a wait's is the claim that ended it."""
    published = {event["id"]: event["at"] for event in run.events("published") if event["by"] == "maker"}
    mine, found = run.of("waiter"), list[float]()
    for claimed, waited in zip(mine, mine[1:], strict=False):
        if (claimed["what"], waited["what"]) == ("claimed", "waited") and waited["seconds"] > at_least:
            parent = claimed["id"].replace("average", "m0")
            if claimed["id"] != parent and parent in published:
                found.append(claimed["at"] - published[parent])
    return found


# -- the cost ----------------------------------------------------------------------------------------------------------


def idle(place: Path, quick: bool) -> Table:
    """Two workers wait on each run: a process, whose CPU is read, and one in here, whose file operations are."""
    seconds = 10 if quick else 30
    columns = ("waiting for", "CPU, % of a core", "goal", "file operations a second", "goal")
    shown = table("A waiting worker", *columns, note=f"over {seconds} s, each member being made by another worker")
    with contextlib.ExitStack() as stack:
        runs = {count: stack.enter_context(_waiting(place, count)) for count in (1, 8, 64)}
        time.sleep(6)  # the waits are long by now
        before = {count: (cpu_of(pid), store.ops) for count, (pid, store) in runs.items()}
        time.sleep(seconds)
        for count, (pid, store) in runs.items():
            cpu = 100 * (cpu_of(pid) - before[count][0]) / seconds
            ops = (store.ops - before[count][1]) / seconds
            good = goal(cpu < 1, "under 1"), goal(ops < 20, "under 20")
            shown.add_row(f"{count} members", f"{cpu:.2f}", good[0], f"{ops:.1f}", good[1])
    return shown


@contextlib.contextmanager
def _waiting(place: Path, members: int) -> Iterator[tuple[int, Store]]:
    """A run whose first members are all claimed by workers that live and never finish, and two that wait for them."""
    with toys(place, f"idle-{members}", population_size=members, initial_population=(*range(members),)) as run:
        host = Host()
        try:
            _hold(run, host, members)
            run.start(["waiter"])
            store, _ = open_run(run.folder, host, "inside")
            worker = Worker(store, strategy(run.config), _never, options(run.config, 1))
            threading.Thread(target=worker.run, daemon=True).start()
            yield run.processes["waiter"].pid, store
        finally:
            host.stop()
            time.sleep(0.3)


def _hold(run: Toys, host: Host, members: int) -> None:
    planning.plan_ahead(run.store, strategy(run.config), History(run.store))
    run.store.post("bell", host.token())  # as whoever planned would have
    assert isinstance(run.store, DiskStore)
    for n in range(members):
        store = DiskStore(run.store.disk, host, f"holder-{n}")
        history = History(store)
        history.look()
        held = claims.Claims(store, history, claims.Watch(store, host, 60.0), 1)
        held.take(f"0/init-{n}")
        claims.Pulse(store, run.config.dead_seconds / 5, dict).start()


def _never(work: object) -> dict[str, float]:
    raise RuntimeError("nothing here is to be made")

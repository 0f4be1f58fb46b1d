"""Requests of a run in a bucket, counted: the real code on a simulated one."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from fleet.bucket import Bucket
from fleet.context import WorkerOptions
from fleet.worker import Worker
from tests.storm.bucket import LATER, BucketServer, SimObjects
from tests.storm.disk import Inode, Weather
from tests.storm.world import SimHost, World
from tests.toy.config import ToyConfig
from tests.toy.maker import make
from tests.toy.strategies import strategy

WRITES, READS = ("put", "list", "below"), ("get", "pieces", "about")
_LONG = 100_000.0  # simulated seconds, at most


class Counting(SimObjects):
    """Each request by its time and its kind."""

    seen: list[tuple[float, str]]


for _kind in (*WRITES, *READS, "remove"):

    def _counted(self, *args, kind=_kind, call=getattr(SimObjects, _kind), **more):  # type: ignore[no-untyped-def]
        self.seen.append((self.server.world.now, kind))
        return call(self, *args, **more)

    setattr(Counting, _kind, _counted)


class Counted:
    """A run in a simulated bucket whose recipes take so long."""

    def __init__(self, workers: int, seconds: float, **keys: Any) -> None:
        self.workers, self.seconds, self.config = workers, seconds, ToyConfig(**{"algorithm": "matching", **keys})
        self.world, self.over = World(1), list[str]()
        self.server = BucketServer(self.world, [f"h{n}" for n in range(workers)], Weather())
        self.server.set("run.json", Inode(b""), "")

    def start(self, host: str, seen: list[tuple[float, str]]) -> None:
        self.world.start(host, partial(self._work, seen))

    def _work(self, seen: list[tuple[float, str]], host: SimHost) -> str:
        objects = Counting(self.server, host.process)
        objects.seen = seen
        store = Bucket(objects, Path("s3:/simulated/run"), host, f"{host.name}-{host.process.pid}")  # type: ignore[arg-type]
        how = WorkerOptions(launch=1, seats=self.workers, dead_seconds=60.0)
        worker = Worker(store, strategy(self.config), partial(make, size=8, sleep=self.seconds), how)  # type: ignore[arg-type]
        self.over.append(worker.run())
        return self.over[-1]


def requests(slots: int, workers: int, seconds: float, rounds: int = 4, **keys: Any) -> tuple[Counter[str], float]:
    """By kind, of all workers of a whole run; and the simulated seconds."""
    run = Counted(workers, seconds, population_size=slots, max_generations=rounds, inner_steps=1, **keys)
    seen = list[tuple[float, str]]()
    for host in run.server.hosts:
        run.start(host, seen)
    run.world.run(_LONG, 10**8, lambda: len(run.over) == workers)
    return Counter(kind for _, kind in seen), run.world.now


def waiting(held: int, minutes: int = 12) -> list[int]:
    """Of a worker that comes when others hold all there is: how many in each minute."""
    run = Counted(held + 1, _LONG, population_size=held, initial_population=(*range(held),), inner_steps=1)
    *others, last = run.server.hosts
    seen, began = list[tuple[float, str]](), 60.0
    for host in others:
        run.start(host, [])
    run.world.at(began, LATER, lambda: run.start(last, seen))
    run.world.run(began + 60.0 * minutes, 10**8, lambda: False)
    each = Counter(int((at - began) // 60) for at, _ in seen)
    return [each[minute] for minute in range(minutes)]

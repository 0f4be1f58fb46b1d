"""What a run in a bucket costs: requests and their price per round, of the real code on a simulated bucket; and how
fast payloads go to a real one and back, beside plain puts and gets of obstore.

    python -m benchmarks.bucket
"""

import os
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import obstore
from cyclopts import App
from obstore.store import from_url

from fleet.bucket import Bucket
from fleet.context import WorkerOptions
from fleet.host import Host
from fleet.payload import Payload, PayloadWriter
from fleet.run import at
from fleet.worker import Worker
from tests.bucket_server import seaweed
from tests.storm.bucket import LATER, BucketServer, SimObjects
from tests.storm.disk import Inode, Weather
from tests.storm.world import SimHost, World
from tests.toy.config import ToyConfig
from tests.toy.maker import make
from tests.toy.strategies import strategy

PRICES = {"S3": (5.0, 0.4), "R2": (4.5, 0.36)}  # dollars for a million writes and lists, for a million reads
_WRITES, _READS = ("put", "list", "below"), ("get", "pieces", "about")
_LONG = 100_000.0  # simulated seconds, at most

app = App(help=__doc__, version_flags=[])


class Counting(SimObjects):
    """Each request by its time and its kind."""

    seen: list[tuple[float, str]]


for _kind in (*_WRITES, *_READS, "remove"):

    def _counted(self, *args, kind=_kind, call=getattr(SimObjects, _kind), **more):  # type: ignore[no-untyped-def]
        self.seen.append((self.server.world.now, kind))
        return call(self, *args, **more)

    setattr(Counting, _kind, _counted)


class Counted:
    """A run in a simulated bucket whose recipes take so long."""

    def __init__(self, workers: int, seconds: float, **keys: Any) -> None:
        self.workers, self.seconds, self.config = workers, seconds, ToyConfig(algorithm="matching", **keys)
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


def requests(slots: int, workers: int, seconds: float, rounds: int = 4) -> tuple[Counter[str], float]:
    """By kind, of all workers of a whole run; and the simulated seconds."""
    run = Counted(workers, seconds, population_size=slots, max_generations=rounds, inner_steps=1)
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


def priced(seen: Counter[str], rounds: int) -> str:
    writes, reads = (sum(seen[kind] for kind in kinds) / rounds for kinds in (_WRITES, _READS))
    cost = " ".join(f"{name} ${(writes * w + reads * r) / 1e6:.5f}" for name, (w, r) in PRICES.items())
    return f"{writes:8.0f} {reads:8.0f}   {cost}"


@app.command
def counts() -> None:
    """Requests per round, and of a worker that waits."""
    print(" slots workers   writes    reads   price of a round")
    for slots, workers, rounds in ((8, 4, 4), (8, 8, 4), (64, 8, 2), (64, 32, 2), (512, 32, 2)):
        seen, seconds = requests(slots, workers, 300.0, rounds)
        print(f"{slots:6} {workers:7} {priced(seen, rounds)}   {seconds / rounds:6.0f} s; {dict(seen)}", flush=True)
    for held in (8, 64):
        first, *later = waiting(held)
        print(f"a worker that waits for {held}: {first} requests in its first minute, later at most {max(later)}")


@app.command
def speed(megabytes: int = 256, times: int = 5) -> None:
    """Payloads to SeaweedFS on this machine and back, each beside obstore alone, in turn; and the memory it takes."""
    with seaweed() as server, tempfile.TemporaryDirectory() as cache:
        with mock.patch.dict(os.environ, {**server.env(), "FLEET_CACHE": cache}):
            _speed(megabytes, times)


def _speed(megabytes: int, times: int) -> None:
    store, data = at(Path("s3://runs/speed"), Host(), "w"), os.urandom(1 << 20)
    plain = from_url("s3://runs/plain", client_options={"allow_http": True}, region="us-east-1")
    took = dict[str, list[float]]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(times):
        draft = PayloadWriter(store, f"00001.m{n}.0.token")

        def ours(draft: PayloadWriter = draft) -> None:
            with draft.create("weights") as file:
                for _ in range(megabytes):
                    file.write(data)

        def read(draft: PayloadWriter = draft) -> None:
            with Payload(store, draft.attempt, draft.known).open("weights") as file:
                room = memoryview(bytearray(1 << 20))
                while file.readinto(room):
                    pass

        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "put": (lambda: obstore.put(plain, "weights", (data for _ in range(megabytes))), ours),
            "get": (lambda: sum(map(len, obstore.get(plain, "weights").stream())), read),
        }
        for name, pair in ways.items():
            for whose, way in (("obstore", pair[0]), ("ours", pair[1]))[:: 1 if n % 2 else -1]:
                began = time.perf_counter()
                way()
                took.setdefault(f"{name}, {whose}", []).append(time.perf_counter() - began)
    for name in ("put", "get"):
        theirs, mine = took[f"{name}, obstore"], took[f"{name}, ours"]
        rates = [f"{megabytes / statistics.median(each):.0f} MB/s" for each in (mine, theirs)]
        ratios = [a / b for a, b in zip(theirs, mine, strict=True)]
        spread = f"{statistics.median(ratios):.2f} of it ({min(ratios):.2f} to {max(ratios):.2f}; best beside best"
        print(f"{name}: {rates[0]} beside obstore's {rates[1]}: {spread} {min(theirs) / min(mine):.2f})")
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"the most memory beyond what it began with: {more:.0f} MB")


if __name__ == "__main__":
    app()

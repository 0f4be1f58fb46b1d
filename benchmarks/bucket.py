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
from tests.storm.bucket import BucketServer, SimObjects
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
    """Each request by its kind."""

    seen: Counter[str]


for _kind in (*_WRITES, *_READS, "remove"):

    def _counted(self, *args, kind=_kind, call=getattr(SimObjects, _kind), **more):  # type: ignore[no-untyped-def]
        self.seen[kind] += 1
        return call(self, *args, **more)

    setattr(Counting, _kind, _counted)


def requests(slots: int, workers: int, seconds: float, rounds: int = 4) -> tuple[Counter[str], float]:
    """Of a run whose recipes take so long, by kind; and the simulated seconds."""
    world = World(1)
    server = BucketServer(world, [f"h{n}" for n in range(workers)], Weather())
    server.set("run.json", Inode(b""), "")
    config = ToyConfig(algorithm="matching", population_size=slots, max_generations=rounds, inner_steps=1)
    seen = Counter[str]()
    over = []

    def work(host: SimHost) -> str:
        objects = Counting(server, host.process)
        objects.seen = seen
        store = Bucket(objects, Path("s3:/simulated/run"), host, f"{host.name}-{host.process.pid}")  # type: ignore[arg-type]
        how = WorkerOptions(launch=1, seats=workers, dead_seconds=60.0)
        worker = Worker(store, strategy(config), partial(make, size=8, sleep=seconds), how)  # type: ignore[arg-type]
        over.append(worker.run())
        return "over"

    for host in server.hosts:
        world.start(host, work)
    world.run(_LONG, 10**8, lambda: len(over) == workers)
    return seen, world.now


def priced(seen: Counter[str], rounds: int) -> str:
    writes, reads = (sum(seen[kind] for kind in kinds) / rounds for kinds in (_WRITES, _READS))
    cost = " ".join(f"{name} ${(writes * w + reads * r) / 1e6:.5f}" for name, (w, r) in PRICES.items())
    return f"{writes:8.0f} {reads:8.0f}   {cost}"


@app.command
def counts() -> None:
    """Requests per round."""
    print(" slots workers   writes    reads   price of a round")
    for slots, workers, rounds in ((8, 4, 4), (8, 8, 4), (64, 8, 2), (64, 32, 2), (512, 32, 2)):
        seen, seconds = requests(slots, workers, 300.0, rounds)
        print(f"{slots:6} {workers:7} {priced(seen, rounds)}   {seconds / rounds:6.0f} s; {dict(seen)}", flush=True)


@app.command
def speed(megabytes: int = 256) -> None:
    """Payloads to SeaweedFS on this machine and back, each beside obstore alone, in turn; and the memory it takes."""
    with seaweed() as server, tempfile.TemporaryDirectory() as cache:
        with mock.patch.dict(os.environ, {**server.env(), "FLEET_CACHE": cache}):
            _speed(megabytes)


def _speed(megabytes: int, times: int = 3) -> None:
    store, data = at(Path("s3://runs/speed"), Host(), "w"), os.urandom(64 << 20)
    plain = from_url("s3://runs/plain", client_options={"allow_http": True}, region="us-east-1")
    count, took = megabytes // 64, dict[str, list[float]]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for n in range(times):
        draft = PayloadWriter(store, f"00001.m{n}.0.token")

        def ours(draft: PayloadWriter = draft) -> None:
            with draft.create("weights") as file:
                for _ in range(count):
                    file.write(data)

        def read(draft: PayloadWriter = draft) -> None:
            with Payload(store, draft.attempt, draft.seal()).open("weights") as file:
                room = memoryview(bytearray(1 << 20))
                while file.readinto(room):
                    pass

        ways: dict[str, Callable[[], object]] = {
            "put, obstore": lambda: obstore.put(plain, "weights", (data for _ in range(count))),
            "put, ours": ours,
            "get, obstore": lambda: sum(len(each) for each in obstore.get(plain, "weights").stream()),
            "get, ours": read,
        }
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            took.setdefault(name, []).append(time.perf_counter() - began)
    for name, seconds in took.items():
        print(f"{name}: {megabytes / statistics.median(seconds):.0f} MB/s")
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"the most memory beyond what it began with: {more:.0f} MB")


if __name__ == "__main__":
    app()

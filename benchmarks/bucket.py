"""What a run in a bucket costs: requests and their price per round, of the real code on a simulated bucket; and how fast
payloads go to a real one and back, beside plain puts and gets of obstore.

    python -m benchmarks.bucket
"""

from collections import Counter
from functools import partial
from pathlib import Path

from cyclopts import App

from fleet.bucket import Bucket
from fleet.context import WorkerOptions
from fleet.worker import Worker
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

    def _do(self, name, act, changes=False):  # type: ignore[no-untyped-def]
        return super()._do(name, act, changes)


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
        how = WorkerOptions(launch=1, makers=workers, dead_seconds=60.0)
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
    for slots, workers in ((8, 4), (8, 8), (64, 8), (64, 64), (512, 64)):
        seen, seconds = requests(slots, workers, 300.0)
        print(f"{slots:6} {workers:7} {priced(seen, 4)}   {seconds / 4:6.0f} s; {dict(seen)}", flush=True)


if __name__ == "__main__":
    app()

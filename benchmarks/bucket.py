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
from pathlib import Path
from unittest import mock

import obstore
from cyclopts import App
from obstore.store import from_url

from fleet.host import Host
from fleet.payload import Payload, PayloadWriter
from fleet.run import at
from tests.bucket_server import seaweed
from tests.storm.counted import READS, WRITES, requests, waiting

PRICES = {"S3": (5.0, 0.4), "R2": (4.5, 0.36)}  # dollars for a million writes and lists, for a million reads

app = App(help=__doc__, version_flags=[])


def priced(seen: Counter[str], rounds: int) -> str:
    writes, reads = (sum(seen[kind] for kind in kinds) / rounds for kinds in (WRITES, READS))
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

"""What a run in a bucket costs: requests and their price per round, of the real code on a simulated bucket; and how
fast payloads go to a real one and back, beside plain puts and gets of obstore.

    python -m benchmarks.bucket
"""

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import obstore
from cyclopts import App
from obstore.store import from_url

from fleet import launches
from fleet.host import Host
from fleet.payload import Payload, PayloadWriter
from fleet.places import address
from fleet.run import at, create_run
from tests.bucket_server import Seaweed, seaweed
from tests.storm.counted import READS, WRITES, requests, waiting
from tests.toy.config import ToyConfig

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
def server(seconds: float = 20.0, rounds: int = 4) -> None:
    """The same as SeaweedFS counts it, on this machine: eight slots, four real workers, shorter recipes."""
    with _surroundings() as there:
        folder, took = Path("s3://runs/counted"), time.monotonic()
        config = ToyConfig(project_name="toy", population_size=8, max_generations=rounds, inner_steps=1, size=8)
        _finish(config.model_copy(update={"sleep": seconds}), folder, workers := 4)
        took, seen = time.monotonic() - took, there.requests()
    simulated, simulated_took = requests(8, workers, seconds, rounds)
    print(" slots workers   writes    reads   price of a round")
    for who, counts, of in (("SeaweedFS", _kinds(seen), took), ("simulated", simulated, simulated_took)):
        print(f"{8:6} {workers:7} {priced(counts, rounds)}   {of / rounds:6.0f} s, {who}; {dict(counts)}")


@app.command
def waits(minutes: int = 4) -> None:
    """What a worker asks SeaweedFS in each minute while another one makes the only thing there is to make."""
    with _surroundings() as there:
        config = ToyConfig(project_name="toy", population_size=1, max_generations=1, inner_steps=1, size=8)
        config = config.model_copy(update={"sleep": 60.0 * minutes + 30})
        folder = Path("s3://runs/waits")
        with _started(config, folder, 1), _started(config, folder, 1, "waiting"):
            for minute in range(minutes):
                before = there.requests()
                time.sleep(60)
                print(
                    f"minute {minute + 1}: {(there.requests() - before).total()} requests of both workers", flush=True
                )


@contextlib.contextmanager
def _surroundings() -> Iterator[Seaweed]:
    """A server, and no credentials but its owner's."""
    with seaweed() as there, tempfile.TemporaryDirectory() as cache:
        # where nobody listens, as on a machine of no cloud
        nobody = {"FLEET_CACHE": cache, "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
        with mock.patch.dict(os.environ, {**there.env(), **nobody}):
            yield there


def _finish(config: ToyConfig, folder: Path, workers: int) -> None:
    with _started(config, folder, workers) as processes:
        for each in processes:
            if each.wait():
                raise SystemExit("a worker failed")


@contextlib.contextmanager
def _started(config: ToyConfig, folder: Path, workers: int, name: str = "w") -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers alone, without a starter that looks after them."""
    store, _ = create_run(folder, "toy", config.bound(), Host())
    launch = launches.latest(store) or launches.begin(store, config.operational(), seats=workers)
    words = [sys.executable, "-m", "tests.toy", "--launch", str(launch)]
    begun = [
        subprocess.Popen([*words, "--worker", f"{name}-{n}", address(folder / "toy")], stderr=subprocess.DEVNULL)
        for n in range(workers)
    ]
    try:
        yield begun
    finally:
        for each in begun:
            each.kill()
            each.wait()


def _kinds(seen: Counter[str]) -> Counter[str]:
    """By the names that the simulated bucket has for them."""
    names = {"PUT": "put", "POST": "put", "LIST": "list", "GET": "get", "HEAD": "about"}
    found = Counter[str]()
    for kind, count in seen.items():
        found[names.get(kind, kind)] += count
    return found


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

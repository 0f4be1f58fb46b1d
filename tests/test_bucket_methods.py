"""All methods at once on three machines that share nothing but a bucket, with everything that may happen to them in the
midst of it, come to what they come to on a disk."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from evomerge.config import Configuration
from fleet.digest import digest
from fleet.history import opened
from tests import searching, tournaments
from tests.bucket_server import Seaweed
from tests.helpers import LONG, ROOT, Started, Toys, until
from tests.lab.machines import Lab, why_not
from tests.small import KEYS, make_text, make_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(why_not()), reason=f"no machines: {why_not()}"),
]
HOSTS = ("h1", "h2", "h3")
BUCKET = "s3://runs"
OUTAGE, CUT = 5.0, 30.0  # seconds
_ASK = """import sys
from pathlib import Path
from fleet.digest import digest
from fleet.history import opened
for each in sys.argv[1:]:
    history = opened(Path(each))
    print(digest(history) if history.over else history.first_open)
"""


@dataclass(frozen=True)
class Kind:
    """How a run of one method is begun below a place, on a disk or in the bucket, and how others join it there."""

    begin: Callable[[Path, str], list[str]]
    join: list[str]
    run: str  # its folder below that place


def pretraining(script: str, **keys: object) -> Callable[[Path, str], list[str]]:
    def begin(place: Path, base: str) -> list[str]:
        data = {"tokenizer": str(place / "tokenizer"), "datasets": [{"source": str(place / "sentences.jsonl")}]}
        known = {**KEYS, **data, **keys, "project_name": "run", "base_dir": f"{base}/{script}", "dead_seconds": 10.0}
        (file := place / f"{script}.json").write_text(json.dumps(known))
        return [str(ROOT / f"{script}_sim.py"), "--config", str(file)]

    return begin


def search(place: Path, base: str) -> list[str]:
    file = searching.genome_file(place, place, "dare_ties", base=True)
    more = ("--max-fevals", "160", "--population-size", "4", "--random-seed", "4")
    return searching.command(file, Path(f"{base}/search"), place, *more)[1:]


def tournament(place: Path, base: str) -> list[str]:
    file = place / "tournament.json"
    known = Configuration.load(file) if file.exists() else tournaments.config(place, num_generations=12, patience=12)
    known.out = f"{base}/tournament"
    known.save(file)
    return ["-m", "evomerge.cli", "--config", str(file), "--run"]


MANY = {"max_generations": 14, "inner_steps": 60}
KINDS = (
    Kind(pretraining("edt", **MANY), [str(ROOT / "edt.py")], "edt/run"),
    Kind(pretraining("diloco", **MANY), [str(ROOT / "diloco.py")], "diloco/run"),
    Kind(tournament, ["-m", "evomerge.cli"], "tournament"),
    Kind(search, ["-m", "merge.evolve"], "search"),
)


def begins(started: Started) -> bool:
    assert started.process.poll() is None, started.said
    return "1 worker" in started.said


class Methods:
    """All of them, on the machines of a lab."""

    def __init__(self, lab: Lab, store: Seaweed, place: Path) -> None:
        self.lab, self.store, self.place = lab, store, place
        self.processes = Toys(place / "said", {})
        self.env = {**store.env(), "AWS_ALLOW_HTTP": "true", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def words(self, name: str, folder: Path | None = None) -> list[str]:
        """What comes before Python's arguments there."""
        return [*self.lab[name].inside(folder), *(f"{key}={value}" for key, value in self.env.items()), sys.executable]

    def start(self) -> list[Started]:
        first = [
            self.processes.run([*self.words("h1"), *kind.begin(self.place, BUCKET), "--workers", "1"]) for kind in KINDS
        ]
        for name in HOSTS[1:]:
            for kind, begun in zip(KINDS, first, strict=True):
                until(partial(begins, begun), "it is begun", LONG, pause=0.2)
                words = [*kind.join, "--join", f"{BUCKET}/{kind.run}", "--workers", "1"]
                self.processes.run([*self.words(name), *words])
        all = self.processes.started
        until(lambda: False not in map(begins, all), "all have joined", LONG, pause=0.2)
        return [*all]

    def on_a_disk(self) -> list[str]:
        """Their digests there."""
        base = self.place / "disk"
        base.mkdir()
        before = ["env", "-C", str(base), f"PYTHONPATH={ROOT}", sys.executable]
        for kind in KINDS:
            self.processes.run([*before, *kind.begin(self.place, str(base)), "--workers", "1"])
        for each in self.processes.started[-len(KINDS) :]:
            each.ends(0, 2 * LONG)
        return [digest(opened(base / kind.run)) for kind in KINDS]

    def told(self) -> list[str]:
        """Of each run its digest, or the round that it is in."""
        runs = [f"{BUCKET}/{kind.run}" for kind in KINDS]
        asked = subprocess.run([*self.words("h3"), "-c", _ASK, *runs], capture_output=True, text=True, timeout=120)
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.split()

    def in_the_midst(self) -> None:
        """All of them: who is past the first rounds waits for the others."""
        waits: set[str] = set()

        def ready() -> bool:
            told = self.told()
            for kind, each in zip(KINDS, told, strict=True):
                assert each.isdigit() and len(each) < 9, f"all of that was to be in the midst: {told}"
                if int(each) >= 2 and kind.run not in waits:
                    waits.add(kind.run)
                    self.signal("STOP", HOSTS, f"{BUCKET}/{kind.run}")
            return len(waits) == len(KINDS)

        until(ready, "each has made something", LONG, pause=0.2)
        self.signal("CONT", HOSTS)

    def signal(self, name: str, hosts: Sequence[str], run: str = "") -> None:
        """To the workers of all runs, or of one."""
        for host in hosts:
            there = {*self.lab[host].pids("--worker ")} & {*self.lab[host].pids(run)}
            self.lab[host].run("kill", f"-{name}", *map(str, there))


@pytest.fixture
def methods(tmp_path: Path) -> Iterator[Methods]:
    with Lab(tmp_path / "lab", (*HOSTS, "store")) as lab:
        place = lab.shared / "place"
        (place / "said").mkdir(parents=True)
        searching.donors_and_tasks(place)
        make_tokenizer(place / "tokenizer")
        make_text(place / "sentences.jsonl", 8000)
        machine = lab["store"]
        store = Seaweed(lab.shared / "seaweed", machine.address, machine.inside())
        with contextlib.ExitStack() as undo:
            store.start()
            undo.callback(store.kill)
            yield Methods(lab, store, place)


def test_every_method_in_a_bucket_has_a_disks_bytes_whatever_happens(methods: Methods) -> None:
    lab, store = methods.lab, methods.store
    all = methods.start()
    methods.in_the_midst()
    methods.signal("KILL", ("h1", "h3"))
    lab["h2"].cut()
    time.sleep(OUTAGE)  # what is cut or out has no end to wait for
    store.kill()
    time.sleep(OUTAGE)
    store.start()
    time.sleep(CUT - 2 * OUTAGE)
    lab["h2"].heal()
    for each in all:
        each.ends(0, 2 * LONG)
    assert methods.told() == methods.on_a_disk()

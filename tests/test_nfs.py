"""A real run on a real NFS disk: three machines with kernels of their own, and what may happen to them and the disk."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT, Started, Toys, until
from tests.lab.nfs import VERSIONS, NfsLab, why_not
from tests.lab.uml import Machine

pytestmark = [pytest.mark.nfs, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PYTHON = ("env", "OPENBLAS_NUM_THREADS=1", "PYTHONUNBUFFERED=1", sys.executable)
MAKE = """
import json, sys
from pathlib import Path
from fleet import launches
from fleet.host import Host
from fleet.run import create_run
from tests.toy.config import ToyConfig
config = ToyConfig(**json.loads(sys.argv[2]))
store, _ = create_run(Path(sys.argv[1]), config.project_name, config.bound(), Host())
launches.begin(store, config.operational())
"""
Make = Callable[..., "Shared"]


class Shared:
    """A run on the shared disk. `seen` holds what its processes say, and a copy of the run once it is fetched."""

    def __init__(self, lab: NfsLab, seen: Toys) -> None:
        self.lab, self.seen = lab, seen
        self.base = lab.shared / "runs"
        keys = json.dumps({**seen.keys, "project_name": "toy"})
        made = subprocess.run(lab["m1"].ssh(*PYTHON, "-c", MAKE, str(self.base), keys, folder=ROOT), timeout=60)
        assert made.returncode == 0

    def worker(self, machine: Machine, name: str = "") -> Started:
        words = ("-m", "tests.toy", "--worker", name or machine.name, str(self.base / "toy"))
        return self.seen.run(machine.ssh(*PYTHON, *words, folder=ROOT))

    def workers(self) -> dict[str, Started]:
        """One in each machine, and each has made something."""
        started = {machine.name: self.worker(machine) for machine in self.lab.machines.values()}
        until(lambda: {"m1", "m2", "m3"} <= {*self.makers()}, "all have begun", pause=0.5)
        return started

    def makers(self) -> list[str]:
        """Who has finished members, as m1 sees it."""
        done = self.lab["m1"].run("sh", "-c", f"cat {self.base}/toy/rounds/*/*.done", timeout=60).stdout.splitlines()
        return [json.loads(line)["by"] for line in done if line.startswith("{")]

    def same(self) -> Toys:
        """The run is over and has the bytes of an undisturbed one that was made here."""
        self.seen.folder.parent.mkdir()
        packed = subprocess.run(
            self.lab["m1"].ssh("tar", "-C", str(self.base), "-c", "toy"), stdout=subprocess.PIPE, timeout=60, check=True
        )
        subprocess.run(["tar", "-C", str(self.seen.folder.parent), "-x"], input=packed.stdout, timeout=60, check=True)
        self.seen.same()
        assert self.seen.check_files()
        return self.seen


@pytest.fixture
def shared(tmp_path: Path, toys: Callable[..., Toys]) -> Iterator[Make]:
    """Makes a run on a new shared disk."""
    labs: list[NfsLab] = []

    def make(version: str = "4.2", **keys: Any) -> Shared:
        labs.append(NfsLab(tmp_path / "lab", version=version).__enter__())
        return Shared(labs[0], toys(**{"max_generations": 12, "sleep": 1.0, **keys}))

    yield make
    for lab in labs:
        lab.__exit__(None, None, None)


@pytest.mark.parametrize("version", VERSIONS)
def test_three_machines_make_the_same_bytes(shared: Make, version: str) -> None:
    run = shared(version, sleep=0.3)
    for worker in run.workers().values():
        worker.ends(0)
    makers = {claim.rpartition(" ")[2] for claim in run.makers()}
    assert makers == {"m1", "m2", "m3"}
    run.same()


def test_a_machine_loses_its_power(shared: Make) -> None:
    """Another boots in its place, and a new worker there joins."""
    run = shared()
    workers = run.workers()
    run.lab["m2"].power_off()
    run.lab["m2"].start()
    again = run.worker(run.lab["m2"], "m2-again")
    for worker in (workers["m1"], workers["m3"], again):
        worker.ends(0)
    assert "m2-again" in run.makers()
    assert run.same().events("over", of="m1")


def test_the_network_of_a_machine_is_cut(shared: Make) -> None:
    """Its worker goes on where it was, and finds what it was making made by another."""
    run = shared()
    workers = run.workers()
    run.lab["m2"].cut()
    time.sleep(30)
    run.lab["m2"].heal()
    for worker in workers.values():
        worker.ends(0)
    run.same()


def test_the_server_stands_still(shared: Make) -> None:
    run = shared()
    workers = run.workers()
    run.lab.server.stop()
    time.sleep(20)
    run.lab.server.go_on()
    for worker in workers.values():
        worker.ends(0)
    run.same()


def test_the_server_dies_and_starts_again(shared: Make) -> None:
    run = shared()
    workers = run.workers()
    run.lab.server.crash()
    time.sleep(5)
    run.lab.server.start()
    for worker in workers.values():
        worker.ends(0)
    run.same()

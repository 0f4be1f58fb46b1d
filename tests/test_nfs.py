"""A real run on a real NFS disk: three machines with kernels of their own, and what may happen to them and the disk."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fleet.worker_notes import events_in
from tests.helpers import ROOT, Started, Toys, until
from tests.lab.nfs import VERSIONS, NfsLab, why_not
from tests.lab.uml import Machine, cannot_run

pytestmark = [pytest.mark.nfs, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PYTHON = ("env", "OPENBLAS_NUM_THREADS=1", "PYTHONUNBUFFERED=1", sys.executable)
CHAIN = {"population_size": 1, "max_generations": 90_000, "dead_seconds": 10_000.0, "poll_seconds": 0.13}
STARTER = """
import json, sys
from pathlib import Path
from fleet import launches
from fleet.host import Host
from fleet.run import create_run
from tests.toy.config import ToyConfig
config = ToyConfig(**json.loads(sys.argv[2]))
store, _ = create_run(Path(sys.argv[1]), config.project_name, config.bound(), Host())
"""
LAUNCH = "launches.begin(store, config.operational())"
STOP = "launches.stop(store, launches.latest(store), 'enough')"
OWNER = """
import sys, time
from pathlib import Path
from tests.lab.nfs import NfsLab
with NfsLab(Path(sys.argv[1]), ("m1",)) as lab:
    print(lab["m1"].address, flush=True)
    time.sleep(600)
"""
CLOCK = "import sys, time\nfor line in sys.stdin: print(time.time(), flush=True)"
Make = Callable[..., "SharedLearner"]


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    if why := cannot_run():
        pytest.skip(why)


class SharedLearner:
    """A run on the shared disk. `seen` holds what its processes say, and a copy of the run once it is fetched."""

    def __init__(self, lab: NfsLab, seen: Toys) -> None:
        self.lab, self.seen = lab, seen
        self.base = lab.shared / seen.place.name
        self.order(LAUNCH)

    def order(self, what: str, **operational: Any) -> None:
        """As a starter on m1; it makes the run if there is none."""
        keys = json.dumps({**self.seen.keys, **operational, "project_name": "toy"})
        command = self.lab["m1"].ssh(*PYTHON, "-c", STARTER + what, str(self.base), keys, folder=ROOT)
        subprocess.run(command, timeout=60, check=True, stdin=subprocess.DEVNULL)

    def worker(self, machine: str, name: str = "") -> Started:
        words = ("-m", "tests.toy", "--worker", name or machine, str(self.base / "toy"))
        return self.seen.run(self.lab[machine].ssh(*PYTHON, *words, folder=ROOT))

    def workers(self) -> dict[str, Started]:
        """One in each machine, and each has made something."""
        started = {name: self.worker(name) for name in self.lab.names}
        until(lambda: self.makers() >= started.keys(), "all have made something", pause=0.5)
        return started

    def makers(self) -> set[str]:
        """Who has finished members, as m1 sees it."""
        done = self.lab["m1"].run("sh", "-c", f"cat {self.base}/toy/rounds/*/*.done", timeout=60).stdout.splitlines()
        return {json.loads(line)["by"] for line in done if line.startswith("{")}

    def events(self, machine: str) -> list[dict[str, Any]]:
        """What a machine's workers have said so far, as m1 sees it."""
        said = self.lab["m1"].run("sh", "-c", f"cat {self.base}/toy/workers/{machine}*.events", timeout=60).stdout
        return list(events_in(said.encode()))

    def fetch(self) -> Toys:
        """A copy of the run on this side, where the shared disk is not mounted."""
        self.seen.folder.parent.mkdir()
        pack = self.lab["m1"].ssh("tar", "-C", str(self.base), "-c", "toy")
        packed = subprocess.run(pack, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60, check=True).stdout
        subprocess.run(["tar", "-C", str(self.seen.folder.parent), "-x"], input=packed, timeout=60, check=True)
        return self.seen

    def ends_well(self, *workers: Started) -> None:
        """With the bytes of an undisturbed run that was made here."""
        for worker in workers:
            worker.ends(0)
        self.fetch().same()
        assert self.seen.check_files()


@pytest.fixture
def shared(tmp_path: Path, toys: Callable[..., Toys]) -> Iterator[Make]:
    """Makes runs on a new shared disk."""
    with contextlib.ExitStack() as labs:
        made: list[NfsLab] = []

        def make(name: str = "here", version: str = "4.2", **keys: Any) -> SharedLearner:
            if not made:
                made.append(labs.enter_context(NfsLab(tmp_path / "lab", version=version)))
            return SharedLearner(made[0], toys(name, **{"max_generations": 12, "sleep": 1.0, **keys}))

        yield make


@pytest.mark.parametrize("version", VERSIONS)
def test_three_machines_make_the_same_bytes(shared: Make, version: str) -> None:
    run = shared(version=version, sleep=0.3)
    run.ends_well(*run.workers().values())


def test_a_machine_loses_its_power(shared: Make) -> None:
    """It boots again, and a new worker there joins."""
    run = shared()
    workers = run.workers()
    run.lab["m2"].power_off()
    run.lab["m2"].start()
    run.ends_well(workers["m1"], workers["m3"], run.worker("m2", "m2-again"))
    assert "m2-again" in run.makers()


def test_the_network_of_a_machine_is_cut(shared: Make) -> None:
    """Its worker waits where it is, and goes on with the others when it sees the disk again."""
    run = shared(max_generations=24)
    workers = run.workers()
    run.lab["m2"].cut()
    time.sleep(30)
    run.lab["m2"].heal()
    run.ends_well(*workers.values())


def test_the_server_stands_still(shared: Make) -> None:
    run = shared()
    workers = run.workers()
    run.lab.server.stop()
    time.sleep(20)
    run.lab.server.go_on()
    run.ends_well(*workers.values())


def test_the_server_dies_and_starts_again(shared: Make) -> None:
    run = shared()
    workers = run.workers()
    run.lab.server.crash()
    time.sleep(5)
    run.lab.server.start()
    run.ends_well(*workers.values())


# -- the lab -----------------------------------------------------------------------------------------------------------


def test_labs_are_apart_and_leave_nothing(tmp_path: Path) -> None:
    """One ends well, the other by SIGKILL."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path / "other")], cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout
    with NfsLab(tmp_path / "mine", ("m1",)) as lab:
        address = owner.stdout.readline().decode().strip()
        assert address.endswith(".21") and lab["m1"].address.endswith(".21") and address != lab["m1"].address
        assert lab["m1"].do("hostname; ls /mnt/shared").split() == ["m1", "lost+found"]
        assert "Read-only" in lab["m1"].run("touch", str(ROOT / "new")).stderr
        assert not lab.shared.is_mount() and holders(tmp_path / "mine") and holders(tmp_path / "other")
        owner.kill()
        owner.wait()
        until(lambda: not holders(tmp_path / "other"), "the killed one's lab is gone", 20)
        assert lab["m1"].do("touch /mnt/shared/still; ls /mnt/shared").split() == ["lost+found", "still"]
    until(lambda: not holders(tmp_path), "all is gone", 20)


def holders(folder: Path) -> list[str]:
    """What is there because of a lab: processes, loop devices."""
    lines = [*Path("/proc").glob("[0-9]*/cmdline"), *Path("/sys/block").glob("loop*/loop/backing_file")]
    found = []
    for line in lines:
        with contextlib.suppress(OSError):
            found += [str(line)] if f"{folder}/" in line.read_text(errors="replace") else []
    return found


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_waiting_worker_on_another_machine_starts_soon(shared: Make, version: str) -> None:
    """One makes a chain of members, each of which another waits for to evaluate."""
    runs = {seconds: shared(f"{seconds:g}", version, **CHAIN, sleep=seconds) for seconds in (1.5, 4.0)}
    for run in runs.values():
        run.worker("m1")
    time.sleep(8)
    for run in runs.values():
        run.order(LAUNCH, sleep=0.0)
        run.worker("m2")

    def found() -> list[float]:
        return [late for seconds, run in runs.items() for late in delays(run, 0.5 * seconds)]

    until(lambda: len(found()) >= 20, "m2 has waited twenty times", 300, pause=2)
    lab = runs[1.5].lab
    apart = clock(lab["m1"]) - clock(lab["m2"])
    late = [seconds + apart for seconds in found()]
    for run in runs.values():
        run.order(STOP)
        for worker in run.seen.started:
            worker.ends(3)
    print(f"NFS {version}: {len(late)} waits, median {median(late):.3f} s, longest {max(late):.3f} s")
    assert median(late) < 1


def delays(run: SharedLearner, at_least: float) -> list[float]:
    """From m1's publication to m2's claim, each by its own clock, of what m2 has waited for."""
    published = {event["id"]: event["at"] for event in run.events("m1") if event["what"] == "published"}
    events, found = run.events("m2"), list[float]()
    for claimed, waited in zip(events, events[1:], strict=False):
        parent = claimed.get("id", "").replace("average", "m0")
        if (claimed["what"], waited["what"]) == ("claimed", "waited") and waited["seconds"] > at_least:
            found += [claimed["at"] - published[parent]] if parent in published else []
    return found


def clock(machine: Machine) -> float:
    """How many seconds a machine's clock is ahead of ours, by the quickest of its answers."""
    asked = subprocess.Popen(
        machine.ssh(*PYTHON, "-c", CLOCK), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    answers = list[tuple[float, float]]()
    with asked:
        assert asked.stdin and asked.stdout
        for _ in range(20):
            before = time.time()
            print(file=asked.stdin, flush=True)
            theirs = float(asked.stdout.readline())
            answers.append((time.time() - before, theirs - (before + time.time()) / 2))
    return min(answers)[1]

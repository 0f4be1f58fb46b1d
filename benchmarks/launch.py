"""How long it takes from the command to the start of all workers' processes, on 3 and on 32 real hosts of one box.

    python -m benchmarks.launch [--hosts 3,32] [--tries 3]

The hosts are network namespaces with an sshd each; it needs root. All share this box's cores, so 32 hosts here have far
less to compute with than 32 real ones. Python's own start is the launcher with --help.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from cyclopts import App
from rich.console import Console

from benchmarks.figures import goal, table
from tests.helpers import Toys
from tests.lab.machines import Lab, why_not
from tests.launching import LAUNCHER, Launched

GOALS = {3: 3.0, 32: 8.0}
app = App(name="python -m benchmarks.launch", help=__doc__, version_flags=[])


def seconds(run: Toys, command: list[str]) -> float:
    began = time.perf_counter()
    run.run(command).ends(0)
    return time.perf_counter() - began


def tried(folder: Path, hosts: int, number: int) -> tuple[float, float]:
    """Seconds of one launch of a new run, and of Python's own start."""
    with Lab(folder / f"lab-{hosts}-{number}", names=[f"h{n}" for n in range(1, hosts + 1)], disk_mb=64) as lab:
        place = lab.shared / "place"
        place.mkdir()
        keys = {"algorithm": "matching", "population_size": hosts + hosts % 2, "max_generations": 50, "sleep": 1.0}
        run = Launched(place, keys, lab=lab)
        start = seconds(run, [*LAUNCHER, "--help"])
        whole = seconds(run, run.command("launch", "--detach"))
        assert len(run.alive()) == hosts, run.started[-1].said
        run.kill_all()
        return whole, start


@app.default
def main(hosts: str = "3,32", tries: int = 3) -> None:
    if why_not():
        sys.exit(f"no hosts: {why_not()}")
    shown = table("Launch", "hosts", "to the last worker's start", "Python's own start", "without it", "goal")
    with tempfile.TemporaryDirectory() as folder:
        for count in map(int, hosts.split(",")):
            found = [tried(Path(folder), count, n) for n in range(tries)]
            whole, start = (median(each[i] for each in found) for i in (0, 1))
            words = [f"{value:.2f} s" for value in (whole, start, whole - start)]
            limit = GOALS.get(count)
            shown.add_row(str(count), *words, goal(whole - start <= limit, f"{limit:g} s") if limit else "")
    Console().print(shown)


if __name__ == "__main__":
    app()

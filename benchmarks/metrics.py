"""What logging costs a run: two runs side by side, one with all sinks, of which wandb's server never answers.

    python -m benchmarks.metrics --quick

Each has one worker, whose members take as long as they sleep, and what the worker does besides; a round is a member
and its average. The difference between the runs is what the sinks take. Rounds of real runs are minutes: what is 1%
here is far less of those.
"""

import contextlib
import itertools
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median

from cyclopts import App
from rich.console import Console
from rich.table import Table

from benchmarks.figures import NONE, goal, table
from benchmarks.workers import Toys, cpu_of, toys
from tests.helpers import pids

KINDS = {"csv alone": ("csv",), "all, wandb deaf": ("csv", "tensorboard", "trackio", "wandb")}
SLEEP = 1.0  # seconds of a member, and of an average

app = App(name="python -m benchmarks.metrics", help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def main(*, quick: bool = False) -> None:
    """Measure.

    Parameters
    ----------
    quick:
        For a minute instead of five.
    """
    with tempfile.TemporaryDirectory() as place, deaf(), contextlib.ExitStack() as stack:
        os.environ["TRACKIO_DIR"] = f"{place}/trackio"
        runs = {
            name: stack.enter_context(toys(Path(place), f"run-{n}", population_size=1)) for n, name in enumerate(KINDS)
        }
        for name, run in runs.items():
            run.start(["worker"], metrics=KINDS[name], sleep=SLEEP)
        time.sleep(60 if quick else 300)
        Console().print(compared(runs))


def compared(runs: Mapping[str, Toys]) -> Table:
    note = f"a round sleeps {2 * SLEEP:g} s; CPU of all logging processes, beside the time"
    columns = ("sinks", "rounds", "median s", "more", "mean s", "more", "goal", "CPU of sinks")
    shown = table("Rounds with sinks", *columns, note=note)
    times = {name: rounds(run) for name, run in runs.items()}
    alone = times["csv alone"]
    for name, each in times.items():
        more = [100 * (of(each) / of(alone) - 1) for of in (median, mean)]
        beside = 100 * sum(cpu_of(pid) for pid in pids("--sink", str(runs[name].folder))) / sum(each)
        judged = goal(more[1] < 1, "under 1%") if each is not alone else NONE
        said = (f"{median(each):.3f}", f"{more[0]:+.2f}%", f"{mean(each):.3f}", f"{more[1]:+.2f}%")
        shown.add_row(name, str(len(each)), *said, judged, f"{beside:.2f}%")
    return shown


def rounds(run: Toys) -> list[float]:
    """How long each took: two things that one worker made one after the other."""
    ends = [event["at"] for event in run.events("published")][1::2]
    return [b - a for a, b in itertools.pairwise(ends)]


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """A server that takes connections and never answers, as wandb's."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        os.environ |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": "0" * 40}
        yield


if __name__ == "__main__":
    app()

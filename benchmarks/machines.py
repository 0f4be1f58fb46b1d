"""What the second machine brings, measured with clocks: tokens a second, and the time to one machine's loss.

    python -m benchmarks.machines [--seconds 12] [--sequences 1440] [--only "DiLoCo, 4, 1"]

Each machine is a process with a slice of the processors of its own, and a mount of the one disk by a link of its own: a
pipe of so many bytes a second, either way, and so long a delay. What is scaled, and why: the model is small,
and its steps are stretched, so that a machine's device takes as long for a round, beside what crosses the link, as an
H100 at 40% of its peak for a round of 500 steps of 64k tokens of a model as large as 150m. The processor is then mostly
free, as a GPU leaves it. What is not scaled makes it look worse than it is: the pauses in which workers look around,
and registers, which are small only beside a large model. Rounds are all of one length, as in the midst of a long run.
One machine has no link, trains with settings of its own, and sees `sequences`; of several each sees a part of that, so
that all together see more, in a fraction of the time.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console

from benchmarks.cpu_slices import sliced
from benchmarks.exchange import LARGE
from benchmarks.figures import NONE, goal, table
from benchmarks.throttle import mounts, why_not
from benchmarks.trials import COMMON, Trial, _losses, trial
from benchmarks.utilisation import PARAMETERS, Paced, share_of
from fleet import launches
from fleet.host import Host
from fleet.run import create_run, open_run

TOKENS, STEPS, PEAK, SHARE = (
    65_536,
    500,
    989e12,
    0.4,
)  # of a step; of a round; of an H100 in bf16; how much of it is used
REAL = STEPS * 6 * LARGE * TOKENS / (PEAK * SHARE)  # seconds of a round on its device
LINKS: Mapping[str, tuple[float, float]] = {"10": (10.0, 0.0), "1": (1.0, 0.0), "0.1": (0.1, 0.05)}  # Gbit/s, seconds
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "DiLoCo": ("DiLoCo", {}),
    "DiLoCo, OVERLAP 1": ("DiLoCo", {"overlap": 1}),
    "EDT": ("EDT, pairs", {}),
}
COUNTS = (2, 4, 8)
ROUND = 12  # sequences of a slot
PLAIN = {"compile": False}  # which would take minutes of a slice
RISES = 9  # of so many steps, the rate rises for one, as it does in trials of 1,440 sequences
LANE = {"disk_lane": True}
PART = 0.4  # of one machine's time: the goal for four at 1 Gbit/s, with MORE times its tokens a second
MORE = 3.7
_APART = 1.05  # a training that took so much longer than its device's time was held up by this machine
app = App(name="python -m benchmarks.machines", help=__doc__, version_flags=[])


@dataclass(frozen=True)
class Clocked:
    """One run, from the first step of its first machine to the last step of its last one."""

    seconds: float
    tokens: int
    utilisation: float
    loss: float
    held_up: float  # share of trainings that took longer than their device's time
    load: float  # of this machine meanwhile

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def clocked(each: Trial, second: float, rate: float = 0.0, delay: float = 0.0) -> Clocked:
    """`second` is what a sequence takes on a device. Without a rate the disk is this machine's own."""
    rising = {"warmup_steps": each.config.total_steps // RISES}
    config = each.config.model_copy(update={**rising, **(LANE if rate else {})})
    machines = config.population_size
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (base / "disk").mkdir()
        create_run(base / "disk", "run", config.bound(), Host())
        launches.begin(open_run(base / "disk" / "run", Host(), "w")[0], config.operational())
        places = [base / f"machine-{n}" for n in range(machines)] if rate else [base / "disk"]
        for place in places if rate else ():
            stack.enter_context(mounts(base / "disk", [place], rate, delay))
        step = second * config.batch_size
        all = [Paced(place / "run", f"machine-{n}", step, base / f"{n}.json") for n, place in enumerate(places)]
        processes = [get_context("spawn").Process(target=one.work) for one in all]
        for process in processes:
            process.start()
        cores = (os.cpu_count() or 1) / max(COUNTS)
        if why := stack.enter_context(sliced([p.pid for p in processes if p.pid], cores)):
            print(f"no slices of the processors: {why}")
        for process in processes:
            process.join()
        trained = [json.loads(one.out.read_text()) for one in all]
        long = [end - begin > _APART * step * config.steps_in(n) for one in trained for n, begin, end in one]
        begun, ended = min(one[0][1] for one in trained), max(one[-1][2] for one in trained)
        warm = min(3, config.max_generations)
        loss, load = _losses(base / "disk" / "run", each)[0], os.getloadavg()[1]
        return Clocked(ended - begun, each.tokens, share_of(trained, warm), loss, sum(long) / len(long), load)


def apart(method: str, seed: int, sequences: int, machines: int) -> Trial:
    """In rounds of ROUND sequences, with the settings that were found for so many machines."""
    name, keys = METHODS[method]
    steps = max(1, round(ROUND / trial(name, seed, sequences, machines).config.batch_size))
    more = {"inner_steps": steps, "first_inner_steps": steps, "shards": 0, **PLAIN, **keys}
    return trial(name, seed, sequences, machines, **more)


def scaled(gbits: float, seconds: float) -> float:
    """Bytes a second of a link beside which the small model is as large as the large one, and its round as long."""
    return gbits / 8 * 1e9 * PARAMETERS / LARGE * REAL / seconds


@app.default
def main(seconds: float = 12.0, sequences: int = 1440, seed: int = 1, only: str = "") -> None:
    """
    Parameters
    ----------
    seconds
        Of a machine's device for a whole round, for which the real one takes as the page says.
    sequences
        Of one machine; each of several has 0.4 of them.
    only
        One row, by its method, its machines and the Gbit/s, such as "DiLoCo, 4, 1"; and the one machine.
    """
    if why := why_not():
        raise SystemExit(why)
    wanted = [(f"{name}, {count}, {link}", name, count, link) for name in METHODS for count in COUNTS for link in LINKS]
    shown = table("Machines", *_COLUMNS, note=_note(seconds, sequences))
    second = seconds / ROUND  # of a sequence
    alone = clocked(trial("one process, Muon", seed, sequences, 1, **PLAIN), second)
    _row(shown, "one machine", alone, alone)
    for row, name, count, link in wanted:
        if only in ("", row):
            gbits, delay = LINKS[link]
            each = apart(name, seed, round(PART * sequences), count)
            found = clocked(each, second, scaled(gbits, seconds), delay * seconds / REAL)
            _row(shown, row, found, alone, count == 4 and link == "1")
    Console(width=150).print(shown)


_COLUMNS = ("method, machines, Gbit/s", "utilisation", "tokens a second", "of one", "seconds", "of one", "loss",
            "above one's", "held up", "load")  # fmt: skip


def _row(shown: Any, name: str, found: Clocked, alone: Clocked, has_goal: bool = False) -> None:
    more, part, above = found.rate / alone.rate, found.seconds / alone.seconds, found.loss - alone.loss
    told = [f"{more:.2f}", f"{part:.2f}", f"{above:+.3f}"] if found is not alone else [NONE] * 3
    if has_goal:
        told = [
            goal(more >= MORE, f"{told[0]} (at least {MORE})"),
            goal(part <= PART and above <= 0, f"{told[1]} (at most {PART})"),
            goal(above <= 0, told[2]),
        ]
    cells = (f"{found.utilisation:.1%}", f"{found.rate:.0f}", told[0], f"{found.seconds:.0f}", told[1])
    rest = (f"{found.loss:.3f}", told[2], f"{found.held_up:.0%}", f"{found.load:.0f}")
    shown.add_row(name, *cells, *rest)
    Console(width=150).print(" | ".join((name, *cells, *rest)))  # at once: the next one takes minutes


def _note(seconds: float, sequences: int) -> str:
    size = f"{PARAMETERS:,.0f} parameters, {sequences} sequences of {COMMON['seq_length']} tokens on one machine"
    return f"""{size}, {PART:g} of them on each of
several. A round takes {seconds:g} s of a device, the real one's {REAL:.0f} s; links are as much slower as the model is
smaller, and as much faster as its round is shorter. Held up: trainings for which this machine was too slow; load: its
average meanwhile. Times are from the first step to the last one."""


if __name__ == "__main__":
    app()

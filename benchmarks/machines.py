"""What the second machine brings, measured with clocks: tokens a second, and the time to one machine's loss.

    python -m benchmarks.machines [--quick] [--only "DiLoCo, 4, 1"]

Each machine is a process with a slice of the processors of its own, and a mount of the one disk by a link of its own: a
pipe of so many bytes a second, either way, and so long a delay. What is scaled, and why: the model is small,
and its steps are stretched, so that a machine's device takes as long for a round, beside what crosses the link, as an
H100 at 40% of its peak for a round of 500 steps of 64k tokens of a model as large as 150m. The processor is then mostly
free, as a GPU leaves it. What is not scaled makes it look worse than it is: the pauses in which workers look around,
and registers, which are small only beside a large model; so what the clock measures has ten times the parameters of
what the losses are of, and the same settings. Rounds are all of one length, as in the midst of a long run.

One machine trains with settings of its own, and sees `sequences`; its time is what its device takes for them, as if
nothing else cost any. Of several each sees a part of that, so that all together see more, in a fraction of the time.
Which loss a run reaches does not depend on its machines, so `benchmarks.trials` finds it without any pause; what the
clock measures is some rounds, by whose time that of all is reckoned. What was clocked stands in clocked.jsonl, and is
clocked again once that file is gone.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console

from benchmarks.exchange import LARGE
from benchmarks.figures import goal, table
from benchmarks.throttle import why_not
from benchmarks.trials import COMMON, Trial, run, trial
from benchmarks.utilisation import counted, share_of, trained

TOKENS, STEPS = 65_536, 500  # of a step; of a round
PEAK, SHARE = 989e12, 0.4  # of an H100 in bf16; how much of it is used
REAL = STEPS * 6 * LARGE * TOKENS / (PEAK * SHARE)  # seconds of a round on its device
LINKS: Mapping[str, tuple[float, float]] = {"10": (10.0, 0.0), "1": (1.0, 0.0), "0.1": (0.1, 0.05)}  # Gbit/s, seconds
CLOCKED, PARAMETERS = "1.2m", 1_252_000  # what the clock measures
ROUND = 12  # sequences of a machine, for which the real one has STEPS


@dataclass(frozen=True)
class Method:
    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    slots: int = 1  # of a machine
    round: int = ROUND  # sequences of a machine
    part: float = 0.35  # of one machine's sequences, for each of several: what is left of MOST is for all else


METHODS: Mapping[str, Method] = {
    "DiLoCo": Method("DiLoCo"),
    "DiLoCo, narrow": Method("DiLoCo", {"inner_optimizer_state": "narrow"}),
    "DiLoCo, OVERLAP 1": Method("DiLoCo", {"overlap": 1, "lr": 1.4e-2}, slots=2, round=ROUND // 2, part=0.385),
    "EDT": Method("EDT, pairs"),
}
COUNTS = (2, 4, 8)
PLAIN = {"compile": False}  # which would take minutes of a slice
WARM = 3  # the first round that is clocked: before it nobody knows what a slot will want to read
RISES = 9  # of so many steps, the rate rises for one, as it does in trials of 1,440 sequences
LANE = {"disk_lane": True}
MOST = 0.4  # of one machine's time: the goal for four at 1 Gbit/s, with MORE times its tokens a second
MORE = 3.7
Row = tuple[str, int, str]
GOALS: Sequence[Row] = [("DiLoCo", 4, "1"), ("DiLoCo, narrow", 4, "1"), ("DiLoCo, OVERLAP 1", 4, "1")]
ROWS: Sequence[Row] = [*GOALS, ("EDT", 4, "1"), ("DiLoCo", 2, "1"), ("DiLoCo", 8, "1"), ("DiLoCo", 4, "0.1")]
MEASURED = Path(__file__).with_name("clocked.jsonl")
_APART = 1.05  # a training that took so much longer than its device's time was held up by this machine
app = App(name="python -m benchmarks.machines", help=__doc__, version_flags=[])


@dataclass(frozen=True)
class Clocked:
    """Some rounds, each from a machine's first step to its first one of the next round."""

    round: float  # seconds
    utilisation: float
    held_up: float  # share of trainings that took longer than their device's time
    load: float  # of this machine meanwhile


def clocked(each: Trial, machines: int, second: float, rate: float, delay: float) -> Clocked:
    """`second` is what a sequence takes on a device."""
    config = replace(each, size=CLOCKED).config.model_copy(update=LANE)
    step, cores = second * config.batch_size, (os.cpu_count() or 1) / max(COUNTS)
    hosts, _ = trained(config, machines, step, (rate, delay, True), shared=False, cores=cores)
    long = [end - begin > _APART * step * config.steps_in(n) for one in hosts for n, begin, end in one]
    found = [counted(one, WARM) for one in hosts]
    took = sum(one.whole for one in found) / sum(one.rounds for one in found)
    return Clocked(took, share_of(hosts, WARM), sum(long) / len(long), os.getloadavg()[0])


def remembered(key: Sequence[Any], make: Callable[[], Clocked]) -> Clocked:
    """What was clocked before is not clocked again, so that whatever is interrupted goes on where it was."""
    lines = MEASURED.read_text().splitlines() if MEASURED.exists() else []
    for line in map(json.loads, lines):
        if line["key"] == [*key]:
            return Clocked(**line["result"])
    found = make()
    with MEASURED.open("a") as file:
        file.write(json.dumps({"key": [*key], "result": asdict(found)}) + "\n")
    return found


def apart(method: str, seed: int, sequences: int, machines: int) -> Trial:
    """In rounds of as many sequences, with the settings that were found for so many machines."""
    known = METHODS[method]
    slots, sequences = machines * known.slots, sequences // known.slots
    steps = max(1, round(known.round / known.slots / trial(known.name, seed, sequences, slots).config.batch_size))
    more = {"inner_steps": steps, "first_inner_steps": steps, "shards": 0, **PLAIN, **known.keys}
    more["warmup_steps"] = max(1, round(steps * sequences * known.slots / known.round / RISES))
    return trial(known.name, seed, sequences, slots, **more)


def scaled(gbits: float, seconds: float) -> float:
    """Bytes a second of a link beside which the small model is as large as the large one, and its round as long."""
    return gbits / 8 * 1e9 * PARAMETERS / LARGE * REAL / seconds


@app.default
def main(
    seconds: float = 60.0, sequences: int = 1440, rounds: int = 7, seed: int = 1, quick: bool = False, only: str = ""
) -> None:
    """
    Parameters
    ----------
    seconds
        Of a machine's device for a whole round, for which the real one takes as the page says.
    sequences
        Of one machine; each of several has a part of them.
    rounds
        That the clock runs for.
    quick
        Only the rows that have a goal.
    only
        One row, by its method, its machines and the Gbit/s, such as "EDT, 8, 0.1".
    """
    if why := why_not():
        raise SystemExit(why)
    wanted = [row for row in every() if named(row) == only] if only else GOALS if quick else ROWS
    if not wanted:
        raise SystemExit(f"ONLY: {only} is no row; one is {named(GOALS[0])}")
    several = {row: apart(row[0], seed, round(METHODS[row[0]].part * sequences), row[1]) for row in wanted}
    alone, *results = run([trial("one process", seed, sequences, 1, **PLAIN), *several.values()])
    shown = table("Machines", *_COLUMNS, note=_note(seconds, sequences, rounds, alone.averaged))
    second = seconds / ROUND  # of a sequence
    for row, result in zip(wanted, results, strict=True):
        name, count, link = row
        gbits, delay = LINKS[link]
        each = apart(name, seed, METHODS[name].round * rounds, count)
        found = remembered(
            [*row, seconds, rounds, seed, METHODS[name].slots, METHODS[name].round, CLOCKED],
            partial(clocked, each, count, second, scaled(gbits, seconds), delay * seconds / REAL),
        )
        more = count * second * METHODS[name].round / found.round
        part = found.round * result.trial.config.max_generations / (sequences * second)
        _row(shown, row, found, more, part, result.averaged - alone.averaged)
    Console(width=150).print(shown)


def every() -> list[Row]:
    return [(name, count, link) for name in METHODS for count in COUNTS for link in LINKS]


def named(row: Row) -> str:
    return ", ".join(map(str, row))


_COLUMNS = ("method, machines, Gbit/s", "utilisation", "tokens a second, of one's", "time, of one's",
            "loss above one's", "held up", "load")  # fmt: skip


def _row(shown: Any, row: Row, found: Clocked, more: float, part: float, above: float) -> None:
    told = [f"{more:.2f}", f"{part:.3f}", f"{above:+.3f}"]
    if row in GOALS:
        told = [
            goal(more >= MORE, f"{told[0]} (at least {MORE})"),
            goal(part <= MOST and above <= 0, f"{told[1]} (at most {MOST})"),
            goal(above <= 0, told[2]),
        ]
    name, *_ = cells = (
        named(row),
        f"{found.utilisation:.1%}",
        *told,
        f"{found.held_up:.0%}",
        f"{found.load:.0f}",
    )
    shown.add_row(*cells)
    Console(width=150).print(" | ".join(cells))  # at once: the next one takes minutes


def _note(seconds: float, sequences: int, rounds: int, loss: float) -> str:
    size = f"{sequences} sequences of {COMMON['seq_length']} tokens on one machine"
    return f"""{PARAMETERS:,.0f} parameters (losses: of a tenth of them), {size} (loss {loss:.3f}),
a part of them on each of several. A round takes {seconds:g} s of a device, the real one's {REAL:.0f} s; links are as
much slower as the model is smaller, and as much faster as its round is shorter. Clocked: {rounds} rounds but the first
two and the last two, each to the next one's first step. Held up: trainings for which this machine was too slow; load:
its average."""


if __name__ == "__main__":
    app()

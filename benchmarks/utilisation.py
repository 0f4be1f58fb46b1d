"""How much of their time devices train, where the shared disk is slow.

    python -m benchmarks.utilisation [--seconds 5] [--rounds 8] [--delay 0.05]

Runs of a small model: four hosts, each with a worker, and a mount of the one disk through a pipe of so many bytes a
second each way. A training takes the same time in all of them, in which the processor is mostly free, as a GPU leaves
it. The pipe is so narrow that the whole exchange, all in fp32, would take as long as the training if both ways were
busy all the time. In two rows what goes and what comes share one way, like a disk itself, on which the whole exchange
takes 0.9 of the training, so that the lanes are seen and not what they spare. Utilisation: of each worker's time from
the beginning of its third round to that of its last one, what it trained. With FRAGMENTS, rounds are so much shorter
that each part is exchanged as often as the whole is without.
"""

import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console

from benchmarks.cpu_slices import sliced
from benchmarks.exchange import EXACT, config_of, moved
from benchmarks.figures import table
from benchmarks.throttle import SOON, mounts, why_not
from benchmarks.trials import strategy_of
from fleet import launches
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.worker import Worker
from train.recipe_arguments import OFF_DEVICE
from train.training_config import TrainConfig

MODELS = 6.7  # that a slot writes and reads in a round, all in fp32: benchmarks.exchange
PARAMETERS = 124e3
LANE, LATE = {"disk_lane": True}, {"disk_lane": True, "overlap": 1}
AT_90 = "all in fp32 at 0.9"
ROWS: list[tuple[str, Mapping[str, Any], int]] = [
    ("all in fp32", EXACT, 2),
    ("all in fp32, DISK_LANE, OVERLAP 1", {**EXACT, **LATE}, 2),
    (f"{AT_90}, DISK_LANE, OVERLAP 1", {**EXACT, **LATE}, 2),
    (f"{AT_90}, DISK_LANE, OVERLAP 1, FRAGMENTS 4", {**EXACT, **LATE, "fragments": 4}, 1),
    ("int4, moments in 8 bits", {}, 2),
    ("DISK_LANE", LANE, 2),
    ("DISK_LANE, OVERLAP 1", LATE, 2),
    ("int4, moments in 8 bits", {}, 1),
    ("DISK_LANE, OVERLAP 1", LATE, 1),
    ("DISK_LANE, FRAGMENTS 4", {**LANE, "fragments": 4}, 1),
    ("DISK_LANE, OVERLAP 1, FRAGMENTS 4", {**LATE, "fragments": 4}, 1),
]  # what it is called, its keys, slots of a host
WARM = 3  # the first round that is counted
app = App(name="python -m benchmarks.utilisation", help=__doc__, version_flags=[])


@dataclass(frozen=True)
class Paced:
    """A host of the run: its worker, whose every step takes so many seconds."""

    run: Path
    name: str
    seconds: float
    out: Path

    def work(self) -> None:
        from train.member.pretraining_runtime import PretrainingRuntime
        from train.member.pretraining_tasks import _ADVICE, _make
        from train.verdicts import with_verdicts

        trained, seconds = list[tuple[int, float, float]](), self.seconds

        class Device(PretrainingRuntime):
            def train(self, work: Any, turn: Any, start: Any, fill_start: Any, genome: Any) -> Any:
                """Who reads moments does not train meanwhile."""
                reading = 0.0

                def fill(*wanted: Any) -> None:
                    nonlocal reading
                    began = time.monotonic()
                    fill_start(*wanted)
                    reading += time.monotonic() - began

                began = time.monotonic()
                found = super().train(work, turn, start, fill, genome)
                began += reading
                time.sleep(max(0.0, began + seconds * turn.steps - time.monotonic()))
                trained.append((turn.round, began, time.monotonic()))
                return found

        store, run = open_run(self.run, Host(), self.name)
        config = TrainConfig.joined(run["config"], launches.settings(store, launches.latest(store)))
        make = [with_verdicts(lambda: Device(config), _make, _ADVICE) for _ in range(2)]
        second = (open_run(self.run, store.host, self.name)[0], make[1]) if config.disk_lane else None
        how = options(config, launches.latest(store), off_device=OFF_DEVICE)
        Worker(store, strategy_of(config), make[0], how, second=second).run()
        self.out.write_text(json.dumps(trained))


def trained(
    config: TrainConfig,
    hosts: int,
    seconds: float,
    pipe: tuple[float, float, bool],
    shared: bool = True,
    cores: float = 0.0,
    remembered: float = SOON,
) -> tuple[list[list[tuple[int, float, float]]], tuple[float, ...]]:
    """Each host's trainings, by round, begin and end; and bytes a second that went each way over a pipe.

    With `cores`, each host has so large a slice of the processors, from when round 0 is there.
    """
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (base / "disk").mkdir()
        create_run(base / "disk", "run", config.bound(), Host())
        launches.begin(open_run(base / "disk" / "run", Host(), "w")[0], config.operational())
        places = [base / f"host-{n}" for n in range(hosts)]
        pipes = [places] if shared else [[place] for place in places]
        ways = [way for ends in pipes for way in stack.enter_context(mounts(base / "disk", ends, *pipe, remembered))]
        began = time.monotonic()
        paced = [Paced(place / "run", f"host-{n}", seconds, base / f"{n}.json") for n, place in enumerate(places)]
        processes = [get_context("spawn").Process(target=each.work) for each in paced]
        for process in processes:
            process.start()
        if cores:
            last = base / "disk" / "run" / "rounds" / "00000" / "tokens-0.0.done"
            while not last.exists() and all(process.is_alive() for process in processes):
                time.sleep(0.1)
            if why := stack.enter_context(sliced([p.pid for p in processes if p.pid], cores)):
                print(f"no slices of the processors: {why}")
        for process in processes:
            process.join()
        moved = tuple(way.sent / (time.monotonic() - began) for way in ways)
        return [json.loads(each.out.read_text()) for each in paced], moved


@dataclass(frozen=True)
class Counted:
    """Whole rounds of a host: each has its trainings, and all that comes before the next one's first. Not the last
    two: before a run's last round halves that take turns wait for each other, once in a run."""

    rounds: int
    whole: float
    trained: float


def counted(trained: list[tuple[int, float, float]], warm: int) -> Counted:
    first = dict[int, float]()  # training of a round: when it began
    for n, begin, _ in trained:
        if n >= warm:
            first[n] = min(begin, first.get(n, begin))
    first.pop(max(first, default=warm), None)
    last = max(first, default=warm)
    within = [end - begin for n, begin, end in trained if warm <= n < last]
    return Counted(len(first) - 1, first[last] - min(first.values()), sum(within)) if within else Counted(0, 0.0, 0.0)


def share_of(hosts: list[list[tuple[int, float, float]]], warm: int = WARM) -> float:
    found = [counted(trained, warm) for trained in hosts]
    return sum(each.trained for each in found) / sum(each.whole for each in found)


@app.default
def main(seconds: float = 5.0, rounds: int = 8, delay: float = 0.0, only: str = "") -> None:
    if why := why_not():
        raise SystemExit(why)
    names = ("", "slots a host", "utilisation", "busy to the disk", "from it", "MB/s")
    shown = table("Utilisation of devices", *names, note="")
    for name, keys, each in ROWS:
        if only and only != f"{name}, {each}":
            continue
        hosts = 4
        there = hosts * each
        parts = int(keys.get("fragments", 1))  # in rounds that are as much shorter
        config = config_of({"algorithm": "diloco", **keys}, there, rounds * parts)
        both = not name.startswith(AT_90)
        models = MODELS / 2 if both else parts * _models(config) / 0.9  # one way, in a training's time
        rate = models * there * PARAMETERS * 4 / (seconds * each)
        # a second, as docs/clusters.md has it, where rounds are as long as in earnest; as much less in shorter ones
        remembered = min(1.0, seconds * each / parts / 50)
        found, ways = trained(config, hosts, seconds / parts, (rate, delay, both), remembered=remembered)
        share = share_of(found)
        shown.add_row(name, str(each), f"{share:.1%}", *(f"{way / rate:.0%}" for way in ways), f"{rate / 1e6:.2f}")
        print(f"{name}, {each} slots a host: {share:.1%}", flush=True)
    Console(width=120).print(shown)


def _models(config: TrainConfig) -> float:
    """That a slot writes and reads in a round."""
    return sum(map(sum, moved(config.model_copy(update={"max_generations": 10, "disk_lane": False}), True).values()))


if __name__ == "__main__":
    app()

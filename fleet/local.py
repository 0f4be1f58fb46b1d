"""Local workers: start n processes of the method's own script, watch them, and let them end well."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from fleet import faults, launches, status
from fleet.config import FleetConfig, Wrong
from fleet.history import History
from fleet.host import Host
from fleet.recipe import NotYet
from fleet.run import create_run
from fleet.start import Method, process

_QUICK = 60.0  # a worker that lived for so long did not crash at once


@dataclass
class Seat:
    """One local worker's place; a new process takes it when the old one died."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    crashes: int = 0
    again_at: float = 0.0
    code: int | None = None  # how it ended for good


class Starter:
    def __init__(self, method: Method[Any], config: FleetConfig, where: Path, workers: int | None) -> None:
        self.method, self.host = method, Host()
        algorithm = method.algorithm or config.algorithm
        config = config.model_copy(update={"algorithm": algorithm, "project_name": config.project_name or algorithm})
        self.config, self.count = config, workers or config.num_machines
        self.base = (where / config.base_dir).resolve()
        self.folder = self.base / config.project_name
        self._signals = 0
        self._log: IO[bytes] | None = None

    def run(self) -> int:
        """Start or go on, until the run is over; the exit code says how it went."""
        store, new = create_run(self.base, self.config.project_name, self.config.bound(), self.host)
        history = History(store)
        history.look()
        print(f"{'New run' if new else 'Going on with the run'} {self.folder}", flush=True)
        if history.over:
            print("The run is over already.")
            return self._result(history)
        if why := launches.ordered(store, sys.maxsize):
            print(f"{why[0].upper()}{why[1:]}.")
            return 0
        launch = launches.begin(store, self.config.operational())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signal)
        log = self.folder / "workers" / f"local-{launch}.log"
        with log.open("ab") as self._log:
            self._work([Seat(n) for n in range(self.count)], history)
        return self._report(store, history, launch, log)

    def _work(self, seats: list[Seat], history: History) -> None:
        progress = status.Progress(history)
        for seat in seats:
            self._sit(seat)
        while any(seat.code is None for seat in seats):
            self._forward(seats)
            for seat in seats:
                self._check(seat)
            progress.show()
            time.sleep(0.1)
        progress.show()

    def _sit(self, seat: Seat) -> None:
        name = f"local-{seat.number}-{self.host.token()[:8]}"
        seat.process = process(_this_script(), name, self.folder, self.config.threads, self._log)
        seat.started = self.host.now()

    def _check(self, seat: Seat) -> None:
        """A worker that was killed gets a successor, with a growing pause when it died at once."""
        now = self.host.now()
        if seat.process is None:
            if seat.code is None and now >= seat.again_at:
                self._sit(seat)
            return
        if (code := seat.process.poll()) is None:
            return
        seat.crashes = seat.crashes + 1 if now - seat.started < _QUICK else 1
        seat.process = None
        if code in (0, 2, 3, 130) or self._signals or seat.crashes > self.config.restarts:
            seat.code = code
            return
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        print(f"worker {seat.number} {reason}; starting it again", flush=True)
        seat.again_at = now + (0.1 * 2**seat.crashes if seat.crashes > 1 else 0.0)

    # -- ending ---------------------------------------------------------------------------------------------------------

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _forward(self, seats: list[Seat]) -> None:
        """The first Ctrl-C lets each worker end at its next step boundary, the second ends it at once."""
        if not self._signals:
            return
        if self._signals == 1:
            print("\nStopping at the next step; work in progress is kept. Ctrl-C again stops at once.", flush=True)
            self._signals = 2
        number = signal.SIGTERM if self._signals == 2 else signal.SIGKILL
        for seat in seats:
            if seat.process:
                seat.process.send_signal(number)
            elif seat.code is None:
                seat.code = 130

    def _report(self, store: Any, history: History, launch: int, log: Path) -> int:
        history.look(probe=8)
        if history.over:
            return self._result(history)
        if self._signals:
            print(f"Stopped in round {history.first}. The same command goes on from here.")
            return 130
        if why := launches.ordered(store, launch):
            print(f"The run stopped: {why}", file=sys.stderr)
        else:
            print("All workers ended before the run was over.", file=sys.stderr)
        print(f"What they said: {log}", file=sys.stderr)
        return 1

    def _result(self, history: History) -> int:
        last = history.first - 1
        print(f"The run is over after {last} rounds. Its last round:")
        for member in history.round(last):
            try:
                where = f"files/{history.outcome(member.origin).attempt}" if member.digests else ""
            except (NotYet, faults.Fault, KeyError):
                where = ""
            print(f"  {member.id}  {status.metrics_text(member.metrics)}  {where}".rstrip())
        print(f"Everything is in {self.folder}")
        return 0


def _this_script() -> list[str]:
    """The command that runs the script that is running."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    if not (path := getattr(main, "__file__", None)):
        raise Wrong("a run can only be started from a script")
    return [sys.executable, str(Path(path).absolute())]

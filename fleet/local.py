"""Local workers: start n processes of the method's own script, watch them, and let them end well."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from fleet import faults, launches
from fleet.following import say_result
from fleet.forkserver import ForkServer
from fleet.history import History
from fleet.host import Host
from fleet.places import address, here
from fleet.plain import plain, say, several
from fleet.processes import keeper_of, this_command, this_script, thread_counts
from fleet.progress import Progress
from fleet.recipe import NotYet
from fleet.run import create_run, open_run
from fleet.run_config import FleetConfig, UserError
from fleet.seats import OutOfMemoryKills, Seat, ending
from fleet.store import Log, Store

_REST = 60.0  # seconds that a sink has for what it did not take at the end
_LATER = 10.0  # seconds until a process that could not be started is tried again
_SHOWN = 16  # seats that are worth a line
_GONE = ", but the disk that holds it is not mounted there any more: mount it again"


class Process(Protocol):
    """Whoever sits there: a process of this machine, or one that is held elsewhere."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


@dataclass
class LocalSeat(Seat):
    """A seat with the process that sits there."""

    process: Process | None = None
    said: str = ""  # how the last one ended

    @property
    def fate(self) -> str:
        row = f", {self.crashes} times in a row" if self.crashes > 1 else ""
        return f"worker {self.number} {self.said or ending(self.code or 0)}{row}"


class Starter:
    def __init__(self, config: FleetConfig, where: Path, workers: int | None, view: type[Progress] = Progress) -> None:
        self.host, self.view = Host(), view
        self.config, self.count = config, workers or config.num_machines
        self.base = here(Path(config.base_dir), where)
        self.folder = self.base / config.project_name
        self._signals = self._passed_on = self._launch = 0
        self._memory = OutOfMemoryKills()
        self._log: Log | None = None
        self._server: ForkServer | None = None

    def run(self, show: Callable[[], object] | None = None) -> int:
        """Start or go on, until the run is over, and show the result; the exit code says how it went."""
        store, how = self.entered()
        history = History(store)
        history.look_far()
        say(f"{how} {address(self.folder)}")
        if history.over:
            more = "python -m fleet.fork trains it on"
            say(f"The run is over already. Another one needs another folder: another PROJECT_NAME, or --out; {more}.")
            self._log_the_rest(history)
            return self._result(history) or self._shown(show)
        if why := launches.ordered(store, sys.maxsize):
            say(f"{why[0].upper()}{plain(why[1:], 1000)}.")
            return 0
        self._launch = self.launched(store)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signal)
        self._log = store.log(f"workers/{self.log_name()}.log")
        say(f"{several(self.count, 'worker')}; what they say: {self._log.where}")
        seats = [LocalSeat(n) for n in range(self.count)]
        try:
            self._work(seats, history)
            return self._report(store, history, seats) or self._shown(show)
        finally:
            if self._server:
                self._server.close()
            with contextlib.suppress(OSError):  # its disk died meanwhile, and came back as another one
                self._log.close()

    def entered(self) -> tuple[Store, str]:
        """The run, and in words how it was found."""
        bound, section = self.config.bound(), type(self.config)
        store, new = create_run(self.base, self.config.project_name, bound, self.host, section)
        return store, "New run" if new else "Going on with the run"

    def launched(self, store: Store) -> int:
        """The number of the launch that its workers are of."""
        return launches.begin(store, self.config.operational(), command=this_command(), seats=self.count)

    def log_name(self) -> str:
        return f"local-{self._launch}"

    def _work(self, seats: list[LocalSeat], history: History) -> None:
        progress = self.view(history, self.config.rounds, self.config.steps_in)
        for seat in seats:
            self._sit(seat)
        while any(seat.code is None for seat in seats):
            self._forward(seats)
            for seat in seats:
                self._check(seat)
            progress.show()
            time.sleep(0.1)
        progress.show(last=True)

    def _sit(self, seat: LocalSeat) -> None:
        name = f"{self.title(seat.number)}-{seat.number}-{self.host.token()[:8]}"
        try:
            seat.process = self.hired(name)
        except OSError as error:  # no memory for another process just now
            say(f"worker {seat.number} cannot be started: {error}; tried again in {_LATER:g} s")
            seat.again_at = self.host.now() + _LATER
        seat.started = self.host.now()

    def title(self, number: int) -> str:
        """How the names of workers in this seat begin."""
        return "local"

    def hired(self, name: str) -> Process:
        assert self._log
        if not (self._server and self._server.lives):
            counts = thread_counts(self.config.threads)
            self._server = ForkServer(self.script(), self.config.algorithm, self.folder, counts, self._log.file)
        words = ["--leash", "--launch", str(self._launch), "--worker", name, str(self.folder)]
        return self._server.fork(words, self._log.file, self._log.file)

    def script(self) -> list[str]:
        return this_script()

    def _check(self, seat: LocalSeat) -> None:
        """A worker that was killed gets a successor, with a growing pause when it died at once."""
        now = self.host.now()
        self._memory.look(now)
        if seat.process is None:
            if seat.code is None and now >= (seat.again_at or 0.0):
                self._sit(seat)
            return
        if (code := seat.process.poll()) is None:
            return
        seat.process.close()
        seat.process, seat.said = None, self._memory.ending(code, now)
        if seat.ended(code, now, self.config.restarts, leaving=bool(self._signals)):
            say(f"worker {seat.number} {seat.said}; another takes its place")
        elif code == 2:
            say(f"worker {seat.number} ended with code 2; its place stays empty")

    # -- ending --------------------------------------------------------------------------------------------------------

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    def _forward(self, seats: list[LocalSeat]) -> None:
        """The first Ctrl-C lets each worker end at its next step boundary, the second ends it at once."""
        if self._signals == self._passed_on:
            return
        if self._passed_on == 0:
            say(f"\nStopping at {self.view.stops_at}; work in progress is kept. Ctrl-C again stops at once.")
        self._passed_on = self._signals
        for seat in seats:
            if seat.process and self._signals == 1:
                seat.process.terminate()
            elif seat.process:
                seat.process.kill()
            elif seat.code is None:
                seat.code = 130

    def _report(self, store: Store, history: History, seats: list[LocalSeat]) -> int:
        with contextlib.suppress(faults.Passing, NotYet):
            history.look_far()
        if history.over:
            return self._result(history)
        if self._signals:
            if self._signals > 1:  # whoever was killed cannot say it
                with contextlib.suppress(faults.Fault):
                    launches.stop(store, self._launch, "Ctrl-C twice; the same command goes on from here")
            say(f"Stopped in round {max(0, history.first_open)}. The same command goes on from here.")
            return 130
        log = f"Their log: {self._log.where if self._log else ''}"
        if why := launches.ordered(store, self._launch):
            say(f"The run stopped: {plain(why, 1000)}", file=sys.stderr)
            if not launches.goes_on(store, self._launch):
                say(log, file=sys.stderr)
                return 1
        else:
            say("All workers ended before the run was over:", file=sys.stderr)
            say(*(f"  {seat.fate}" for seat in seats[:_SHOWN]), *self._last_words(), sep="\n", file=sys.stderr)
        say(f"{log}\nThe same command goes on from here.", file=sys.stderr)
        return 1

    def _shown(self, show: Callable[[], object] | None) -> int:
        """By a process that has loaded already what that takes; where there is none, by this one."""
        if not show:
            return 0
        try:
            process = self._server and self._server.fork(["--show", str(self.folder)], sys.stdout, sys.stderr)
        except (OSError, AttributeError):  # a stream that is no file
            process = None
        if not process:
            show()
            return 0
        while (code := process.poll()) is None:
            if self._signals > self._passed_on:
                process.kill()
            time.sleep(0.05)
        if code >= 0:
            return code
        say(f"The result was not shown, since that process {ending(code)}. The same command shows it.", file=sys.stderr)
        return 130 if self._signals > self._passed_on else 1

    def _log_the_rest(self, history: History) -> None:
        """What a sink did not take when the run ended."""
        keeper = keeper_of(self.folder, self.host, f"starter-{self.host.token()}", self.script(), self.config, say)
        keeper.start()
        keeper.end(history.first_open, over=True, patience=_REST)

    def _last_words(self, most: int = 8) -> list[str]:
        """What the log says besides the usual; through its handle, since the disk may not be mounted here any more."""
        assert self._log
        try:
            file = self._log.file
            cut = file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16))) > 0
            lines = file.read().decode(errors="replace").splitlines()[cut:]
        except OSError as error:  # the handle has died with its mount
            return [f"  {error.strerror}"]
        unusual = [line for line in lines if " INFO " not in line and " DEBUG " not in line]
        return [f"  {plain(line, 500)}" for line in unusual[-most:]]

    def _result(self, history: History) -> int:
        say_result(history, self.folder, self.view, "" if self._mounted(history.store) else _GONE)
        return 0

    def _mounted(self, store: Store) -> bool:
        """What is at the run's path is the run that this process has worked on."""
        with contextlib.suppress(UserError, faults.Fault):
            return open_run(self.folder, self.host, "starter")[0].run_id == store.run_id
        return False

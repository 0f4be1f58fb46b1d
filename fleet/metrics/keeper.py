"""A worker's part in metrics: whoever claims a sink keeps a process beside itself that logs to it. Nothing here ever
waits for a sink, but for some seconds when the worker ends."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet import faults
from fleet.claims import Watch
from fleet.metrics import claim
from fleet.metrics.logger import AGAIN, DONE, ELSEWHERE, LOST
from fleet.metrics.sinks import lacking
from fleet.store import Store

_LOOK = 5.0  # seconds between two looks at who logs, and the first pause after a failure
_LONGEST = 600.0  # seconds: of a pause after failures in a row
PATIENCE = 10.0  # seconds that the end waits for a sink


@dataclass
class KeptSink:
    """One sink, as this worker sees it."""

    kind: str
    number: int | None = None  # of this worker's claim
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    again_at: float = 0.0
    closed: bool = False  # nothing more to do here


class SinkKeeper:
    """A thread of its own, with a view of the disk of its own: `store` is nobody else's."""

    def __init__(
        self,
        store: Store,
        kinds: Sequence[str],
        command: Callable[[str, int], list[str]],
        note: Callable[[str], None],
        launch: int = 0,
        dead_seconds: float = 60.0,
    ) -> None:
        self.store, self.command, self.note, self.launch = store, command, note, launch
        self.watch = Watch(store, store.host, dead_seconds)
        self.seats = [KeptSink(kind) for kind in kinds if kind not in lacking(kinds)]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, rounds: int, over: bool, patience: float = PATIENCE) -> list[str]:
        """The run has got so far; loggers log that and end. Those sinks that have not got it all."""
        self._ending.set()
        self._thread.join(patience)
        for seat in self.seats:
            with contextlib.suppress(OSError):
                if seat.process and seat.process.stdin:
                    seat.process.stdin.write(f"{rounds}\n".encode())
                    seat.process.stdin.close()
        end, late = time.monotonic() + patience, list[str]()
        for seat in self.seats:
            late += [seat.kind] * (not self._gone(seat, end, over))
        for kind in late:
            self.note(f"{kind} has not taken everything; the same command goes on with it")
        return late

    def _gone(self, seat: KeptSink, end: float, over: bool) -> bool:
        """Whether it has logged everything, as far as this worker knows. If that is all there will ever be, nobody
        needs the claim any more."""
        if seat.number is None:
            return True
        code = None
        if seat.process:
            try:
                code = seat.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                seat.process.kill()
                seat.process.wait()
        if not (over and code == DONE):
            self._leave(seat, "the worker has ended")
        return code == DONE

    # -- meanwhile ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for seat in self.seats:
                with contextlib.suppress(faults.Fault):
                    self._tend(seat)
            if self._ending.wait(_LOOK):
                return

    def _tend(self, seat: KeptSink) -> None:
        if seat.process and (code := seat.process.poll()) is not None:
            self._ended(seat, code)
        now = time.monotonic()
        if seat.process or seat.closed or now < seat.again_at:
            return
        if seat.number is None:
            seat.number = claim.taken(self.store, self.watch, seat.kind, self.launch)
        if seat.number is not None:
            words = self.command(seat.kind, seat.number)
            try:
                seat.process = subprocess.Popen(words, stdin=subprocess.PIPE)
            except OSError:  # this machine has no room for it just now
                self._ended(seat, AGAIN)

    def _ended(self, seat: KeptSink, code: int) -> None:
        seat.process = None
        if code == LOST:
            seat.number = None
        elif code == ELSEWHERE:
            seat.closed = True
            self._leave(seat, "it cannot be used here")
            self.note(f"{seat.kind} cannot be used on this machine (this worker's log says why)")
        else:
            seat.failures += 1
            pause = min(_LONGEST, _LOOK * 2 ** (seat.failures - 1))
            seat.again_at = time.monotonic() + pause
            self.note(f"{seat.kind} takes no metrics (this worker's log says why); again in {pause:.0f} s")

    def _leave(self, seat: KeptSink, why: str) -> None:
        if seat.number is not None:
            with contextlib.suppress(faults.Fault):
                claim.leave(self.store, seat.kind, seat.number, why)
            seat.number = None

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
        self.sinks = [KeptSink(kind) for kind in kinds if kind not in lacking(kinds)]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, rounds: int, over: bool, patience: float = PATIENCE) -> list[str]:
        """The run has got so far; loggers log that and end. Those sinks that have not got it all."""
        self._ending.set()
        self._thread.join(patience)
        for sink in self.sinks:
            with contextlib.suppress(OSError):
                if sink.process and sink.process.stdin:
                    sink.process.stdin.write(f"{rounds}\n".encode())
                    sink.process.stdin.close()
        end = time.monotonic() + patience
        late = [sink.kind for sink in self.sinks if not self._gone(sink, end, over)]
        for kind in late:
            self.note(f"{kind} has not taken everything; the same command goes on with it")
        return late

    def _gone(self, sink: KeptSink, end: float, over: bool) -> bool:
        """Whether it has logged everything, as far as this worker knows. If that is all there will ever be, nobody
        needs the claim any more."""
        if sink.number is None:
            return True
        code = None
        if sink.process:
            try:
                code = sink.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                sink.process.kill()
                sink.process.wait()
        if not (over and code == DONE):
            self._leave(sink, "the worker has ended")
        return code == DONE

    # -- meanwhile ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            for sink in self.sinks:
                with contextlib.suppress(faults.Fault):
                    self._tend(sink)
            if self._ending.wait(max(_LOOK, 6 * self.store.breath)):
                return

    def _tend(self, sink: KeptSink) -> None:
        if sink.process and (code := sink.process.poll()) is not None:
            self._ended(sink, code)
        if sink.process or sink.closed or time.monotonic() < sink.again_at:
            return
        if sink.number is None:
            sink.number = claim.taken(self.store, self.watch, sink.kind, self.launch)
        if sink.number is not None:
            try:
                sink.process = subprocess.Popen(self.command(sink.kind, sink.number), stdin=subprocess.PIPE)
            except OSError:  # this machine has no room for it just now
                self._ended(sink, AGAIN)

    def _ended(self, sink: KeptSink, code: int) -> None:
        sink.process = None
        if code == LOST:
            sink.number = None
        elif code == ELSEWHERE:
            sink.closed = True
            self._leave(sink, "it cannot be used here")
            self.note(f"{sink.kind} cannot be used on this machine (this worker's log says why)")
        else:
            sink.failures += 1
            pause = min(_LONGEST, _LOOK * 2 ** (sink.failures - 1))
            sink.again_at = time.monotonic() + pause
            self.note(f"{sink.kind} takes no metrics (this worker's log says why); again in {pause:.0f} s")

    def _leave(self, sink: KeptSink, why: str) -> None:
        if sink.number is not None:
            with contextlib.suppress(faults.Fault):
                claim.leave(self.store, sink.kind, sink.number, why)
            sink.number = None

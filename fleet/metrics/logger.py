"""The process that logs a run's metrics to one sink, beside the worker that has started it and as long as it lives.

It reads the registers by itself. The worker holds its standard input: a number there is how far the run has got, and
that this is the end; when it closes without one the worker has died, and whoever takes its place goes on.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence

from fleet import faults
from fleet.bell import Bell
from fleet.errors import UserError, first_line
from fleet.history import History
from fleet.metrics.claim import claims
from fleet.metrics.sink import LoggedRun, MetricSink, Point
from fleet.metrics.sinks import KINDS
from fleet.recipe import NotYet

Points = Callable[[History, int], list[Point]]
DONE, AGAIN, ELSEWHERE, LOST = 0, 1, 2, 4  # how it ends
_LOOK, _PROBE = 1.0, 15  # seconds between two looks, and so many of them until one that waits for no bell
_VISIBLE = 10.0  # seconds that a disk may take to show what the worker has seen

log = logging.getLogger("fleet.metrics")


class Leash:
    """What the worker says on standard input."""

    def __init__(self) -> None:
        self.rounds: int | None = None
        self.told = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        text = b""
        while part := os.read(0, 64):
            text += part
            if text.endswith(b"\n"):
                self.rounds = int(text)
                self.told.set()
        if self.rounds is None:
            os._exit(LOST)  # at once, whatever it waits for: another one may log already


def run(kind: str, history: History, number: int, logged: LoggedRun, points: Points, artifacts: Sequence[str]) -> int:
    """Log until the run is over or the worker ends; the exit code says what is to be done."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # the worker says when it is time
    leash = Leash()
    try:
        return Logger(kind, history, number, points, KINDS[kind](logged), leash).run(artifacts)
    except UserError as why:
        log.warning("%s: %s", kind, why)
        return ELSEWHERE
    except Exception as error:  # whatever a service and a network can come up with
        log.warning("%s: %s", kind, first_line(error))
        os._exit(AGAIN)  # at once: what such libraries do at the end may wait for ever


class Logger:
    def __init__(
        self, kind: str, history: History, number: int, points: Points, sink: MetricSink, leash: Leash
    ) -> None:
        self.kind, self.history, self.number, self.points = kind, history, number, points
        self.sink, self.leash, self.done, self._looks = sink, leash, 0, 0
        self.host, self.bell = history.store.host, Bell(history.store)

    def run(self, artifacts: Sequence[str]) -> int:
        while not self.leash.told.wait(max(_LOOK, self.history.store.breath) if self._looks else 0.0):
            if not self._look():
                return LOST
        end = self.host.now() + _VISIBLE
        while self.done < (self.leash.rounds or 0) and self.host.now() < end:
            if not self._look(at_once=True):
                return LOST
            self.host.sleep(0.1)
        there = map(self.history.store.copy_of, artifacts if self.history.over else ())
        self.sink.close([file for file in there if file.is_file()])
        self.history.store.share()
        return DONE if self.done >= (self.leash.rounds or 0) else AGAIN

    def _look(self, at_once: bool = False) -> bool:
        """Log what is new; false if another one does that now."""
        self._looks += 1
        with contextlib.suppress(faults.Fault, NotYet):
            if not (self.bell.rung() or at_once or self._looks % _PROBE == 1):
                return True
            self.history.look_far()
            if self.history.first_open > self.done:
                new, first = self.points(self.history, self.done), self.history.first_open
                if claims(self.history.store, self.kind) != self.number + 1:
                    return False
                if new := [point for point in new if point.step > self.sink.upto]:
                    self.sink.write(new)
                    self.history.store.share()
                for round in range(self.done, first):
                    self.history.sum_up(round)
                self.done = first
        return True

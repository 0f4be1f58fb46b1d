"""What a worker did, a line each, in a file of its own under workers/. For people and the status; never acted on."""

import contextlib
import logging
import math
import threading
from collections import deque
from typing import Any

from fleet import faults, strictjson
from fleet.errors import cut
from fleet.store import Appender, Store
from fleet.worker_notes import END, TAIL, WorkerNotes, read

_EVERY = 0.5  # seconds between two writes
_KEPT = 1000  # lines that wait for a disk that takes no more

log = logging.getLogger("fleet")


class Events:
    """Appends to workers/NAME.events; a disk that takes no more must not stop the work."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._file: Appender | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()  # the pulse's thread flushes, too, while a long recipe runs
        self._writing = False  # one at a time: in a bucket, each write replaces what the one before has written
        self._written = -math.inf
        self._sums, self._since = WorkerNotes(store.name), 0  # bytes since they were last noted
        self.begun = False
        self._torn = ""  # after a write that failed a new line begins

    def note(self, what: str, id: str = "", **more: Any) -> None:
        more = {key: cut(value) if isinstance(value, str) else value for key, value in more.items()}
        line = {"at": round(self.store.host.stamp(), 3), "what": what, **({"id": id} if id else {}), **more}
        log.info("%s %s %s", what, id, " ".join(f"{k}={v}" for k, v in more.items()))
        with self._lock:
            self._sums.take(line)
            self._lines.append(strictjson.text(line) + "\n")
            self._since += len(self._lines[-1])
            if self._since > TAIL // 4:
                self._sum_up()
        if self.store.host.now() - self._written > max(_EVERY, self.store.breath):
            self.flush()

    def flush(self) -> None:
        """Short recipes come fast; their events go to the disk together."""
        with self._lock:
            if self._writing:  # whoever is at it comes back for these
                return
            self._writing = True
        while lines := self._taken():
            self._written = self.store.host.now()
            try:
                self._open().write((self._torn + "".join(lines)).encode())
                self._torn = ""
            except faults.Fault:
                self._torn = "\n"
                with self._lock:
                    self._lines = (lines + self._lines)[-_KEPT:]
                    self._writing = False
                return

    def _taken(self) -> list[str]:
        """The lines to be written now."""
        with self._lock:
            lines, self._lines = self._lines, []
            self._writing = bool(lines)
        return lines

    def inherit(self, gone: WorkerNotes) -> None:
        """The sums of a worker whose notes nobody reads any more."""
        with self._lock:
            self._sums.add(gone)
            self._sum_up()
        self.flush()

    def begin_anew(self) -> None:
        """The file was put away as one of somebody who is gone: whoever did that has its sums."""
        with self._lock:
            gone, self._sums = self._sums, WorkerNotes(self.store.name)
            if self._file:
                with contextlib.suppress(faults.Fault):
                    self._file.close()
            self._file = None
            self._sums.machine, self._sums.launch = gone.machine, gone.launch
            self._sum_up()

    def _sum_up(self) -> None:
        self._since = 0
        self._lines.append(strictjson.text({"at": round(self.store.host.stamp(), 3), **self._sums.so_far()}) + "\n")

    def _open(self) -> Appender:
        file = f"workers/{self.store.name}{END}"
        if not self.begun:  # the name may have been used before
            self._sums.add(read(self.store, file))
        self.begun = True
        self._file = self._file or self.store.append(file)
        return self._file


class Tail(logging.Handler):
    """The last lines of this process's log, to stand in the record of a failure."""

    def __init__(self, lines: int = 40) -> None:
        super().__init__()
        self.lines = deque[str](maxlen=lines)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(cut(self.format(record), 2000))

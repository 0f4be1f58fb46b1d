"""What a worker did, a line each, in a file of its own under workers/. For people and the status; never acted on."""

import logging
import math
import threading
from collections import deque
from typing import Any

from fleet import faults, strictjson
from fleet.disk import Writer
from fleet.store import Store

_EVERY = 0.5  # seconds between two writes
_KEPT = 1000  # lines that wait for a disk that takes no more

log = logging.getLogger("fleet")


class Events:
    """Appends to workers/NAME.events; a disk that takes no more must not stop the work."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._file: Writer | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()  # the pulse's thread flushes, too, while a long recipe runs
        self._written = -math.inf
        self._torn = ""  # after a write that failed a new line begins

    def note(self, what: str, id: str = "", **more: Any) -> None:
        line = {"at": round(self.store.host.stamp(), 3), "what": what, **({"id": id} if id else {}), **more}
        log.info("%s %s %s", what, id, " ".join(f"{k}={v}" for k, v in more.items()))
        with self._lock:
            self._lines.append(strictjson.text(line) + "\n")
        if self.store.host.now() - self._written > _EVERY:
            self.flush()

    def flush(self) -> None:
        """Short recipes come fast; their events go to the disk together."""
        with self._lock:
            lines, self._lines = self._lines, []
        if not lines:
            return
        self._written = self.store.host.now()
        try:
            self._file = self._file or self.store.disk.append(f"workers/{self.store.name}.events")
            self._file.write((self._torn + "".join(lines)).encode())
            self._torn = ""
        except faults.Fault:
            self._torn = "\n"
            with self._lock:
                self._lines = (lines + self._lines)[-_KEPT:]


class Tail(logging.Handler):
    """The last lines of this process's log, to stand in the record of a failure."""

    def __init__(self, lines: int = 40) -> None:
        super().__init__()
        self.lines = deque[str](maxlen=lines)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record)[:2000])

"""How far long reading has come: a line that changes in a terminal, nothing elsewhere or for short work."""

import sys
import time
from types import TracebackType
from typing import Self

from fleet.plain import utter

_QUIET = 1.0  # seconds: shorter work needs no words


class ProgressLine:
    def __init__(self) -> None:
        self._began, self._said = time.monotonic(), 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._began > _QUIET and now - self._said > 0.2:
            self._said = now
            utter(f"\rreading {what}: {done:,} of {max(done, of):,}\033[K", sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._said:
            utter("\r\033[K", sys.stderr)

"""Seats: each is one worker's place, in which a new process is started when the last one died. No libraries: a
supervisor runs on bare Python."""

import contextlib
import math
import signal
from dataclasses import dataclass
from pathlib import Path

QUICK = 60.0  # seconds; a worker that lived for so long did not crash at once
LATER, LATEST = 60.0, 3600.0  # seconds until another try where something is wrong that may pass
SPENT = 75  # this process was of no use (any more), and a new one may be
_LATELY = 10.0  # seconds
FINAL = (0, 2, 3, 130)  # the run is over, something is wrong here, the run stopped, interrupted: no second try helps


@dataclass
class Seat:
    """One worker's place; a new process takes it when the old one died."""

    number: int
    started: float = 0.0
    crashes: int = 0  # in a row, each soon after the start
    worked: bool = False  # a process lived long here: what is wrong now may pass, as a disk that refuses for a while
    again_at: float | None = None  # when the next one takes it
    code: int | None = None  # how it ended for good

    def ended(self, code: int, now: float, restarts: int, leaving: bool) -> bool:
        """Note how its process ended; says whether another one shall take the place."""
        lived = now - self.started >= QUICK
        self.crashes, self.worked = 1 if lived else self.crashes + 1, self.worked or lived
        later = code == 2 and self.worked
        final = code in FINAL and not later
        if final or leaving or code != SPENT and self.crashes > restarts:
            self.code, self.crashes = code, 0 if final else self.crashes
            return False
        self.again_at = now + self._pause(code, later)
        return True

    def _pause(self, code: int, later: bool) -> float:
        if code == SPENT:  # a device that is gone may come back
            return min(LATEST, 2.0 ** min(20, self.crashes))
        return LATER if later else min(10.0, 0.1 * 2**self.crashes) if self.crashes > 1 else 0.0


def ending(code: int) -> str:
    """In words."""
    if code == SPENT:
        return f"ended with code {code}, to be started anew (its device or the disk failed)"
    names = {each.value: each.name for each in signal.Signals}  # but of most real-time signals
    return f"ended with code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"


class OutOfMemoryKills:
    """Of the whole machine, or of the group that holds its processes: did the kernel kill lately for want of it?"""

    def __init__(self) -> None:
        self._kills, self._at = _out_of_memory_kills(), -math.inf

    def look(self, now: float) -> None:
        if (kills := _out_of_memory_kills()) > self._kills:
            self._kills, self._at = kills, now

    def ending(self, code: int, now: float) -> str:
        """How a process ended, in words."""
        self.look(now)
        starved = code == -signal.SIGKILL and now - self._at < _LATELY
        return ending(code) + (" when the machine was out of memory" if starved else "")


def _out_of_memory_kills() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0

"""What a process knows of the machine it runs on: a clock, sleep, threads, fresh names, who is still alive."""

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AT_ONCE = 4  # files that are read or written side by side
_TICK = 0.5  # seconds
_SLOW = 0.005  # seconds that a call takes which is worth a thread

Identity = tuple[str, int, int, str]  # boot id, pid namespace, pid, start time: no second process ever has the same


class Host:
    """The real machine; the tests put a simulated one in its place."""

    def __init__(self) -> None:
        self.name = socket.gethostname()
        self._stop = threading.Event()
        pid = os.getpid()
        self.identity: Identity = (_boot(), os.stat("/proc/self/ns/pid").st_ino, pid, born(pid))
        self._ticked, self._stood = math.inf, 0.0  # when it was last known to run, and for how long it did not
        self._clock = threading.Lock()

    @property
    def stopping(self) -> bool:
        """Somebody asked this process to end at its next step boundary."""
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def now(self) -> float:
        """Seconds on this process's own clock; never compared with another's."""
        with self._clock:
            return time.monotonic() - self._stood - self._standing()

    def keep_time(self) -> None:
        """From now on the clock stands still while the process does (stopped, frozen, a machine that swaps): what it
        did not look at meanwhile must not seem to have kept silent, or to be late, for so long."""
        self._ticked = time.monotonic()
        self.background(self._tick)

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK)
            with self._clock:
                self._stood += self._standing()
                self._ticked = time.monotonic()

    def _standing(self) -> float:
        """For how long it has not run since the last tick, beyond what a busy machine may do."""
        return max(0.0, time.monotonic() - self._ticked - 2 * _TICK)

    def stamp(self) -> float:
        """Wall time, for people to read; nothing is decided by it."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Sleep, unless asked to stop meanwhile."""
        self._stop.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Sleep in any case."""
        time.sleep(seconds)

    def background(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, daemon=True).start()

    def together(self, calls: Sequence[Callable[[], object]]) -> None:
        """Side by side, since each waits for a disk most of the time; what goes wrong with one is raised after all."""
        if len(calls) == 1:
            calls[0]()
            return
        with ThreadPoolExecutor(AT_ONCE) as pool:
            begun = [pool.submit(call) for call in calls]
        for each in begun:
            each.result()

    def in_short(self, calls: Sequence[Callable[[], object]]) -> None:
        """One after the other, and from when one has taken its time side by side."""
        for n, call in enumerate(calls):
            began = time.monotonic()
            call()
            if time.monotonic() - began > _SLOW and (left := calls[n + 1 :]):
                return self.together(left)

    def token(self) -> str:
        """A name that nobody else has."""
        return uuid.uuid4().hex[:12]

    def gone(self, identity: Identity) -> bool:
        """Certainly dead: a process of this same kernel and namespace that does not run any more."""
        boot, namespace, pid, began = identity
        return (boot, namespace) == self.identity[:2] and born(pid) != began


def _boot() -> str:
    """This boot of this kernel, and the namespace in which it tells when processes started."""
    try:
        times = os.stat("/proc/self/ns/time").st_ino
    except OSError:  # a kernel before 5.6
        times = 0
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}.{times}"


def born(pid: int) -> str:
    """When a process started, in ticks since boot; empty if it does not run (a zombie does not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]

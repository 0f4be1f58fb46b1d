"""Time and processes: one runs at a time, each disk call and each sleep is a point where another may go on."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from greenlet import getcurrent, greenlet

from fleet.host import Identity


@dataclass(eq=False)
class Process:
    """A worker's process on one of the hosts: its main task and its pulse."""

    host: str
    pid: int
    alive: bool = True
    stopping: bool = False
    frozen_until: float = 0.0
    ended: str = ""  # how its main task ended
    tasks: list[greenlet] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.steps = 0.0, 0
        self.processes: list[Process] = []
        self._queue: list[tuple[float, int, Process, Callable[[], object]]] = []
        self._number, self._hub = count(), getcurrent()

    def start(self, host: str, main: Callable[["SimHost"], str]) -> Process:
        process = Process(host, len(self.processes) + 1)
        self.processes.append(process)

        def run() -> None:
            process.ended = main(SimHost(self, process))
            process.alive = False

        self.task(process, run)
        return process

    def task(self, process: Process, function: Callable[[], object]) -> None:
        # a switch back to the hub ends the task; what a dead process still holds is simply never resumed
        task = greenlet(function, parent=self._hub)
        process.tasks.append(task)
        self.at(self.now, process, task.switch)

    def at(self, time: float, process: Process, act: Callable[[], object]) -> None:
        heapq.heappush(self._queue, (time, next(self._number), process, act))

    def run(self, until: float, steps: int, over: Callable[[], bool]) -> bool:
        """Let things happen until `over`; false if that takes too long."""
        while self._queue and self.now < until and self.steps < steps:
            time, number, process, act = heapq.heappop(self._queue)
            self.now, self.steps = max(self.now, time), self.steps + 1
            if not process.alive:
                continue
            if process.frozen_until > self.now:
                heapq.heappush(self._queue, (process.frozen_until, number, process, act))
                continue
            act()
            if over():
                return True
        return over()

    def pause(self, process: Process, seconds: float) -> None:
        self.at(self.now + seconds, process, getcurrent().switch)
        self._hub.switch()

    def die(self, process: Process) -> None:
        """Power off: nothing of it runs again, not even what it meant to do on its way out."""
        process.alive = False
        if getcurrent() in process.tasks:
            self._hub.switch()


class SimHost:
    """What `fleet.host.Host` is in the real world. Clocks of two hosts are ten hours apart."""

    def __init__(self, world: World, process: Process) -> None:
        self.world, self.process = world, process
        self.name = process.host
        self.identity: Identity = (process.host, 1, process.pid, str(process.pid))
        self._offset = 36_000.0 * (ord(process.host[-1]) % 7)

    @property
    def stopping(self) -> bool:
        return self.process.stopping

    def now(self) -> float:
        return self.world.now + self._offset

    def stamp(self) -> float:
        return self.now()

    def sleep(self, seconds: float) -> None:
        self.world.pause(self.process, 0.001 if self.stopping else seconds)

    def pause(self, seconds: float) -> None:
        self.world.pause(self.process, seconds)

    def background(self, function: Callable[[], None]) -> None:
        self.world.task(self.process, function)

    def together(self, calls: Sequence[Callable[[], object]]) -> None:
        for call in calls:
            call()

    in_short = together

    def token(self) -> str:
        return f"{self.world.random.getrandbits(48):012x}"

    def gone(self, identity: Identity) -> bool:
        return identity[0] == self.name and not self.world.processes[identity[2] - 1].alive

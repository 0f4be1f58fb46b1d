"""A bucket and what befalls its clients: requests that fail before or after they took effect, or take it much later,
conflicts of conditional puts, outages of minutes, credentials that run out."""

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from fleet import faults
from fleet.objects import About
from tests.storm.disk import Inode, Server, folder_of
from tests.storm.world import Process

T = TypeVar("T")


class BucketServer(Server):
    """The truth: names and what they hold, which everybody sees at once. What lies below a name makes it a folder, for
    those that look at the truth."""

    outage_until = 0.0

    def set(self, name: str, inode: Inode | None, by: str, at_once: bool = False) -> None:
        super().set(name, inode, by, at_once=True)
        parent = folder_of(name)
        if inode and parent not in self.names:
            self.set(parent, Inode(folder=True), by)
        elif parent.startswith("files/") and not any(each in self.names for each in self.inside[parent]):
            self.set(parent, None, by)

    def crash(self) -> None:
        """Nothing that was acknowledged is lost; for a while nobody answers."""
        self.outage_until = self.world.now + self.world.random.uniform(5, 240)


class SimObjects:
    """What `fleet.objects.Objects` is in the real world: the requests, from one process's point of view."""

    address = "s3://simulated/run"

    def __init__(self, server: BucketServer, process: Process) -> None:
        self.server, self.process, self.ops, self.bytes_read, self.seconds = server, process, 0, 0, 0.0

    def get(self, name: str, limit: int) -> bytes:
        return self._do(name, lambda: self._contents(name)[: limit + 1])

    def pieces(self, name: str) -> Iterator[bytes]:
        yield self._do(name, lambda: self._contents(name))

    def about(self, name: str) -> About:
        inode = self._do(name, lambda: self._there(name))
        return About(str(inode.number), len(inode.data), 0.0)

    def put(self, name: str, data: bytes, new: bool = False) -> None:
        def act() -> None:
            if new and self._exists(name):
                raise faults.Exists(name)
            self.server.set(name, Inode(data, data), self.process.host)
            if new:
                self.server.on_change("link", name)

        if new and self.server.weather.fault and self.server.world.random.random() < 0.02:
            self._do(name, lambda: None)
            raise faults.Passing(f"{name}: ConditionalRequestConflict")
        self._do(name, act, changes=True)

    def list(self, folder: str) -> builtins.list[str]:
        def act() -> builtins.list[str]:
            rest = [name.removeprefix(f"{folder}/").partition("/")[0] for name in self._below(folder)]
            return sorted({*rest})

        return self._do(folder, act)

    def below(self, folder: str) -> builtins.list[tuple[str, int, float]]:
        names = self.server.names
        return self._do(folder, lambda: [(each, len(names[each].data), 0.0) for each in sorted(self._below(folder))])

    def remove(self, *names: str) -> None:
        for name in names:
            self._do(name, lambda name=name: self._removed(name), changes=True)  # type: ignore[misc]

    def writer(self, name: str) -> "SimUpload":
        return SimUpload(self, name)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _do(self, name: str, act: Callable[[], T], changes: bool = False) -> T:
        """One request: time passes, the process may die before or after it, the reply may be lost, and what was asked
        for may be done long after everybody has given it up."""
        server, world = self.server, self.server.world
        server.calls += 1
        self.ops += 1
        number, weather = server.calls, server.weather
        server.on_call(self.process, number, "before")
        world.pause(self.process, world.random.uniform(0.005, 0.05))
        if server.refuses(self.process.host, changes):
            raise faults.Denied(f"{name}: ExpiredToken")
        roll = world.random.random() if weather.fault or weather.lost else 1.0
        if world.now < server.outage_until or roll < weather.fault:
            world.pause(self.process, world.random.uniform(0, 15))
            raise faults.Passing(f"{name}: SlowDown, not done")
        if changes and roll < weather.fault + weather.late:
            world.at(world.now + server.delay(), LATER, lambda: _quietly(act))
            raise faults.Passing(f"{name}: InternalError, to be done later")
        try:
            result = act()
        finally:
            if weather.dazed and world.random.random() < weather.dazed:
                self.process.frozen_until = world.now + world.random.uniform(1, 300)
                world.pause(self.process, 0.001)
        server.on_call(self.process, number, "after")
        if roll > 1.0 - weather.lost:
            raise faults.Passing(f"{name}: InternalError, though done")
        return result

    def _exists(self, name: str) -> bool:
        return name in self.server.names and not self.server.names[name].folder

    def _there(self, name: str) -> Inode:
        if not self._exists(name):
            raise faults.Missing(name)
        return self.server.names[name]

    def _contents(self, name: str) -> bytes:
        data = self._there(name).data
        if self.process.host == self.server.misreads and name.startswith("files/") and ".json" not in name:
            return bytes(byte ^ 1 for byte in data)
        return data

    def _below(self, folder: str) -> builtins.list[str]:
        return [name for name in self.server.names if name.startswith(f"{folder}/") and self._exists(name)]

    def _removed(self, name: str) -> None:
        if self._exists(name):
            self.server.on_change("remove", name)
            self.server.set(name, None, self.process.host)


LATER = Process("nature", 0)


class SimUpload:
    def __init__(self, objects: SimObjects, name: str) -> None:
        self.objects, self.name, self.data = objects, name, b""

    def write(self, data: bytes | memoryview) -> None:
        self.data += bytes(data)

    def flush(self) -> None:
        pass

    def sync(self) -> None:
        self.objects.put(self.name, self.data)

    def close(self) -> None:
        pass


def _quietly(act: Callable[[], Any]) -> None:
    with contextlib.suppress(faults.Fault):
        act()

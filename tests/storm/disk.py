"""A file server and what each host sees of it: late names, late listings, late contents, lost replies, crashes."""

import builtins
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from fleet import faults
from fleet.store import FileEnd
from tests.storm.world import Process, World

T = TypeVar("T")


@dataclass(eq=False)
class Inode:
    data: bytes = b""
    synced: bytes | None = None  # what survives a crash of the server
    folder: bool = False
    number: int = field(default_factory=itertools.count().__next__)
    torn: bool = False  # lost unsynced bytes in a crash: its writer learns that at the next sync
    shown_at: dict[str, float] = field(default_factory=dict)  # host -> when it sees all of the contents


@dataclass
class Version:
    """What a name meant from some moment on, and when which host gets to see that."""

    inode: Inode | None
    opened_at: dict[str, float]
    listed_at: dict[str, float]


@dataclass(frozen=True)
class Weather:
    """How bad it gets."""

    late: float = 0.0  # share of changes that a host sees late,
    latest: float = 60.0  # by up to so many seconds
    fault: float = 0.0  # share of calls that fail though nothing was done,
    lost: float = 0.0  # or though it was done
    dazed: float = 0.0  # share of calls after which the process is paused, so that what it was told is long past


class Server:
    """The truth. Names live in one dict; a folder's names are those below it."""

    def __init__(self, world: World, hosts: list[str], weather: Weather) -> None:
        self.world, self.hosts, self.weather = world, hosts, weather
        self.names: dict[str, Inode] = {"": Inode(folder=True)}
        self.durable: dict[str, Inode] = dict(self.names)
        self.inside: dict[str, dict[str, None]] = {"": {}}  # folder -> every name that was ever in it
        self.seen: dict[str, list[Version]] = {}
        self.down_until = 0.0
        self.refused: dict[str, tuple[float, bool]] = {}  # host -> until when; only changes, or everything
        self.damaged = set[str]()  # files that were, at some time; what was written again late may have mended one
        self.misreads = ""  # the host at which every payload arrives damaged
        self.calls = 0
        self.on_call: Callable[[Process, int, str], None] = lambda process, number, when: None
        self.on_change: Callable[[str, str], None] = lambda verb, name: None

    def set(self, name: str, inode: Inode | None, by: str, at_once: bool = False) -> None:
        """A change of what a name means; `by` sees it at once, the others as the weather is."""
        if inode is None:
            self.names.pop(name, None)
        else:
            self.names[name] = inode
        parent = folder_of(name)
        self.inside.setdefault(parent, {})[name] = None
        versions = self.seen.setdefault(name, [])
        seen = [dict.fromkeys(self.hosts, 0.0) if at_once else self._moments(by) for _ in range(2)]
        versions.append(Version(inode, *seen))
        if len(versions) > 8:  # keep the newest, and those that some host may still be looking at
            old = self.world.now - self.weather.latest
            del versions[: max(i for i, v in enumerate(versions) if i == 0 or max(v.opened_at.values()) < old)]

    def _moments(self, by: str) -> dict[str, float]:
        return {host: self.world.now + (0.0 if host == by else self.delay()) for host in self.hosts}

    def refuses(self, host: str, changes: bool) -> bool:
        """It is mounted read-only there, or a ticket has run out, for a while."""
        until, everything = self.refused.get(host, (0.0, False))
        return self.world.now < until and (changes or everything)

    def delay(self) -> float:
        roll = self.world.random.random
        return roll() ** 2 * self.weather.latest if self.weather.late and roll() < self.weather.late else 0.0

    def crash(self) -> None:
        """Every change that was not synced is kept or lost by chance; so is the end of every unsynced file. The hosts
        connect anew and drop what they had cached of it."""
        roll = self.world.random
        for name in sorted({*self.names, *self.durable}):
            now, safe = self.names.get(name), self.durable.get(name)
            if now is not safe and roll.random() < 0.5:
                self.set(name, safe, "", at_once=True)
        for name in sorted(self.names):
            if name and not self._reachable(name):
                self.set(name, None, "", at_once=True)
        for inode in {id(i): i for i in self.names.values()}.values():
            if not inode.folder and inode.synced != inode.data:
                left = inode.data[: roll.randint(0, len(inode.data))]
                inode.data, inode.torn = left if inode.synced is None else inode.synced, True
        self.durable = dict(self.names)
        self.down_until = self.world.now + roll.uniform(0, 20)

    def _reachable(self, name: str) -> bool:
        while name:
            name = folder_of(name)
            if name not in self.names:
                return False
        return True


class SimDisk:
    """What `fleet.disk.Disk` is in the real world: the verbs, from one process's point of view."""

    root = Path("/simulated")

    def __init__(self, server: Server, process: Process) -> None:
        self.server, self.process, self.ops, self.bytes_read, self.seconds = server, process, 0, 0, 0.0

    def reopen(self) -> "SimDisk":
        return self

    def read(self, name: str, limit: int) -> bytes:
        return self._do(name, lambda: self._contents(name)[: limit + 1])

    def blocks(self, name: str) -> Iterator[bytes]:
        yield self._do(name, lambda: self._contents(name))

    def stamp(self, name: str) -> tuple[int, ...]:
        return self._do(name, lambda: (self._look(name).number,))

    def forget(self, name: str) -> None:
        self._do(name, lambda: self._look(name))

    def tail(self, name: str, after: int, most: int) -> FileEnd:
        data = self._do(name, lambda: self._contents(name))
        begin = max(after if after <= len(data) else 0, len(data) - most)
        return FileEnd(data[begin:], begin, len(data), self.server.world.now)

    def list(self, folder: str) -> builtins.list[str]:
        return self._do(folder, lambda: self._listing(folder))

    def create(self, name: str) -> "SimWriter":
        return self._do(name, lambda: SimWriter(self, name, self._new(name, Inode())), changes=True)

    def write(self, name: str, data: bytes, sync: bool) -> None:
        file = self.create(name)
        file.write(data)
        if sync:
            file.sync()

    def append(self, name: str) -> "SimWriter":
        def act() -> SimWriter:
            return SimWriter(self, name, self.server.names.get(name) or self._new(name, Inode()))

        return self._do(name, act, changes=True)

    def link(self, old: str, new: str) -> None:
        def act() -> None:
            self._new(new, self._truth(old))
            self.server.on_change("link", new)

        self._do(new, act, changes=True)

    def rename(self, old: str, new: str) -> None:
        def act() -> None:
            self.server.set(new, self._truth(old), self.process.host)
            self.server.set(old, None, self.process.host)

        self._do(new, act, changes=True)

    def remove(self, name: str) -> None:
        def act() -> None:
            self._truth(name)
            self.server.on_change("remove", name)
            self.server.set(name, None, self.process.host)

        self._do(name, act, changes=True)

    def mkdir(self, folder: str) -> None:
        self._do(folder, lambda: self._new(folder, Inode(folder=True)), changes=True)

    def rmdir(self, folder: str) -> None:
        def act() -> None:
            self._truth(folder)
            if any(name in self.server.names for name in self.server.inside.get(folder, ())):
                raise faults.Unfit(f"{folder}: not empty")
            self.server.set(folder, None, self.process.host)

        self._do(folder, act, changes=True)

    def sync(self, folder: str) -> None:
        def act() -> None:
            self._look(folder)
            for name in self.server.inside.get(folder, ()):
                if name in self.server.names:
                    self.server.durable[name] = self.server.names[name]
                else:
                    self.server.durable.pop(name, None)

        self._do(folder, act)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _do(self, name: str, act: Callable[[], T], changes: bool = False) -> T:
        """One call: time passes, the process may die before or after it, the reply may be lost."""
        server, world = self.server, self.server.world
        server.calls += 1
        self.ops += 1
        number = server.calls
        server.on_call(self.process, number, "before")
        world.pause(self.process, world.random.uniform(0.0002, 0.002) + max(0.0, server.down_until - world.now))
        if server.refuses(self.process.host, changes):
            raise faults.Denied(f"{name}: EROFS")
        roll = world.random.random() if server.weather.fault or server.weather.lost else 1.0
        if roll < server.weather.fault:
            raise faults.Passing(f"{name}: EIO, not done")
        try:
            result = act()
        finally:
            if server.weather.dazed and world.random.random() < server.weather.dazed:
                self.process.frozen_until = world.now + world.random.uniform(1, 300)
                world.pause(self.process, 0.001)
        server.on_call(self.process, number, "after")
        if roll < server.weather.fault + server.weather.lost:
            raise faults.Passing(f"{name}: EIO, though done")
        return result

    def _new(self, name: str, inode: Inode) -> Inode:
        self._look(folder_of(name))
        if folder_of(name) not in self.server.names:
            raise faults.Missing(name)
        if name in self.server.names:
            raise faults.Exists(name)
        self.server.set(name, inode, self.process.host)
        return inode

    def _truth(self, name: str) -> Inode:
        if name not in self.server.names:
            raise faults.Missing(name)
        return self.server.names[name]

    def _look(self, name: str) -> Inode:
        """What this host takes the name for: the newest version that has reached it."""
        for version in reversed(self.server.seen.get(name, ())):
            if version.opened_at[self.process.host] <= self.server.world.now:
                if version.inode is None:
                    break
                return version.inode
        if name == "":
            return self.server.names[""]
        raise faults.Missing(name)

    def _contents(self, name: str) -> bytes:
        inode = self._look(name)
        late = inode.shown_at.get(self.process.host, 0.0) > self.server.world.now
        data = inode.data[: len(inode.data) // 2] if late else inode.data
        if self.process.host == self.server.misreads and name.startswith("files/") and ".json" not in name:
            return bytes(byte ^ 1 for byte in data)
        return data

    def _listing(self, folder: str) -> builtins.list[str]:
        self._look(folder)
        host, now, found = self.process.host, self.server.world.now, []
        for name in self.server.inside.get(folder, ()):
            for version in reversed(self.server.seen[name]):
                if version.listed_at[host] <= now:
                    if version.inode is not None:
                        found.append(name.rpartition("/")[2])
                    break
        return sorted(found)


class SimWriter:
    def __init__(self, disk: SimDisk, name: str, inode: Inode) -> None:
        self.disk, self.name, self.inode = disk, name, inode

    def write(self, data: bytes | memoryview) -> None:
        def act() -> None:
            self.inode.data += bytes(data)
            if self.name.startswith("files/"):  # a payload may show up in part, long after the register that names it
                server = self.disk.server
                late = {h: server.world.now + server.delay() for h in server.hosts if h != self.disk.process.host}
                self.inode.shown_at = late

        self.disk._do(self.name, act, changes=True)

    def sync(self) -> None:
        def act() -> None:
            if self.inode.torn:
                raise faults.Passing(f"{self.name}: EIO, some of it is lost")
            self.inode.synced = self.inode.data

        self.disk._do(self.name, act, changes=True)

    def close(self) -> None:
        pass


def folder_of(name: str) -> str:
    return name.rpartition("/")[0]

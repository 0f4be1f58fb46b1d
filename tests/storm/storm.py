"""One simulated run: workers, misfortunes, and what must hold whatever happens."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fleet import faults
from fleet.desk import Options, Stopped
from fleet.digest import digest
from fleet.history import History
from fleet.store import FOLDERS, Store
from fleet.worker import Worker
from tests.storm.disk import Inode, Server, SimDisk, Weather, folder_of
from tests.storm.world import Process, SimHost, World
from tests.toy.config import ToyConfig
from tests.toy.maker import make
from tests.toy.strategies import strategy

OPTIONS = Options(dead_seconds=20.0, poll_seconds=0.3, snapshot_seconds=1.0)
SIZE, SLEEP = 6, 1.0
LIMIT = 4 * 3600.0  # simulated seconds within which a run must end while one worker lives
STEPS = 600_000
LASTS = 1200.0  # then the storm is over; what it left behind must be mended


@dataclass(frozen=True)
class Bad:
    """How much of what happens to a run; one number of expected events an hour each."""

    weather: Weather = Weather()
    kills: float = 0.0
    stops: float = 0.0  # SIGTERM
    pauses: float = 0.0  # longer than every time-out
    flips: float = 0.0  # of a bit in a payload
    crashes: float = 0.0  # of the server


CALM = Bad()
STORM = Bad(Weather(late=0.15, fault=0.003, lost=0.003), kills=300, stops=60, pauses=60, flips=60, crashes=40)
FLAKY = Bad(Weather(late=0.1, latest=5.0, fault=0.05, lost=0.05), kills=60, flips=30)  # a disk that hardly answers


class Violation(AssertionError):
    """A promise of the protocol was broken."""


class Watched(Store):
    """The real store, each of whose answers that somebody acts on is noted."""

    acted: dict[str, str]

    def settle(self, name: str, value: dict[str, Any], durable: bool = True) -> dict[str, Any]:
        stands = super().settle(name, value, durable)
        return self._note(name, stands) if durable else stands

    def confirmed(self, name: str) -> dict[str, Any]:
        return self._note(name, super().confirmed(name))

    def standing(self, name: str) -> dict[str, Any]:
        return self._note(name, super().standing(name))

    def _note(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(value, sort_keys=True)
        if name.startswith("rounds/") and self.acted.setdefault(name, text) != text:
            raise Violation(f"{name} was acted on as {self.acted[name]} and now is {text}")
        return value


class Storm:
    def __init__(
        self,
        seed: int,
        config: ToyConfig,
        bad: Bad,
        workers: int = 3,
        kind: type[Watched] = Watched,
        naive: bool = False,
    ) -> None:
        self.world, self.config, self.bad, self.kind = World(seed), config, bad, kind
        self.hosts = ["host-a", "host-b", "host-c"][:workers]
        self.server = Server(self.world, self.hosts, Weather())
        self.acted: dict[str, str] = {}
        self.problem: BaseException | None = None
        self.finished = False
        self.launch = 1
        for name in FOLDERS:
            self.server.set(name, Inode(folder=True), "")
        self.server.durable = dict(self.server.names)
        self.server.weather = bad.weather
        self._nature = Process("nature", 0)
        for host in self.hosts:
            self._start(host)
        for rate, event in (
            (bad.kills, self._kill), (bad.stops, self._stop), (bad.pauses, self._pause),
            (bad.flips, self._flip), (bad.crashes, self.server.crash),
        ):  # fmt: skip
            if rate:
                self._again(rate, event)

    def run(self) -> str:
        """The digest of the finished run; every broken promise raises."""
        self._until_over()
        truth = History(Truth(self.server))
        truth.look()
        if not truth.over:  # whoever voided a member at the very end died before making it again: start the run again
            self.finished = False
            self._start(self.hosts[0])
            self._until_over()
        return self.check()

    def _until_over(self) -> None:
        over = self.world.run(LIMIT, STEPS, lambda: self.problem is not None or self._settled())
        if self.problem:
            raise self.problem
        if not over:
            raise Violation(f"not over after {self.world.now:.0f} s, {self.world.steps} steps")

    def check(self) -> str:
        """Look at the truth on the server with nothing in the way."""
        truth = History(Truth(self.server))
        truth.look()
        if not truth.over:
            raise Violation("the workers said it is over, the disk says it is not")
        for name, text in self.acted.items():
            if name not in self.server.names or json.dumps(truth.store.read(name), sort_keys=True) != text:
                raise Violation(f"{name} was acted on and is lost or changed")
        for member in truth.round(truth.first - 1) + truth.round(0):
            outcome = truth.outcome(member.origin)
            for file, (size, sha) in outcome.files.items():
                inode = self.server.names.get(f"files/{outcome.attempt}/{file}")
                if inode is None:
                    raise Violation(f"{member.id}: its file {file} is lost")
                whole = (len(inode.data), hashlib.sha256(inode.data).hexdigest()) == (size, sha)
                if not whole and member.origin.startswith(f"{truth.first - 1}/"):  # the flips spare the last round
                    raise Violation(f"{member.id}: its file {file} is damaged")
        return digest(truth)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _start(self, host: str) -> None:
        self.world.start(host, self._worker)

    def _worker(self, host: SimHost) -> str:
        store = self.kind(SimDisk(self.server, host.process), host, f"{host.name}-{host.process.pid}")  # type: ignore[arg-type]
        store.acted = self.acted
        quorum = {"quorum": self.config.quorum, "grace_seconds": self.config.grace_seconds}
        options = replace(OPTIONS, launch=self.launch, **quorum)
        worker = Worker(store, strategy(self.config), lambda work: make(work, SIZE, SLEEP), options)
        try:
            how = worker.run()
        except faults.Fault as fault:
            how = f"fault: {fault}"
        except Stopped as why:
            how = self._stopped(str(why), options.launch)
        except BaseException as error:
            self.problem = error
            return "broken"
        self.finished = self.finished or how == "over"
        if how != "over":
            self.world.at(self.world.now + 1.0, self._nature, lambda: self._start(host.name))
        return how

    def _stopped(self, why: str, launch: int) -> str:
        """Many workers in a row lost at one recipe stop the run, as they should: then a person starts it again."""
        if "in a row were lost" not in why or self.world.now > LASTS + 600:
            self.problem = Violation(f"stopped: {why}")
        self.launch = max(self.launch, launch + 1)
        return "stopped"

    def _settled(self) -> bool:
        """Over for everybody: who still repairs something when the first one is done gets to end it."""
        return self.finished and not any(process.alive for process in self.world.processes)

    # -- misfortunes ------------------------------------------------------------------------------------------------

    def _again(self, rate: float, event: Callable[[], None]) -> None:
        def happen() -> None:
            if self.world.now < LASTS and not self.finished:
                event()
                self._again(rate, event)

        self.world.at(self.world.now + self.world.random.expovariate(rate / 3600), self._nature, happen)

    def _victim(self) -> Process | None:
        living = [p for p in self.world.processes if p.alive]
        return self.world.random.choice(living) if living else None

    def _kill(self) -> None:
        if process := self._victim():
            self.kill(process)

    def kill(self, process: Process) -> None:
        pause = self.world.random.uniform(0, 40)
        self.world.at(self.world.now + pause, self._nature, lambda: self._start(process.host))
        self.world.die(process)

    def _stop(self) -> None:
        if process := self._victim():
            process.stopping = True

    def _pause(self) -> None:
        if process := self._victim():
            process.frozen_until = self.world.now + self.world.random.uniform(1, 300)

    def _flip(self) -> None:
        """A bit of a payload goes over, but for the last round's, which nobody may read any more."""
        last = f"files/{self.config.max_generations + (self.config.algorithm == 'search'):05d}."
        payloads = [
            name for name, inode in self.server.names.items()
            if name.startswith("files/") and not inode.folder and not name.startswith(last) and inode.data
        ]  # fmt: skip
        if payloads:
            inode = self.server.names[self.world.random.choice(sorted(payloads))]
            place = self.world.random.randrange(len(inode.data))
            inode.data = inode.data[:place] + bytes([inode.data[place] ^ 16]) + inode.data[place + 1 :]
            inode.synced = inode.data


class Truth(Store):
    """A store that reads the server itself."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def read(self, name: str) -> dict[str, Any]:
        from fleet.store import _opened

        if name not in self.server.names:
            raise faults.Missing(name)
        return _opened(self.server.names[name].data, name)

    def confirmed(self, name: str) -> dict[str, Any]:
        return self.read(name)

    def names(self, folder: str) -> list[str]:
        inside = self.server.inside.get(folder, ())
        return sorted(name.rpartition("/")[2] for name in inside if name in self.server.names)

    def sync(self, folder: str) -> None:
        pass


__all__ = ["CALM", "STORM", "Bad", "Storm", "Violation", "Watched", "folder_of"]

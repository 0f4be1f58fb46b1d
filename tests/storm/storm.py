"""One simulated run: workers, misfortunes, and what must hold whatever happens."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from fleet import faults
from fleet.bucket import Bucket
from fleet.context import Spent, Stopped, WorkerOptions
from fleet.digest import digest
from fleet.disk_store import DiskStore
from fleet.history import History
from fleet.host import Host
from fleet.planning import ATTEMPT
from fleet.recipe import NotYet, folder, from_json
from fleet.round_state import SlotState, parse
from fleet.store import FOLDERS, Store, _opened
from fleet.work import Failed, NotOnThisMachine, Work
from fleet.worker import Worker
from tests.storm.bucket import BucketServer, SimObjects
from tests.storm.disk import Inode, Server, SimDisk, Weather, folder_of
from tests.storm.world import Process, SimHost, World
from tests.toy.config import BESIDE, ToyConfig
from tests.toy.maker import make
from tests.toy.strategies import strategy

OPTIONS = WorkerOptions(dead_seconds=20.0, poll_seconds=0.3, snapshot_seconds=1.0)
SIZE = 6
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
    refusals: float = 0.0  # read-only minutes
    broken: str = ""  # what becomes of all that one of the hosts makes: a key of BROKEN
    apart: bool = False  # each host's worker is of a launch of its own
    everywhere: bool = False  # or all hosts, within the first launch
    within: float = 4 * 3600.0  # simulated seconds within which the run must end while one worker lives
    rivals: bool = False  # what two make at the same time is damaged as soon as one of them has published it
    sleep: float = 1.0  # seconds that a recipe takes


CALM = Bad()
STORM = Bad(
    Weather(late=0.15, fault=0.003, lost=0.003, dazed=0.0003),
    kills=300,
    stops=60,
    pauses=60,
    flips=60,
    crashes=40,
    refusals=30,
)
FLAKY = Bad(Weather(late=0.1, latest=5.0, fault=0.05, lost=0.05), kills=60, flips=30)  # a disk that hardly answers


BUCKET = replace(STORM, weather=Weather(late=0.004, fault=0.004, lost=0.004, dazed=0.0003))  # late: done much later

RIVALS = Bad(Weather(late=0.3), pauses=200, rivals=True, sleep=40.0)  # long recipes, made by two and void soon


BROKEN: dict[str, Callable[[], Exception]] = {
    "raises": lambda: RuntimeError("the card is on fire"),
    "device": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    "verdict": lambda: Failed("the loss is not finite"),
    "misreads": lambda: AssertionError("its disk is what is broken"),
    "lacks": lambda: NotOnThisMachine("out of memory: 80 GB are needed, 8 GB are there"),
}
ONLY = "host-c"  # the one that is broken
IN_VAIN = 400  # failures of broken hosts in a run, at most; who is killed forgets that it was benched
SLEEPY = Bad(Weather(late=0.5, dazed=0.008))
# where makers fail, somebody who could make it is never away for longer than its word would be waited for
FAULTY = replace(STORM, weather=replace(STORM.weather, dazed=0.0), pauses=0.0)


class Violation(AssertionError):
    """A promise of the protocol was broken."""


class Watching(Store):
    """A real store, each of whose answers that somebody acts on is noted."""

    acted: dict[str, str]
    truth: Server

    def settle(self, name: str, value: dict[str, Any], durable: bool = True) -> dict[str, Any]:
        if name.endswith(".void") and self._whole(name.removesuffix("void") + "done"):
            raise Violation(f"{name}: its files are whole")
        stands = super().settle(name, value, durable)
        return self._note(name, stands) if durable else stands

    def confirmed(self, name: str) -> dict[str, Any]:
        return self._note(name, super().confirmed(name))

    def standing(self, name: str) -> dict[str, Any]:
        return self._note(name, super().standing(name))

    def _whole(self, done: str) -> bool:
        """The files that an outcome names have always lain on the server as they were written."""
        names = self.truth.names
        outcome = _opened(names[done].data, done) if done in names else {"files": {}}
        places = {file: f"files/{outcome['attempt']}/{file}" for file in outcome["files"]}
        found = {file: names.get(place) for file, place in places.items()}
        return (
            bool(found)
            and not self.truth.damaged & {*places.values()}
            and all(
                inode is not None and [len(inode.data), xxh3_128(inode.data).hexdigest()] == outcome["files"][file]
                for file, inode in found.items()
            )
        )

    def _note(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(value, sort_keys=True)
        if name.startswith("rounds/") and self.acted.setdefault(name, text) != text:
            raise Violation(f"{name} was acted on as {self.acted[name]} and now is {text}")
        return value


class Watched(Watching, DiskStore):
    """On a disk."""

    def __init__(self, disk: Any, host: Any, name: str) -> None:
        super().__init__(disk, host, name)
        self.truth = disk.server

    @classmethod
    def of(cls, server: Server, host: SimHost, name: str) -> "Watched":
        return cls(SimDisk(server, host.process), host, name)


class WatchedBucket(Watching, Bucket):
    """In a bucket."""

    @classmethod
    def of(cls, server: Server, host: SimHost, name: str) -> "WatchedBucket":
        assert isinstance(server, BucketServer)
        store = cls(SimObjects(server, host.process), Path("s3:/simulated/run"), host, name)  # type: ignore[arg-type]
        store.truth = server
        return store


Kind = type[Watched] | type[WatchedBucket]


class Storm:
    def __init__(self, seed: int, config: ToyConfig, bad: Bad, workers: int = 3, kind: Kind = Watched) -> None:
        self.lanes = config.disk_lane or seed % 2 == 1  # whether workers have a second one
        self.world, self.config, self.bad, self.kind = World(seed), config, bad, kind
        self.hosts = ["host-a", "host-b", "host-c"][:workers]
        server = BucketServer if issubclass(kind, WatchedBucket) else Server
        self.server = server(self.world, self.hosts, Weather())
        self._truth = Truth(self.server)
        self.acted: dict[str, str] = {}
        self.problem: BaseException | None = None
        self.finished = False
        self.launch, self.in_vain = 1, 0
        for name in FOLDERS:
            self.server.set(name, Inode(folder=True), "")
        self.server.durable = dict(self.server.names)
        self.server.weather = bad.weather
        self.server.misreads = ONLY if bad.broken == "misreads" else ""
        self.server.weather, self.server.on_change = bad.weather, self._changes
        self._nature = Process("nature", 0)
        for host in self.hosts:
            self._start(host)
        for rate, event in (
            (bad.kills, self._kill), (bad.stops, self._stop), (bad.pauses, self._pause),
            (bad.flips, self._flip), (bad.crashes, self.server.crash),
            (bad.refusals, self._refuse),
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
        over = self.world.run(self.bad.within, STEPS, lambda: self.problem is not None or self._settled())
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
        for member in truth.round(truth.first_open - 1) + truth.round(0):
            outcome = truth.outcome(member.origin)
            for file, known in outcome.files.items():
                inode = self.server.names.get(f"files/{outcome.attempt}/{file}")
                if inode is None:
                    raise Violation(f"{member.id}: its file {file} is lost")
                whole = (len(inode.data), xxh3_128(inode.data).hexdigest()) == known
                if not whole and member.origin.startswith(f"{truth.first_open - 1}/"):  # the flips spare the last round
                    raise Violation(f"{member.id}: its file {file} is damaged")
        return digest(truth)

    def _changes(self, verb: str, name: str) -> None:
        if verb == "remove" and name.startswith("files/"):
            self._removes(name)
        elif verb == "link" and name.endswith(".done"):
            self._tells(name)
            if self.bad.rivals and name.endswith(".0.done"):
                self._spoil(name)

    def _tells(self, done: str) -> None:
        """The version that counts stands in the attempt's name: who knows only an earlier one may remove it."""
        attempt, version = str(self._truth.read(done)["attempt"]), done.split(".")[1]
        if (found := ATTEMPT.fullmatch(attempt)) and found[3] != version:
            self.problem = self.problem or Violation(f"{done} names {attempt}, which others may take for useless")

    def _removes(self, path: str) -> None:
        """Files that the register which counts names go only with a round so old that nothing can need them."""
        if not (found := ATTEMPT.fullmatch(attempt := path.split("/")[1])):
            return
        round, slot, state = int(found[1]), found[2], SlotState()
        for register in filter(None, map(parse, self._truth.names(folder(round)))):
            if register.slot == slot:
                state.take(register)
        if not state.finished or 1 <= round and all(map(self._was_complete, range(round, round + 3))):
            return
        record = self._truth.read(f"{folder(round)}/{slot}.{state.version}.done")
        _, _, *file = path.split("/")
        if record["attempt"] == attempt and record["files"].keys() >= {*file}:  # not a snapshot, which may go late
            self.problem = self.problem or Violation(f"{path} is removed, and the register that counts names it")

    def _was_complete(self, round: int) -> bool:
        """Each of its slots had an outcome at some time."""
        names = self._truth.names(folder(round))
        made = [each for each in self._truth.read(f"{folder(round)}/plan")["recipes"]] if "plan" in names else []
        done = {register.slot for register in filter(None, map(parse, names)) if register.kind == "done"}
        return bool(made) and all(from_json(each).carried or each["slot"] in done for each in made)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _start(self, host: str) -> None:
        self.world.start(host, self._worker)

    def _worker(self, host: SimHost) -> str:
        store = self._store(host)
        quorum = {"quorum": self.config.quorum, "grace_seconds": self.config.grace_seconds}
        launch = self.launch + self.bad.apart * self.hosts.index(host.name)
        options = replace(OPTIONS, launch=launch, seats=len(self.hosts), off_device=BESIDE, **quorum)
        make = partial(self._make, host)
        second = (self._store(host), make) if self.lanes else None
        worker = Worker(store, strategy(self.config), make, options, _scribe, second)
        try:
            how = worker.run()
        except faults.Denied as fault:  # it could write when it began: an outage is waited for
            self.problem = Violation(f"a worker ended for good: {fault}")
            return "broken"
        except faults.Fault as fault:
            how = f"fault: {fault}"
        except Spent:
            how = "spent"
        except Stopped as why:
            how = self._stopped(str(why), options.launch)
        except BaseException as error:
            self.problem = error
            return "broken"
        self.finished = self.finished or how == "over"
        if how != "over":
            self.world.at(self.world.now + 1.0, self._nature, lambda: self._start(host.name))
        return how

    def _store(self, host: SimHost) -> Watching:
        store = self.kind.of(self.server, host, f"{host.name}-{host.process.pid}")
        store.acted = self.acted
        return store

    def _make(self, host: SimHost, work: Work) -> Mapping[str, Any]:
        """What a broken machine does after a while at anything that it is given."""
        if self.bad.broken not in ("", "misreads") and (host.name == ONLY or self.bad.everywhere and self.launch == 1):
            host.sleep(self.bad.sleep / 4)
            self.in_vain += self.bad.broken != "lacks"  # who is killed forgets what was lacking
            if self.in_vain > IN_VAIN:
                self.problem = Violation(f"{host.name} fails at everything and is given more and more")
            raise BROKEN[self.bad.broken]()
        return make(work, SIZE, self.bad.sleep)

    def _stopped(self, why: str, launch: int) -> str:
        """Many workers in a row lost at one recipe stop the run, as they should: then a person starts it again."""
        expected = "in a row were lost" in why or self.bad.everywhere and "no living worker can make" in why
        late = self.finished  # the run is over; a broken machine that sees that late has only itself to ask
        if not late and (not expected or self.world.now > LASTS + 600):
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

    def _refuse(self) -> None:
        """The disk takes no changes, or does nothing at all, for up to some minutes; at one host or at all of them."""
        roll = self.world.random
        until, everything = self.world.now + roll.uniform(5, 240), roll.random() < 0.5
        for host in roll.choice([self.hosts, [roll.choice(self.hosts)]]):
            self.server.refused[host] = until, everything

    def _spoil(self, done: str) -> None:
        """A member's files are damaged as soon as it is published, if somebody else is making the same."""
        round, slot = done.split("/")[1], done.split("/")[2].split(".")[0]
        attempt = str(self._truth.read(done)["attempt"])
        others = {name for name in self._truth.names("files") if name.startswith(f"{round}.{slot}.")} - {attempt}
        files = self._truth.names(f"files/{attempt}") if attempt and others and round != self._last() else []
        if files:
            self._damage(f"files/{attempt}/{files[0]}")

    def _last(self) -> str:
        """The round whose files nobody may read any more."""
        return f"{self.config.max_generations + (self.config.algorithm == 'search'):05d}"

    def _damage(self, name: str) -> None:
        inode = self.server.names[name]
        self.server.damaged.add(name)
        place = self.world.random.randrange(len(inode.data))
        inode.data = inode.data[:place] + bytes([inode.data[place] ^ 16]) + inode.data[place + 1 :]
        inode.synced = inode.data

    def _flip(self) -> None:
        """A bit of a payload goes over, but for the last round's, which nobody may read any more."""
        payloads = [
            name for name, inode in self.server.names.items()
            if name.startswith("files/") and not inode.folder and not name.startswith(f"files/{self._last()}.")
            and inode.data
        ]  # fmt: skip
        if payloads:
            self._damage(self.world.random.choice(sorted(payloads)))


def _scribe(history: History) -> None:
    """What loggers do beside workers."""
    with contextlib.suppress(NotYet):
        for round in range(history.first_open):
            history.sum_up(round)


class Truth(DiskStore):
    """A store that reads the server itself."""

    def __init__(self, server: Server) -> None:
        self.server, self.host = server, Host()

    def read(self, name: str) -> dict[str, Any]:
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


__all__ = ["CALM", "STORM", "Bad", "Storm", "Violation", "Watched", "WatchedBucket", "folder_of"]

"""What is to be shown: storms by the seed, every single crash point, and that each rule of the protocol is needed."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fleet import blame, faults, payload, summary
from fleet.claims import Claims
from fleet.execution import Execution
from fleet.peers import Peers
from fleet.repair import Repair
from fleet.store import Store, Value, _sealed, proven
from fleet.work import Work
from fleet.worker import Worker
from tests.storm.disk import SimDisk, Weather
from tests.storm.storm import (
    BROKEN,
    BUCKET,
    CALM,
    FAULTY,
    FLAKY,
    RIVALS,
    SLEEPY,
    STORM,
    Bad,
    Kind,
    Storm,
    Violation,
    Watched,
    WatchedBucket,
)
from tests.storm.world import Process
from tests.toy.config import ToyConfig

CONFIGS = {
    "diloco": ToyConfig(algorithm="diloco", population_size=3, shards=2, max_generations=3, inner_steps=3),
    "matching": ToyConfig(algorithm="matching", population_size=4, max_generations=4, inner_steps=3),
    "rank": ToyConfig(algorithm="rank", population_size=4, max_generations=4, elitism=1, inner_steps=3),
    "search": ToyConfig(algorithm="search", population_size=4, max_generations=3, inner_steps=3),
    "tournament": ToyConfig(algorithm="tournament", population_size=4, max_generations=4, inner_steps=3),
    "long": ToyConfig(algorithm="rank", population_size=3, max_generations=16, elitism=1, inner_steps=1),
}
ELASTIC = CONFIGS["matching"].model_copy(update={"quorum": 0.5, "grace_seconds": 5.0})
TINY = {
    "diloco": CONFIGS["diloco"].model_copy(update={"population_size": 2, "max_generations": 1, "inner_steps": 2}),
    "matching": CONFIGS["matching"].model_copy(update={"population_size": 2, "max_generations": 2, "inner_steps": 2}),
    "rank": CONFIGS["rank"].model_copy(update={"population_size": 2, "max_generations": 2, "inner_steps": 2}),
    "search": CONFIGS["search"].model_copy(update={"population_size": 2, "max_generations": 1}),
}
TINY["diloco, two lanes"] = TINY["diloco"].model_copy(update={"disk_lane": True})


@lru_cache(None)
def undisturbed(config: ToyConfig, workers: int = 3) -> str:
    return Storm(0, config, CALM, workers).run()


def weather(seed: int, config: ToyConfig, wanted: str, kind: Kind = Watched, bad: Bad = STORM) -> Storm:
    """One storm; raises unless it ends with what the undisturbed run ended with."""
    storm = Storm(seed, config, bad, kind=kind)
    if (got := storm.run()) != wanted:
        raise Violation(f"other bytes: {got[:12]} instead of {wanted[:12]}")
    return storm


def elastic(seed: int, kind: Kind, bad: Bad) -> None:
    """Who is closed depends on chance there, so only the other promises can be held."""
    Storm(seed, ELASTIC, bad, kind=kind).run()


def storm(seed: int) -> None:
    """One seed, one storm over one of the methods' shapes; every sixth is elastic."""
    shapes = [config for name, config in CONFIGS.items() if name != "long"]
    kind = WatchedBucket if over_a_bucket(seed) else Watched
    if seed % (len(shapes) + 1) == len(shapes):
        return elastic(seed, kind, BUCKET if kind is WatchedBucket else STORM)
    config = shapes[seed % (len(shapes) + 1)]
    if config is CONFIGS["rank"] and seed // (len(shapes) + 1) % 2:
        config = CONFIGS["long"]
    bad = in_a_bucket(bad_of(seed)) if kind is WatchedBucket else bad_of(seed)
    weather(seed, config, undisturbed(config), kind, bad)


def over_a_bucket(seed: int) -> bool:
    """Every fourth, of each shape and of each kind of misfortune."""
    return (seed // 12 + seed % 6) % 4 == 3


def bad_of(seed: int) -> Bad:
    """Of seven storms two have a machine at which everything fails, and now and then nobody has what is needed."""
    kinds = [*BROKEN]
    match seed % 7:
        case 3:
            return FLAKY
        case 4:
            return RIVALS if seed % 2 else APART
        case 5:
            return replace(FAULTY, broken=kinds[seed // 7 % len(kinds)])
        case 6:
            return replace(FAULTY if seed % 2 else CALM, broken="lacks", everywhere=True)
    return STORM


def in_a_bucket(bad: Bad) -> Bad:
    """The same, where everybody sees at once what is done, and what failed may be done much later."""
    late = min(bad.weather.late, BUCKET.weather.late)
    return replace(bad, weather=replace(bad.weather, late=late))


# -- every crash point -------------------------------------------------------------------------------------------------


def crash_points(config: ToyConfig, workers: int = 2, kind: Kind = Watched) -> list[int]:
    """The numbers of all calls of an undisturbed run."""
    calm = Storm(0, config, CALM, workers, kind)
    calm.run()
    return list(range(1, calm.server.calls + 1))


def crash_everywhere(config: ToyConfig, number: int, workers: int = 2, kind: Kind = Watched) -> None:
    """A worker dies before, or after, one call of the run; or the server crashes there."""
    wanted = undisturbed(config, workers)
    for what in ("worker before", "worker after", "server"):
        crash_at(config, workers, number, what, wanted, kind)


def crash_at(config: ToyConfig, workers: int, number: int, what: str, wanted: str, kind: Kind = Watched) -> None:
    storm = Storm(0, config, CALM, workers, kind)

    def on_call(process: Process, call: int, when: str) -> None:
        if call == number:
            if what == f"worker {when}":
                storm.kill(process)
            elif what == "server" and when == "after":
                storm.server.crash()

    storm.server.on_call = on_call
    try:
        if (got := storm.run()) != wanted:
            raise Violation(f"other bytes: {got[:12]} instead of {wanted[:12]}")
    except Violation as broken:
        raise Violation(f"call {number}, {what}: {broken}") from broken


# -- broken on purpose -------------------------------------------------------------------------------------------------


class Renames(Watched):
    """rename() instead of link(): the last to publish wins, after others acted on the first."""

    def _offer(self, draft: str, name: str) -> bool:
        self.disk.write(f"{draft}.copy", self.disk.read(draft, 1 << 20), sync=True)
        with contextlib.suppress(faults.Missing):
            self.disk.rename(f"{draft}.copy", name)
            return True
        return super()._offer(draft, name)


class Trusts(Watched):
    """No re-read: the reply of link() is taken for the outcome; after a lost one the winner thinks that it lost."""

    def settle(self, name: str, value: Value, durable: bool = True) -> Value:
        if not name.endswith(".done"):
            return super().settle(name, value, durable)
        with self._draft(_sealed(value), durable) as draft:
            try:
                self.disk.link(draft, name)
            except faults.Exists:
                return {**value, "by": "somebody else"}
            self.disk.sync(name.rpartition("/")[0])
        return self._note(name, value)


class Forgets(Watched):
    """No fsync: what was acted on is lost in a crash of the server."""

    def __init__(self, disk: Any, host: Any, name: str) -> None:
        super().__init__(Unsynced(disk.server, disk.process), host, name)


class Unsynced(SimDisk):
    def sync(self, folder: str) -> None:
        pass


class Overwrites(WatchedBucket):
    """A put without its condition: the last to publish wins, after others acted on the first."""

    def _offer(self, name: str, data: bytes) -> bool:
        with contextlib.suppress(faults.Passing):
            self.objects.put(name, data)
            return True
        return False


class Presumes(WatchedBucket):
    """No read-back: who finds the name taken thinks that it lost, though a lost reply may have been its own."""

    def settle(self, name: str, value: Value, durable: bool = True) -> Value:
        if not name.endswith(".done"):
            return super().settle(name, value, durable)
        while True:
            try:
                self.objects.put(name, proven(value, name)[0], new=True)
                return self._note(name, value)
            except faults.Exists:
                return {**value, "by": "somebody else"}
            except faults.Passing:
                self.host.sleep(1.0)


class Believes(Watched):
    """No checksum: damaged payloads are used as they are."""


class Shares(Watched):
    """One output folder for all attempts at a recipe: the loser removes the winner's files."""


@dataclass(frozen=True)
class Mutant:
    kind: Kind
    about: str
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    bad: Bad = STORM


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _unchecked() -> contextlib.AbstractContextManager[Any]:
    def read(self: payload.Payload, name: str) -> bytes:
        return b"".join(self.store.blocks(self.place(name)))

    return _patched(payload.Payload, "read", read)


def _one_folder() -> contextlib.AbstractContextManager[Any]:
    def make(self: payload.PayloadWriter) -> None:
        self.attempt = ".".join([*self.attempt.split(".")[:3], "shared"])
        if not self._made:
            with contextlib.suppress(faults.Exists):
                self.store.begin(self.place)
            self._made = True

    return _patched(payload.PayloadWriter, "_folder", make)


@contextlib.contextmanager
def _renumbered() -> Iterator[None]:
    publish = Execution.publish

    def now(self: Execution, id: str, version: int, record: Value, writer: payload.PayloadWriter | None = None) -> None:
        publish(self, id, self.context.history.slot(id).version, record, writer)

    def wanted(self: Work) -> bool:
        self.history.look()
        return not self.history.finished(self.id)

    with _patched(Execution, "publish", now), _patched(Work, "_wanted", wanted):
        yield


def _final() -> contextlib.AbstractContextManager[Any]:
    wait = Worker._wait

    def end(self: Worker, fault: faults.Fault, trouble: int) -> int:
        if isinstance(fault, faults.Denied):
            raise fault
        return wait(self, fault, trouble)

    return _patched(Worker, "_wait", end)


def _one_word() -> contextlib.AbstractContextManager[Any]:
    return _patched(blame, "agreed", lambda said, able, times, makers: len(said) >= times)


class Alone(Peers):
    """Only those of one launch, as if no other could be at work."""

    def __init__(self, claims: Claims, limit: float, back: float) -> None:
        super().__init__(claims, limit, back)
        self.launch = claims.launch

    def _pulse(self, name: str) -> Value:
        return pulse if (pulse := super()._pulse(name)).get("launch") == self.launch else {}


def _own_launch() -> contextlib.AbstractContextManager[Any]:
    return _patched(blame, "Peers", Alone)


def _one_reader() -> contextlib.AbstractContextManager[Any]:
    return _patched(blame.Blame, "confirmed", lambda self, id, parent: True)


def _nobody_asks() -> contextlib.AbstractContextManager[Any]:
    return _patched(blame.Blame, "_of_lack", lambda self, id: iter(()))


@contextlib.contextmanager
def _no_rest() -> Iterator[None]:
    with (
        _patched(blame.Blame, "failed", lambda self, id: self._failed.update([id])),
        _patched(blame.Blame, "leave_alone", lambda self, id, seconds: None),
    ):
        yield


def _by_the_clock() -> contextlib.AbstractContextManager[Any]:
    def explains(self: Repair, id: str, fault: faults.Fault) -> bool:
        since, visible = self.context.host.now(), self.context.options.visible_seconds
        while not self.context.host.stopping and not self.already_done(id):
            bad, fault = self._bad_parent(id, set())
            if bad is None:
                return True
            if isinstance(fault, faults.Damaged) or self.context.host.now() - since > visible:
                self._void(bad, self.context.history.outcome(bad).version, str(fault))
                return True
            self.context.host.sleep(1.0)
        return True

    return _patched(Repair, "explains", explains)


class AnyVersion(int):
    """A version that is taken for any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def _believed() -> contextlib.AbstractContextManager[Any]:
    def read(store: Store, round: int, real: Callable[..., Any] = summary.read) -> Any:
        done, origins = real(store, round)
        return {slot: (AnyVersion(version), record) for slot, (version, record) in done.items()}, origins

    return _patched(summary, "read", read)


APART = replace(FAULTY, broken="verdict", apart=True)
CRASHES = Bad(crashes=800)
FLIPS = Bad(kills=600, flips=600)
LOST = Bad(Weather(lost=0.05))
MUTANTS = {
    "rename instead of link": Mutant(Renames, "a register that somebody acted on is replaced"),
    "no re-read": Mutant(Trusts, "a lost reply makes a published member look unpublished", bad=LOST),
    "no fsync": Mutant(Forgets, "a crash of the server takes back what was acted on", bad=CRASHES),
    "no checksum": Mutant(Believes, "a flipped bit is bred into all that follow", _unchecked),
    "summaries hide what is void": Mutant(Watched, "files are looked for that were removed", _believed, FLIPS),
    "shared output folder": Mutant(Shares, "the loser of a race removes the winner's files", _one_folder),
    "bucket: no condition": Mutant(Overwrites, "a register that somebody acted on is replaced", bad=BUCKET),
    "bucket: no read-back": Mutant(Presumes, "a lost reply makes a published member look unpublished", bad=LOST),
    "bucket: no checksum": Mutant(WatchedBucket, "a flipped bit is bred into all that follow", _unchecked, BUCKET),
    "another version": Mutant(
        Watched,
        "an attempt counts as a version that its name does not tell, and is taken for useless",
        _renumbered,
        replace(RIVALS, pauses=500),
    ),
    "outages are final": Mutant(Watched, "a read-only minute ends every worker", _final),
    "one maker's word": Mutant(
        Watched, "a broken machine decides for all", _one_word, replace(FAULTY, broken="raises")
    ),
    "one launch's word": Mutant(
        Watched, "a broken machine that was started by itself decides for all", _own_launch, APART
    ),
    "one reader's word": Mutant(
        Watched, "a machine that reads wrongly voids what is whole", _one_reader, replace(FAULTY, broken="misreads")
    ),
    "nobody asks who can": Mutant(
        Watched,
        "what nobody can make is waited for without end",
        _nobody_asks,
        replace(CALM, broken="lacks", everywhere=True, within=600.0),
    ),
    "no rest after a failure": Mutant(
        Watched, "a broken machine takes all there is", _no_rest, replace(CALM, broken="raises")
    ),
    "patience by the clock": Mutant(Watched, "who was paused voids what is whole", _by_the_clock, SLEEPY),
}


def caught(mutant: Mutant, seeds: int) -> str:
    """The first promise that breaks; empty if none does."""
    for seed in range(seeds):
        for config in CONFIGS.values():
            wanted = undisturbed(config)
            with mutant.around():
                try:
                    weather(seed, config, wanted, mutant.kind, mutant.bad)
                except (TypeError, AttributeError):  # it is the mutant that is broken
                    raise
                except Exception as broken:  # a violation, or a worker that breaks over what it finds
                    if any(kind.__name__ in str(broken) for kind in (TypeError, AttributeError)):
                        raise  # and makers have called it a failure of their recipe
                    return f"seed {seed}, {config.algorithm}: {broken}"
    return ""


def storm_problem(seed: int) -> str:
    """For a pool of processes: what went wrong, in words."""
    try:
        storm(seed)
    except Exception as broken:
        return f"seed {seed}: {type(broken).__name__}: {str(broken)[:400]}"
    return ""


def crash_problem(case: tuple[Any, ...]) -> str:
    try:
        crash_everywhere(TINY[case[0]], case[1], kind=WatchedBucket if case[2:] else Watched)
    except Exception as broken:
        return f"{case[0]}: {type(broken).__name__}: {str(broken)[:400]}"
    return ""


def quiet() -> None:
    logging.getLogger("fleet").setLevel(logging.CRITICAL)

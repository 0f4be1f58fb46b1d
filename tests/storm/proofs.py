"""What is to be shown: storms by the seed, every single crash point, and that each rule of the protocol is needed."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fleet import faults, payload
from fleet.store import Value, _sealed
from tests.storm.disk import SimDisk, Weather
from tests.storm.storm import CALM, FLAKY, STORM, Bad, Storm, Violation, Watched
from tests.storm.world import Process
from tests.toy.config import ToyConfig

CONFIGS = {
    "diloco": ToyConfig(algorithm="diloco", population_size=3, shards=2, max_generations=3, inner_steps=3),
    "matching": ToyConfig(algorithm="matching", population_size=4, max_generations=4, inner_steps=3),
    "rank": ToyConfig(algorithm="rank", population_size=4, max_generations=4, elitism=1, inner_steps=3),
    "search": ToyConfig(algorithm="search", population_size=4, max_generations=3, inner_steps=3),
    "tournament": ToyConfig(algorithm="tournament", population_size=4, max_generations=4, inner_steps=3),
}
ELASTIC = CONFIGS["matching"].model_copy(update={"quorum": 0.5, "grace_seconds": 5.0})
TINY = {
    "diloco": CONFIGS["diloco"].model_copy(update={"population_size": 2, "max_generations": 1, "inner_steps": 2}),
    "matching": CONFIGS["matching"].model_copy(update={"population_size": 2, "max_generations": 2, "inner_steps": 2}),
    "rank": CONFIGS["rank"].model_copy(update={"population_size": 2, "max_generations": 2, "inner_steps": 2}),
    "search": CONFIGS["search"].model_copy(update={"population_size": 2, "max_generations": 1}),
}


@lru_cache(None)
def undisturbed(config: ToyConfig, workers: int = 3) -> str:
    return Storm(0, config, CALM, workers).run()


def weather(seed: int, config: ToyConfig, wanted: str, kind: type[Watched] = Watched, bad: Bad = STORM) -> Storm:
    """One storm; raises unless it ends with what the undisturbed run ended with."""
    storm = Storm(seed, config, bad, kind=kind)
    if (got := storm.run()) != wanted:
        raise Violation(f"other bytes: {got[:12]} instead of {wanted[:12]}")
    return storm


def elastic(seed: int) -> None:
    """Who is closed depends on chance there, so only the other promises can be held."""
    Storm(seed, ELASTIC, STORM).run()


def storm(seed: int) -> None:
    """One seed, one storm over one of the methods' shapes; every sixth is elastic."""
    shapes = list(CONFIGS.values())
    if seed % (len(shapes) + 1) == len(shapes):
        return elastic(seed)
    config = shapes[seed % (len(shapes) + 1)]
    weather(seed, config, undisturbed(config), bad=FLAKY if seed % 4 == 3 else STORM)


# -- every crash point -------------------------------------------------------------------------------------------------


def crash_points(config: ToyConfig, workers: int = 2) -> list[int]:
    """The numbers of all calls of an undisturbed run."""
    calm = Storm(0, config, CALM, workers)
    calm.run()
    return list(range(1, calm.server.calls + 1))


def crash_everywhere(config: ToyConfig, number: int, workers: int = 2) -> None:
    """A worker dies before, or after, one call of the run; or the server crashes there."""
    wanted = undisturbed(config, workers)
    for what in ("worker before", "worker after", "server"):
        crash_at(config, workers, number, what, wanted)


def crash_at(config: ToyConfig, workers: int, number: int, what: str, wanted: str) -> None:
    storm = Storm(0, config, CALM, workers)

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
        super().__init__(Unsynced(disk.server, disk.process), host, name)  # type: ignore[arg-type]


class Unsynced(SimDisk):
    def sync(self, folder: str) -> None:
        pass


class Believes(Watched):
    """No checksum: damaged payloads are used as they are."""


class Shares(Watched):
    """One output folder for all attempts at a recipe: the loser removes the winner's files."""


@dataclass(frozen=True)
class Mutant:
    kind: type[Watched]
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
        return b"".join(self.store.disk.blocks(self._place(name)))

    return _patched(payload.Payload, "read", read)


def _one_folder() -> contextlib.AbstractContextManager[Any]:
    def make(self: payload.Draft) -> None:
        self.attempt = ".".join([*self.attempt.split(".")[:3], "shared"])
        if not self._made:
            with contextlib.suppress(faults.Exists):
                self.store.disk.mkdir(self.place)
            self._made = True

    return _patched(payload.Draft, "_folder", make)


CRASHES = Bad(crashes=400)
LOST = Bad(Weather(lost=0.05))
MUTANTS = {
    "rename instead of link": Mutant(Renames, "a register that somebody acted on is replaced"),
    "no re-read": Mutant(Trusts, "a lost reply makes a published member look unpublished", bad=LOST),
    "no fsync": Mutant(Forgets, "a crash of the server takes back what was acted on", bad=CRASHES),
    "no checksum": Mutant(Believes, "a flipped bit is bred into all that follow", _unchecked),
    "shared output folder": Mutant(Shares, "the loser of a race removes the winner's files", _one_folder),
}


def caught(mutant: Mutant, seeds: int) -> str:
    """The first promise that breaks; empty if none does."""
    for seed in range(seeds):
        for config in CONFIGS.values():
            wanted = undisturbed(config)
            with mutant.around():
                try:
                    weather(seed, config, wanted, mutant.kind, mutant.bad)
                except Exception as broken:  # a violation, or a worker that breaks over what it finds
                    return f"seed {seed}, {config.algorithm}: {broken}"
    return ""


def storm_problem(seed: int) -> str:
    """For a pool of processes: what went wrong, in words."""
    try:
        storm(seed)
    except Exception as broken:
        return f"seed {seed}: {type(broken).__name__}: {str(broken)[:400]}"
    return ""


def crash_problem(case: tuple[str, int]) -> str:
    try:
        crash_everywhere(TINY[case[0]], case[1])
    except Exception as broken:
        return f"{case[0]}: {type(broken).__name__}: {str(broken)[:400]}"
    return ""


def quiet() -> None:
    logging.getLogger("fleet").setLevel(logging.CRITICAL)

"""Who is there: records that peers leave in Hivemind's hash table, so that they agree on whom a round has."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hivemind import DHT
from hivemind.utils import get_dht_time

from fleet.plain import say
from fleet.run_config import UserError

_LOOK = 0.1  # seconds between two looks at the table
_LIFE = 10.0  # seconds after which a peer that says nothing is dead


@dataclass(frozen=True)
class Word:
    """What a peer says of itself."""

    ids: tuple[str, ...]  # of its ranks' averagers
    spec: Mapping[str, Any]  # what all peers must have in common
    round: int = 0  # so many outer steps are done
    ready: int = -1  # the meeting that it waits in
    met: int = -1  # the last meeting whose result it has seen
    good: bool = False  # and whether that was whole
    level: int = -1  # the last round after which it had everybody's numbers exactly
    first: str = ""  # a digest of the numbers it began with, before the first round


class Rendezvous:
    """Of one peer, whose first rank speaks for it."""

    def __init__(self, dht: DHT, run: str, name: str, word: Word, stopping: Callable[[], bool]) -> None:
        self._dht, self._key, self.name, self.word, self._stopping = dht, f"{run}_peers", name, word, stopping
        self._lock, self._ended = threading.Lock(), threading.Event()

    def open(self) -> None:
        """Say it again and again, until it is closed."""
        self.check(self.there())
        self.say()
        threading.Thread(target=self._beat, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        with self._lock:
            self._dht.store(self._key, subkey=self.name, value=None, expiration_time=get_dht_time() + _LIFE + 1)

    def say(self, **changed: Any) -> None:
        with self._lock:  # a pipe leads to the table's process, which knows no threads
            self.word = replace(self.word, **changed)
            until, value = get_dht_time() + _LIFE, json.dumps(asdict(self.word))
            stored = self._dht.store(
                self._key, subkey=self.name, expiration_time=until, value=value, return_future=True
            )
        stored.result(timeout=10)

    def there(self) -> dict[str, Word]:
        """All that are alive, this one among them."""
        with self._lock:
            asked = self._dht.get(self._key, latest=True, return_future=True)
        found = asked.result(timeout=10)
        values = {str(name): each.value for name, each in found.value.items()} if found else {}
        return {name: _read(value) for name, value in sorted(values.items()) if value}

    def check(self, there: Mapping[str, Word]) -> None:
        """Peers that train something else are no peers of ours."""
        for name, word in there.items():
            mine = self.word.spec
            if other := sorted(key for key in {*mine, *word.spec} if mine.get(key) != word.spec.get(key)):
                said = ", ".join(f"{key} is {word.spec.get(key)!r} there, {mine.get(key)!r} here" for key in other)
                raise UserError(f"peer {name} trains something else: {said}")

    def wait(self, enough: Callable[[dict[str, Word]], bool], seconds: float) -> dict[str, Word]:
        """Until it is so, or the time is over."""
        end = time.monotonic() + seconds
        while True:
            there = self.there()
            if self._stopping():
                raise UserError("told to stop while other peers were waited for")
            if self.name in there and there[self.name].ids != self.word.ids:
                raise UserError(
                    f"another process calls itself {self.name}, too: each peer needs its own --hv.world-rank"
                )
            if enough(there) or time.monotonic() > end:
                return there
            time.sleep(_LOOK)

    def _beat(self) -> None:
        while not self._ended.wait(_LIFE / 3):
            try:
                self.say()
            except Exception as error:  # whatever the table comes up with; the next beat is soon
                if self._ended.is_set():
                    return
                say(f"the peers' table: {type(error).__name__}: {error}")


def _read(value: str) -> Word:
    found = json.loads(value)
    return Word(**{**found, "ids": tuple(found["ids"])})


def number_of(round: int, attempt: int, names: tuple[str, ...]) -> str:
    """The bits by which those meet who mean the same meeting, with the same peers."""
    digest = hashlib.sha256(json.dumps([round, attempt, names]).encode()).digest()
    return "".join(f"{byte:08b}" for byte in digest[:4])

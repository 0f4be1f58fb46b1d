"""Payload files that a worker's second lane has read, and found right, before somebody asked for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fleet.host import Host

_PAUSE = 0.005  # seconds between two looks at a file that is on its way


class AtHand:
    """Shared by both lanes: only the second brings something, either may take it, once."""

    def __init__(self) -> None:
        self._files = dict[str, bytes]()  # by their places
        self._coming = ""

    def holds(self, place: str) -> bool:
        return place in self._files

    def take(self, place: str, host: Host) -> bytes | None:
        """If it is here, or on its way."""
        while self._coming == place:
            host.pause(_PAUSE)
        return self._files.pop(place, None)

    @contextmanager
    def coming(self, place: str) -> Iterator[Callable[[bytes], None]]:
        self._coming = place
        try:
            yield lambda data: self._files.update({place: data})
        finally:
            self._coming = ""

    def keep(self, places: set[str]) -> None:
        """And no other."""
        for place in self._files.keys() - places:
            self._files.pop(place, None)

"""Payload files in a worker's memory: what its second lane has read, and found right, before somebody asked for it, and
what it made itself."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fleet.host import Host

_MOST = 1 << 30  # bytes of what was made here
_PAUSE = 0.005  # seconds between two looks at a file that is on its way


class AtHand:
    """Shared by both lanes: either may take what one of them brought, once. What was made here may be taken
    more often, until something of another round is made."""

    def __init__(self) -> None:
        self._files, self._made = dict[str, bytes](), dict[str, bytes]()  # by their places
        self._coming = set[str]()

    def holds(self, place: str) -> bool:
        return place in self._files or place in self._made

    def made(self, place: str, data: bytes) -> None:
        """Here, by whichever lane makes such files; they are on the disk by now."""
        same = {other: each for other, each in self._made.items() if _round(other) == _round(place)}
        if sum(map(len, same.values())) + len(data) <= _MOST:
            same[place] = data
        self._made = same

    def made_here(self, place: str) -> bytes | None:
        return self._made.get(place)

    def take(self, place: str, host: Host) -> bytes | None:
        """If it is here, or on its way."""
        while place in self._coming:
            host.pause(_PAUSE)
        return self._files.pop(place, None)

    @contextmanager
    def coming(self, place: str) -> Iterator[Callable[[bytes], None]]:
        self._coming.add(place)
        try:
            yield lambda data: self._files.update({place: data})
        finally:
            self._coming.discard(place)

    def drop(self, places: set[str]) -> None:
        for place in places:
            self._files.pop(place, None)

    def keep(self, places: set[str]) -> None:
        """And no other."""
        self.drop(self._files.keys() - places)


def _round(place: str) -> str:
    """Of files/ROUND.SLOT.VERSION.TOKEN/NAME."""
    return place.split(".")[0]

"""The shared disk through a handful of verbs. Knows nothing of recipes or models.

A *register* is a name that gets a value once and keeps it for ever; *news* is a file of which only the latest text
matters and by which nothing is decided. Payloads, which are large, are in `payload.py`.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from posixpath import basename, dirname
from typing import Any, TypeVar

from fleet import faults, strictjson
from fleet.at_hand import AtHand
from fleet.disk import Disk
from fleet.host import Host

FOLDERS = ("tmp", "rounds", "files", "workers", "launches")
REGISTER_LIMIT = 1 << 24
_AGAIN = (0.01, 0.05, 0.2, 1.0)  # a passing fault of one call: NFS answers ESTALE once and then the truth
_SETTLE = (*_AGAIN, 2.0, 5.0, 10.0, 20.0, 30.0, 30.0)  # seeing one's own name: name caches live up to a minute

Value = dict[str, Any]
T = TypeVar("T")


class Unreadable(ValueError):
    """A value that could not be read back from a register: not the disk's fault, and the same whoever offers it."""


class Store:
    """Registers and news in one run's folder, for one process."""

    def __init__(self, disk: Disk, host: Host, name: str) -> None:
        self.disk, self.host, self.name = disk, host, name
        self._last: tuple[str, bytes, Value] = ("", b"", {})
        self.verified = dict[str, bool]()  # payload files that this process has read whole and found right
        self.at_hand = AtHand()
        self.run_id = ""  # of the run that this store was opened for

    # -- registers --------------------------------------------------------------------------------------------------

    def settle(self, name: str, value: Value, durable: bool = True) -> Value:
        """Offer a value for a name and return the one that stands, which may be another's."""
        with self._draft(proven(value, name)[0], durable) as draft:
            for pause in _SETTLE:
                try:
                    won = self._offer(draft, name)
                    if won and not durable:
                        return value
                    if durable:
                        self.disk.sync(dirname(name))
                    return self.read(name)  # whatever the link's reply was, what stands there is the outcome
                except faults.Denied:  # may last for minutes: whoever called says so, and asks again
                    raise
                except (faults.Missing, faults.Passing):
                    self.host.sleep(pause)
                    with contextlib.suppress(faults.Passing):
                        self.names(dirname(name))  # wakes a name cache that still says "not there"
                        if basename(draft) not in self.names("tmp"):
                            break  # lost in a crash of the server, or swept while this process was paused
        raise faults.Passing(f"{name}: the disk does not show what stands there")

    def read(self, name: str) -> Value:
        """What stands in a register. Whoever acts on it uses `confirmed`."""
        damaged = faults.Damaged(name)
        for pause in (*_AGAIN, 0.0):
            try:
                data = self.patiently(lambda: self.disk.read(name, REGISTER_LIMIT))
                if (name, data) != self._last[:2]:  # what is read again to be sure need not be understood again
                    self._last = (name, data, _opened(data, name))
                return self._last[2]
            except faults.Damaged as error:  # perhaps a copy that arrived in part: look afresh
                damaged = error
                with contextlib.suppress(faults.Fault):
                    self.disk.forget(name)
                self.host.sleep(pause)
        raise damaged

    def confirmed(self, name: str) -> Value:
        """What stands in a register, once a crash of the disk's server cannot take it back any more."""
        value = self.read(name)
        while True:
            self.patiently(lambda: self.disk.sync(dirname(name)))
            if (again := self.read(name)) == value:
                return value
            value = again

    def standing(self, name: str) -> Value:
        """The same, where the folder was synced after the name had been seen in it."""
        return self.read(name)

    def names(self, folder: str) -> list[str]:
        """A listing: what it shows is there; what it does not show may be there all the same."""
        try:
            return self.patiently(lambda: self.disk.list(folder))
        except faults.Missing:
            return []

    def sync(self, folder: str) -> None:
        self.patiently(lambda: self.disk.sync(folder))

    def folder(self, name: str) -> None:
        """Make a folder, so that it survives a crash."""
        with contextlib.suppress(faults.Exists):
            self.disk.mkdir(name)
        self.sync(dirname(name))
        self.sync(name)  # refuses a link in its place, through which we would write elsewhere

    # -- news -------------------------------------------------------------------------------------------------------

    def post(self, name: str, text: str) -> None:
        self.replace(name, text.encode(), sync=False)

    def replace(self, name: str, data: bytes, sync: bool = True) -> None:
        """A file for people, or news: whoever reads it sees it whole, as it was or as it is."""
        draft = self._private()
        try:
            self.disk.write(draft, data, sync)
            self.disk.rename(draft, name)
        except faults.Fault:
            self._remove(draft)
            raise

    def news(self, name: str) -> str:
        try:
            return self.patiently(lambda: self.disk.read(name, 1 << 16)).decode(errors="replace")
        except (faults.Missing, faults.Refused):
            return ""

    def stamp(self, name: str) -> tuple[int, ...]:
        """Differs when the news was replaced; on a network disk it may be that of a while ago."""
        try:
            return self.patiently(lambda: self.disk.stamp(name))
        except faults.Missing:
            return ()

    # -- inside -----------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        """A process that begins shows that it may write here at all. What the disk refuses it later is an outage."""
        second = self._private()
        try:
            with self._draft(b"", sync=False) as first:
                self.disk.link(first, second)
            self.replace(second, b"", sync=False)
        except (faults.Denied, faults.Exists) as fault:
            why = "this process may not write there, or the disk knows no hard links, or no renames that replace"
            raise faults.Unfit(f"{fault}: {why}") from None
        except (faults.Full, faults.Passing, faults.Missing):  # the loop waits for these
            pass
        finally:
            self._remove(second)

    def _reopen(self) -> None:
        """Where the root's handle does not answer, and another is to be had at its path that holds this very run, go on
        there: the disk was mounted anew."""
        with contextlib.suppress(faults.Fault):
            if self.run_id and not self._answers():
                anew = Store(self.disk.reopen(), self.host, self.name)
                if anew.read("run.json").get("id") == self.run_id:
                    self.disk = anew.disk

    def _answers(self) -> bool:
        with contextlib.suppress(faults.Fault):
            return bool(self.disk.read("run.json", REGISTER_LIMIT))  # what a file is may be known without asking
        return False

    def _offer(self, draft: str, name: str) -> bool:
        """link() never replaces a name, and has one winner on every shared disk that was measured."""
        try:
            self.disk.link(draft, name)
            return True
        except faults.Denied:  # some disks say so to the loser of a race
            if not self._stands(name):
                raise
        except (faults.Exists, faults.Passing):
            pass
        except faults.Missing:
            self.folder(dirname(name))
            raise
        return False

    def _stands(self, name: str) -> bool:
        with contextlib.suppress(faults.Missing):
            return bool(self.read(name))
        return False

    @contextlib.contextmanager
    def _draft(self, data: bytes, sync: bool) -> Iterator[str]:
        name = self._private()
        try:
            self.disk.write(name, data, sync)
            yield name
        finally:
            self._remove(name)

    def _private(self) -> str:
        return f"tmp/{self.name}.{self.host.token()}"

    def _remove(self, name: str) -> None:
        with contextlib.suppress(faults.Fault):
            self.disk.remove(name)

    def patiently(self, call: Callable[[], T]) -> T:
        """A call that may be answered wrongly once or twice, as NFS does with ESTALE; or through a mount that died."""
        for pause in _AGAIN:
            try:
                return call()
            except faults.Passing:
                self.host.sleep(pause)
        self._reopen()
        return call()


def proven(value: Value, name: str) -> tuple[bytes, Value]:
    """What stands in a register, and as everybody will read it; nothing is written that could not be read again."""
    try:
        if len(data := _sealed(value)) > REGISTER_LIMIT:
            raise ValueError(f"{len(data):,} bytes, and at most {REGISTER_LIMIT:,} are possible")
        return data, _opened(data, name)
    except (faults.Damaged, TypeError, ValueError, RecursionError) as error:
        why = str(error).removeprefix(f"{name}: ")
        raise Unreadable(f"{name}: what was to be written there could not be read back: {why}") from None


def _sealed(value: Value) -> bytes:
    line = strictjson.text(value).encode()
    return line + b"\n" + hashlib.sha256(line).hexdigest()[:16].encode() + b"\n"


def _opened(data: bytes, name: str) -> Value:
    line, _, check = data.partition(b"\n")
    if hashlib.sha256(line).hexdigest()[:16].encode() != check.strip():
        raise faults.Damaged(f"{name}: its bytes do not match their checksum")
    try:
        value = strictjson.parse(line, REGISTER_LIMIT)
    except strictjson.BadJson as error:
        raise faults.Damaged(f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise faults.Damaged(f"{name}: not an object")
    return value

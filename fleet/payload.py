"""Payloads: the files of one attempt, in a folder that nobody else ever writes in, sealed by sizes and checksums."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet import faults, strictjson
from fleet.disk import Writer
from fleet.store import Store

Files = dict[str, tuple[int, str]]  # name -> size, sha256

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_SNAPSHOT = re.compile(r"snapshot\.([0-9]{1,15})\.json")
_FLUSH = 1 << 26  # so many bytes are written between two syncs on the side
_OVERLAP = 1 << 18  # from this many bytes on, hashing beside writing is worth a hand-over to another thread


class Draft:
    """What one attempt is writing. Its folder is made with the first file."""

    def __init__(self, store: Store, attempt: str) -> None:
        self.store, self.attempt = store, attempt
        self.written = 0
        self._made = self._snapshots = False
        self._foreign: set[str] = set()  # written by somebody else's library
        self._digests: Files = {}

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator["HashedFile"]:
        """A new file, hashed while it is written and on the disk when the block ends."""
        with self._hashed(name) as file:
            yield file
        self._digests[name] = file.seal()
        self.written += file.size

    def path(self, name: str) -> Path:
        """For libraries that want to write a file themselves; it is read once more to be hashed."""
        self._check(name)
        self._folder()
        self._foreign.add(name)
        return self.store.disk.root / "files" / self.attempt / name

    def seal(self) -> Files:
        """Everything on the disk, durable, with its checksums."""
        if not self._made:
            return {}
        self.forget_snapshots()
        for name in sorted(self._foreign):
            self._digests[name] = self._adopt(name)
            self.written += self._digests[name][0]
        self._sync()
        if lost := self._digests.keys() - set(self.store.names(self._place)):
            raise faults.Passing(f"{self._place}: {sorted(lost)[0]} is not there any more: did the server crash?")
        return dict(sorted(self._digests.items()))

    def drop(self, keep_snapshot: bool = False) -> None:
        """Leave nothing behind, or only the snapshot from which the next attempt can go on."""
        if self._made and not (keep_snapshot and self._snapshots):
            drop(self.store, self.attempt)
        elif self._made:
            self._remove(lambda name: not name.startswith("snapshot."))

    # -- snapshots of a long recipe ---------------------------------------------------------------------------------

    def snapshot(self, step: int, state: Any, save: Callable[["Saver"], None]) -> None:
        """Keep what the recipe needs to go on from here; the manifest comes last, then older ones go."""
        self._snapshots = True
        saver = Saver(self, step)
        save(saver)
        manifest = {"step": step, "state": state, "files": saver.files}
        self._sync()
        self.store.settle(f"{self._place}/snapshot.{step}.json", manifest)
        self.forget_snapshots(but=step)

    def forget_snapshots(self, but: int = -1) -> None:
        if self._snapshots:
            self._remove(lambda name: name.startswith("snapshot.") and not name.startswith(f"snapshot.{but}."))

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        return f"files/{self.attempt}"

    def _check(self, name: str) -> None:
        if not NAME.fullmatch(name) or name.startswith("snapshot."):
            raise ValueError(f"{name!r} cannot be the name of a member's file")

    def _folder(self) -> None:
        if not self._made:
            self.store.disk.mkdir(self._place)
            self._made = True

    @contextlib.contextmanager
    def _hashed(self, name: str, own: bool = False) -> Iterator["HashedFile"]:
        if not own:
            self._check(name)
        self._folder()
        with contextlib.closing(HashedFile(self.store.disk.create(f"{self._place}/{name}"))) as file:
            yield file
            file.sync()

    def _remove(self, which: Callable[[str], bool]) -> None:
        with contextlib.suppress(faults.Fault):
            for name in filter(which, self.store.names(self._place)):
                self.store.disk.remove(f"{self._place}/{name}")

    def _adopt(self, name: str) -> tuple[int, str]:
        file = self.store.disk.append(f"{self._place}/{name}")
        with contextlib.closing(file):
            file.sync()
        return hash_of(self.store, f"{self._place}/{name}")

    def _sync(self) -> None:
        self.store.sync(self._place)
        self.store.sync("files")


class HashedFile:
    """Hashes and syncs beside the writing, which all release the interpreter: the disk is kept busy all the time."""

    def __init__(self, file: Writer) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0
        self._side: ThreadPoolExecutor | None = None
        self._hashing: Future[None] | None = None
        self._syncing: Future[None] | None = None
        self._unsynced = 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _OVERLAP:
            self._wait_for_hash()
            self._digest.update(view)
            self._file.write(view)
        else:
            self._write_large(view, borrowed=not isinstance(data, bytes))
        self.size += len(view)
        return len(view)

    def sync(self) -> None:
        if self._syncing:
            self._syncing.result()
        self._file.sync()

    def close(self) -> None:
        if self._side:
            self._side.shutdown()
        self._file.close()

    def seal(self) -> tuple[int, str]:
        self._wait_for_hash()
        return self.size, self._digest.hexdigest()

    def _write_large(self, view: memoryview, borrowed: bool) -> None:
        self._side = self._side or ThreadPoolExecutor(2)
        self._wait_for_hash()
        self._hashing = self._side.submit(self._digest.update, view)
        try:
            self._file.write(view)
        finally:
            if borrowed:  # the caller may fill its buffer with something else as soon as we return
                self._wait_for_hash()
        self._unsynced += len(view)
        if self._unsynced >= _FLUSH and (self._syncing is None or self._syncing.done()):
            if self._syncing:
                self._syncing.result()  # what the disk could not take is to be known now
            self._syncing, self._unsynced = self._side.submit(self._file.sync), 0

    def _wait_for_hash(self) -> None:
        if self._hashing:
            hashing, self._hashing = self._hashing, None
            hashing.result()


class Saver:
    """Hands a snapshot's files to the draft; what a maker saves into."""

    def __init__(self, draft: Draft, step: int) -> None:
        self._draft, self._step = draft, step
        self.files: Files = {}

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[HashedFile]:
        self._draft._check(name)
        with self._draft._hashed(f"snapshot.{self._step}.{name}", own=True) as file:
            yield file
        self.files[name] = file.seal()


@dataclass(frozen=True)
class Payload:
    """The files of a finished attempt. Sizes are checked always, checksums on every read of bytes and on the first
    use of a path."""

    store: Store
    attempt: str
    files: Mapping[str, tuple[int, str]]
    prefix: str = ""
    _good: set[str] = field(default_factory=set, compare=False)

    def read(self, name: str) -> bytes:
        place, (size, sha) = self._place(name), self.files[name]
        data = self.store.patiently(lambda: self.store.disk.read(place, size))
        _compare(place, (len(data), hashlib.sha256(data).hexdigest()), (size, sha))
        return data

    def path(self, name: str) -> Path:
        if name not in self._good:
            _compare(self._place(name), hash_of(self.store, self._place(name)), self.files[name])
            self._good.add(name)
        return self.store.disk.root / self._place(name)

    def check(self, fresh: bool = False) -> None:
        """Read everything; `fresh` past the page cache."""
        for name in self.files:
            if fresh:
                self.store.disk.forget(self._place(name))
            _compare(self._place(name), hash_of(self.store, self._place(name)), self.files[name])

    def _place(self, name: str) -> str:
        return f"files/{self.attempt}/{self.prefix}{name}"


@dataclass(frozen=True)
class Snapshot(Payload):
    """Where an earlier attempt at a long recipe had got to."""

    step: int = 0
    state: Any = None


def latest_snapshot(store: Store, prefix: str) -> Snapshot | None:
    """The furthest whole snapshot that any attempt whose name starts so has left."""
    found = []
    for attempt in store.names("files"):
        if attempt.startswith(prefix):
            steps = [int(m[1]) for n in store.names(f"files/{attempt}") if (m := _SNAPSHOT.fullmatch(n))]
            found += [(step, attempt) for step in steps]
    for step, attempt in sorted(found, reverse=True):
        with contextlib.suppress(faults.Fault, strictjson.Bad, KeyError, TypeError, ValueError):
            record = store.read(f"files/{attempt}/snapshot.{step}.json")
            files = files_of(record["files"])
            snapshot = Snapshot(store, attempt, files, f"snapshot.{step}.", step=step, state=record["state"])
            snapshot.check()
            return snapshot
    return None


def _compare(place: str, seen: tuple[int, str], wanted: tuple[int, str]) -> None:
    if seen[0] < wanted[0]:
        raise faults.Missing(f"{place}: {seen[0]} of {wanted[0]} bytes are there so far")
    if seen != wanted:
        raise faults.Damaged(f"{place}: its bytes do not match their checksum")


def files_of(value: Any) -> Files:
    """A manifest as it stands in a register, every name and number checked: it is text that somebody wrote."""
    if not isinstance(value, dict):
        raise ValueError("files: not an object")
    for name, entry in value.items():
        size, sha = entry
        if not (NAME.fullmatch(name) and isinstance(size, int) and size >= 0 and re.fullmatch("[0-9a-f]{64}", sha)):
            raise ValueError(f"files: {name!r}: {entry!r}")
    return {name: (size, sha) for name, (size, sha) in value.items()}


def hash_of(store: Store, place: str) -> tuple[int, str]:
    def once() -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        for block in store.disk.blocks(place):
            digest.update(block)
            size += len(block)
        return size, digest.hexdigest()

    return store.patiently(once)


def drop(store: Store, attempt: str) -> None:
    """Remove an attempt's folder. Whoever still reads it finds out that it is behind."""
    with contextlib.suppress(faults.Fault):
        for name in store.disk.list(f"files/{attempt}"):
            with contextlib.suppress(faults.Missing):
                store.disk.remove(f"files/{attempt}/{name}")
        store.disk.rmdir(f"files/{attempt}")

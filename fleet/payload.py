"""Payloads: the files of one attempt, in a folder that nobody else ever writes in, sealed by sizes and checksums."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fleet import faults
from fleet.checksum import checksum, is_checksum
from fleet.hashed_files import HashedFile, HashedReader
from fleet.host import AT_ONCE
from fleet.recipe import Member
from fleet.store import Store, compare

Files = dict[str, tuple[int, str]]  # name -> size, checksum

SNAPSHOT = "snapshot."  # so begin the names of the files that are not the member's own
_PAUSE = 0.01  # seconds between two looks at a file that is on its way to the disk
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class _Held(io.BytesIO):
    """A file that is still in memory."""

    def sync(self) -> None:
        pass


class PayloadWriter:
    """What one attempt is writing. Its folder is made with the first file. What is `deferred` stays in
    memory until it is sealed, so that whoever makes the next member waits for no disk."""

    def __init__(self, store: Store, attempt: str, deferred: bool = False) -> None:
        self.store, self.attempt = store, attempt
        self.written = 0
        self.held: dict[str, bytes] = {}
        self._deferred = deferred
        self._kept = set[str]()  # in memory, when they are on the disk
        self.has_snapshot = self._made = False
        self.foreign: set[str] = set()  # names of files that somebody else's library writes
        self._digests: Files = {}
        self._on_their_way = list[HashedFile]()  # to the disk, while the next one is written

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def create(self, name: str, again: bool = False, keep: bool = False) -> Iterator[HashedFile]:
        """A new file, hashed while it is written and there when the block ends:
        `with work.create("weights") as file: file.write(block)`. One that is read `again` meanwhile says so. A small
        one, which this worker will read itself, it may `keep` in memory."""
        self.check(name)
        self._kept |= {name} if keep else set()
        with self._hold(name) if (self._deferred or keep) and not again else self._durable_later(name, again) as file:
            yield file
        self._digests[name] = file.seal()
        self.written += file.size

    def path(self, name: str) -> Path:
        """For libraries that want to write a file themselves; it is read once more to be hashed."""
        self.check(name)
        self._folder()
        self.foreign.add(name)
        return self.store.local_folder(self.place) / name

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """For libraries that write several files, `with work.folder() as place: model.save_pretrained(place)`: what
        lies in the attempt's own folder at the end is the member's. Of a maker that is killed nothing is left but the
        attempt, which is found by its name."""
        self._folder()
        yield self.store.local_folder(self.place)
        for name in self.store.local_files(self.place):
            if not name.startswith(SNAPSHOT) and name not in self._digests:
                self.path(name)

    def written_so_far(self, name: str) -> Iterator[bytes]:
        """Of a file that is still being written, block by block."""
        self.check(name)
        return self.store.written_so_far(f"{self.place}/{name}")

    @property
    def known(self) -> Files:
        """What was written, as it will be sealed; nothing where that is still to be read."""
        return {} if self.foreign else dict(sorted(self._digests.items()))

    def seal(self) -> Files:
        """Everything on the disk, durable, with its checksums."""
        self._write_held()
        self._make_durable()
        if not self._made:
            return {}
        if self.has_snapshot:
            self.remove(lambda name: name.startswith(SNAPSHOT))
        for name in sorted(self.foreign):
            self._digests[name] = self.store.adopt(f"{self.place}/{name}")
            self.written += self._digests[name][0]
        self.sync()
        if lost := self._digests.keys() - set(self.store.names(self.place)):
            raise faults.Passing(f"{self.place}: {sorted(lost)[0]} is not there any more: did the server crash?")
        return dict(sorted(self._digests.items()))

    def drop(self, keep_snapshot: bool = False) -> None:
        """Leave nothing behind, or only the snapshot from which the next attempt can go on."""
        self.held.clear()
        for file in self._on_their_way:
            with contextlib.suppress(faults.Fault):
                file.close()
        if self._made and not (keep_snapshot and self.has_snapshot):
            drop(self.store, self.attempt)
        elif self._made:
            self.remove(lambda name: not name.startswith(SNAPSHOT))

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        return f"files/{self.attempt}"

    def check(self, name: str) -> None:
        if not NAME.fullmatch(name) or name.startswith(SNAPSHOT):
            raise ValueError(f"{name!r} cannot be the name of a member's file")

    def _folder(self) -> None:
        if not self._made:
            self.store.begin(self.place)
            self._made = True

    def hashed(self, name: str, again: bool = False) -> HashedFile:
        self._folder()
        return HashedFile(self.store.create(f"{self.place}/{name}", again))

    @contextlib.contextmanager
    def _durable_later(self, name: str, again: bool) -> Iterator[HashedFile]:
        file = self.hashed(name, again)
        with contextlib.ExitStack() as unless_whole:
            unless_whole.callback(file.close)
            yield file
            file.sync_beside()
            self._make_durable(AT_ONCE - 1)
            unless_whole.pop_all()
        self._on_their_way.append(file)

    def _make_durable(self, but: int = 0) -> None:
        """All files, or all but the last ones."""
        oldest = [self._on_their_way.pop(0) for _ in range(len(self._on_their_way) - but)]
        self.store.host.together([file.finish for file in oldest])

    @contextlib.contextmanager
    def _hold(self, name: str) -> Iterator[HashedFile]:
        held = _Held()
        with contextlib.closing(HashedFile(held)) as file:
            yield file
            self.held[name] = held.getvalue()

    def _write_held(self) -> None:
        if self.held:
            self._folder()
            kept = {name: self.held[name] for name in self._kept & self.held.keys()}
            each = [partial(self._write_out, *held) for held in self.held.items()]
            self.store.host.together(each) if self._deferred else [write() for write in each]
            for name, data in kept.items():
                self.store.at_hand.made(f"{self.place}/{name}", data)

    def _write_out(self, name: str, data: bytes) -> None:
        with contextlib.closing(self.store.create(f"{self.place}/{name}")) as file:
            file.write(data)
            file.sync()
        self.held.pop(name, None)  # who reads it from now on reads the disk

    def remove(self, which: Callable[[str], bool]) -> None:
        with contextlib.suppress(faults.Fault):
            for name in filter(which, self.store.names(self.place)):
                self.store.remove(f"{self.place}/{name}")

    def sync(self) -> None:
        self.store.sync(self.place)
        self.store.sync("files")


@dataclass(frozen=True)
class Payload:
    """The files of a finished attempt. Sizes are checked always, checksums on every read of bytes and on a process's
    first use of a path."""

    store: Store
    attempt: str
    files: Mapping[str, tuple[int, str]]
    prefix: str = ""
    used: set[str] = field(default_factory=set, compare=False)  # what was read, by name
    held: Mapping[str, bytes] = field(default_factory=dict, compare=False)  # what is not on the disk yet

    def read(self, name: str) -> bytes:
        place, (size, known) = self.place(name), self.files[name]
        if (there := self._at_hand(name)) is not None:
            return there
        data, seen = self.store.patiently(lambda: self.store.load(place, size)), checksum(known)
        seen.update(data)
        compare(place, (len(data), seen.hexdigest()), (size, known))
        return data

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator["HashedReader | io.BytesIO"]:
        """To read a file piece by piece, `with parent.open("weights") as file: file.readinto(buffer)`; the block ends
        well only if all that it was given was right."""
        place, (size, known) = self.place(name), self.files[name]
        if (there := self._at_hand(name)) is not None:
            yield io.BytesIO(there)
            return
        with contextlib.closing(self.store.patiently(lambda: self.store.open(place))) as file:
            reader = HashedReader(file, size, known)
            yield reader
            compare(place, reader.finish(), (size, known))

    def path(self, name: str) -> Path:
        while name in self.held:
            self.store.host.pause(_PAUSE)
        return self.store.local(self.place(name), *self.files[name])

    def check(self, fresh: bool = False) -> None:
        """Read everything; `fresh` past the page cache."""
        for name in self.files:
            if fresh:
                self.store.forget(self.place(name))
            compare(self.place(name), self.store.hash_of(self.place(name), self.files[name][1]), self.files[name])

    def _at_hand(self, name: str) -> bytes | None:
        """If it was read ahead, or has not left this process yet: then it is right."""
        self.used.add(name)
        if (there := self.held.get(name)) is not None:
            return there
        if (there := self.store.at_hand.made_here(self.place(name))) is not None:
            return there
        if (there := self.store.at_hand.take(self.place(name), self.store.host)) is not None:
            self.store.bytes_at_hand += len(there)
        return there

    def place(self, name: str) -> str:
        return f"files/{self.attempt}/{self.prefix}{name}"


@dataclass(frozen=True)
class InputMember(Payload):
    """A present input: its files, and what is known of it."""

    member: Member = field(kw_only=True)

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self.member.metrics

    @property
    def genome(self) -> Mapping[str, Any]:
        return self.member.recipe.genome

    @property
    def folder(self) -> Path:
        """Where its files are, each looked at."""
        return [self.path(name).parent for name in self.files][0]


def files_of(value: Any) -> Files:
    """A manifest as it stands in a register, every name and number checked: it is text that somebody wrote."""
    if not isinstance(value, dict):
        raise ValueError("files: not an object")
    for name, entry in value.items():
        size, known = entry
        if not (NAME.fullmatch(name) and isinstance(size, int) and size >= 0 and is_checksum(known)):
            raise ValueError(f"files: {name!r}: {entry!r}")
    return {name: (size, known) for name, (size, known) in value.items()}


def drop(store: Store, attempt: str) -> None:
    """Remove an attempt's folder. Whoever still reads it finds out that it is behind."""
    with contextlib.suppress(faults.Fault):
        store.clear(f"files/{attempt}")

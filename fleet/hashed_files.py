"""Files that are hashed while they are written, and synced on the side, or while they are read."""

import functools
import hashlib
from concurrent.futures import Future, ThreadPoolExecutor

from fleet.store import ReadableFile, WritableFile

_FLUSH = 1 << 26  # so many bytes are written between two syncs on the side
_PIECE = 1 << 19  # bytes that are read before they are hashed
_OVERLAP = 1 << 18  # from this many bytes on, hashing beside writing is worth a hand-over to another thread


class HashedFile:
    """Hashes and syncs beside the writing, which all release the interpreter: the disk is kept busy all the time."""

    def __init__(self, file: WritableFile) -> None:
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
            self._syncing, self._unsynced = self._side.submit(self._file.flush), 0

    def _wait_for_hash(self) -> None:
        if self._hashing:
            hashing, self._hashing = self._hashing, None
            hashing.result()


class HashedReader:
    """What is read from it may be used for what is published only after it turned out to be right. Hashing goes on
    beside the reader's own work; so bytes are handed on as copies, which their reader may change."""

    def __init__(self, file: ReadableFile, size: int) -> None:
        self._file, self._digest, self.size, self._done = file, hashlib.sha256(), size, 0
        self._buffers: list[bytearray] = []
        self._hashing: list[Future[None] | None] = [None, None]  # of each buffer
        self._turn = 0

    def readinto(self, room: memoryview) -> int:
        """Fills it, but at the end of the file."""
        room, done = room.cast("B"), 0
        while done < len(room) and (piece := self._next(len(room) - done)):
            room[done : done + len(piece)] = piece
            done += len(piece)
        self._done += done
        return done

    def read(self, count: int) -> bytes:
        data = bytearray(count)
        return bytes(data[: self.readinto(memoryview(data))])

    def finish(self) -> tuple[int, str]:
        """Size and checksum of the whole file; what nobody asked for is read now."""
        while self._done <= self.size and self.read(_PIECE):
            pass
        self._wait(0, 1)
        return self._done, self._digest.hexdigest()

    def _next(self, most: int) -> memoryview:
        """The next bytes, in one of two buffers; while they are used, the one thread of the process that hashes what is
        read does so, one piece after the other."""
        if most < _OVERLAP:
            self._wait(0, 1)
            small = bytearray(most)
            piece = memoryview(small)[: self._file.readinto(memoryview(small))]
            self._digest.update(piece)
            return piece
        self._buffers = self._buffers or [bytearray(_PIECE), bytearray(_PIECE)]
        self._turn ^= 1
        self._wait(self._turn)
        room = memoryview(self._buffers[self._turn])[:most]
        piece = room[: self._file.readinto(room)]
        self._hashing[self._turn] = _hasher().submit(self._digest.update, piece)
        return piece

    def _wait(self, *turns: int) -> None:
        for turn in turns:
            if hashing := self._hashing[turn]:
                hashing.result()
                self._hashing[turn] = None


@functools.cache
def _hasher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)

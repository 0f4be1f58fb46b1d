"""Files that are hashed while they are written, and synced on the side; or hashed while they are read."""

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor

from fleet.checksum import checksum
from fleet.store import ReadableFile, WritableFile

_FLUSH = 1 << 26  # so many bytes are written between two syncs on the side
_WORTH_IT = 1 << 20  # with less, a thread costs more than it brings
_PIECE = 1 << 19  # bytes that are read only to be hashed, at a time


class HashedFile:
    """Syncs beside the writing: the disk is kept busy all the time."""

    def __init__(self, file: WritableFile) -> None:
        self._file, self._sum, self.size = file, checksum(), 0
        self._side: ThreadPoolExecutor | None = None
        self._syncing: Future[None] | None = None
        self._unsynced = 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._sum.update(view)
        self._file.write(view)
        self.size += len(view)
        self._unsynced += len(view)
        if self._unsynced >= _FLUSH and (self._syncing is None or self._syncing.done()):
            self.sync_beside()
        return len(view)

    def sync(self) -> None:
        if self._syncing:
            self._syncing.result()
        self._file.sync()

    def close(self) -> None:
        if self._side:
            self._side.shutdown()
        self._file.close()

    def finish(self) -> None:
        """On the disk, and closed in any case."""
        with contextlib.closing(self):
            self.sync()

    def seal(self) -> tuple[int, str]:
        return self.size, self._sum.hexdigest()

    def sync_beside(self) -> None:
        """What was written so far goes to the disk while others go on; a small file is as well synced at its end."""
        if self._unsynced < _WORTH_IT:
            return
        if self._syncing:
            self._syncing.result()  # what the disk could not take is to be known now
        self._side = self._side or ThreadPoolExecutor(1)
        self._syncing, self._unsynced = self._side.submit(self._file.flush), 0


class HashedReader:
    """What is read from it may be used for what is published only after it turned out to be right."""

    def __init__(self, file: ReadableFile, size: int, like: str = "") -> None:
        self._file, self._sum, self.size, self._done = file, checksum(like), size, 0

    def readinto(self, room: memoryview) -> int:
        """Fills it, but at the end of the file."""
        room = room.cast("B")
        count = self._file.readinto(room)
        self._sum.update(room[:count])
        self._done += count
        return count

    def read(self, count: int) -> bytes:
        data = bytearray(count)
        return bytes(data[: self.readinto(memoryview(data))])

    def finish(self) -> tuple[int, str]:
        """Size and checksum of the whole file; what nobody asked for is read now."""
        while self._done <= self.size and self.read(_PIECE):
            pass
        return self._done, self._sum.hexdigest()

"""The limit of every register: the same system calls in a plain loop, by one process or by many at once."""

import contextlib
import os
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

BYTES = 300  # about what a small register holds


class Bare:
    """Create, write, fsync, link, fsync the folder, remove: what one durable write-once name costs at least."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        for name in ("tmp", "names"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.drafts, self.names = str(folder / "tmp"), str(folder / "names")
        self.data = b"x" * BYTES

    def once(self) -> None:
        self.count += 1
        draft = f"{self.drafts}/{os.getpid()}.{self.count}"
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(handle, self.data)
        os.fsync(handle)
        os.close(handle)
        os.link(draft, f"{self.names}/{os.getpid()}.{self.count}")
        handle = os.open(self.names, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
        os.unlink(draft)


def together(folder: Path, processes: int, seconds: float) -> tuple[float, float]:
    """So many processes at once, each in a folder of its own: cycles per second of all, CPU ms of one cycle."""
    context = get_context("fork")
    with contextlib.ExitStack() as children:
        pipes = [children.enter_context(_child(context, folder / str(n), seconds)) for n in range(processes)]
        found = [pipe.recv() for pipe in pipes]
    count, cpu = (sum(column) for column in zip(*found, strict=True))
    return count / seconds, 1000 * cpu / count


@contextlib.contextmanager
def _child(context, folder: Path, seconds: float) -> Iterator[Connection]:  # type: ignore[no-untyped-def]
    mine, its = context.Pipe()
    process = context.Process(target=_cycle, args=(folder, seconds, its), daemon=True)
    process.start()
    try:
        yield mine
    finally:
        process.terminate()
        process.join()


def _cycle(folder: Path, seconds: float, answer: Connection) -> None:
    bare, began = Bare(folder), time.process_time()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        bare.once()
    answer.send((bare.count, time.process_time() - began))

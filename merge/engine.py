"""Merging: every tensor of a plan is read, merged and written block by block, several at a time."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from merge import output
from merge.donors import Stored
from merge.files import Wrong, bytes_of
from merge.group import Group, Rows
from merge.methods import METHODS
from merge.planning import Job

_FLUSH = 64 << 20  # bytes after which the disk is asked to begin writing
Progress = Callable[[int], None]


@dataclass(frozen=True)
class How:
    """What does not change the result."""

    threads: int = 0  # tensors that are merged at a time; 0: as many as there are processors
    memory: int = 256 << 20  # how much may be kept of what a method looks at more than once
    device: str = "cpu"
    seed: int = 0  # but for random drops
    dtype: torch.dtype | None = None  # of inputs, before the arithmetic

    @property
    def workers(self) -> int:
        return self.threads or max(2, len(os.sched_getaffinity(0)))


def check_device(name: str) -> None:
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise Wrong(f"the device {name} cannot be used here: {str(error).splitlines()[0]}") from None


def merged(job: Job, how: How, kept: "Kept | None" = None) -> Iterator[Tensor]:
    """The blocks of a tensor, one after the other, in fp32."""
    kept = kept or Kept(0)
    with kept.room_for(job) as keep:
        others = [keep(_cast(each, how.dtype)) for each in job.others]
        base = keep(_cast(job.base, how.dtype)) if job.base else None
        group = Group(job.shape, others, base, job.name, job.models, how.seed, how.device)
        yield from METHODS[job.method].merge(group, job.params)


def write(jobs: list[Job], folder: Path, shard_size: int, how: How, progress: Progress) -> None:
    """All tensors into the folder's files. The largest first, so that no thread is left with one at the end."""
    kept = Kept(how.memory)
    with output.laid_out(folder, output.shards(jobs, shard_size)) as (files, places), one_thread_each():
        flusher = Flusher(files)
        stop = threading.Event()

        def make(job: Job) -> None:
            place = places[job.name]
            fd, begin = files[place.file], place.begin
            for data in _bytes(job, how, kept):
                if stop.is_set():
                    return
                begin += _written(fd, data, begin)
                progress(len(data))
            flusher.written(job.bytes)

        with flusher, ThreadPoolExecutor(how.workers, "merge") as pool:
            futures = [pool.submit(make, job) for job in sorted(jobs, key=lambda job: -job.bytes)]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise


def _bytes(job: Job, how: How, kept: "Kept") -> Iterator[memoryview]:
    if not job.method:
        yield bytes_of(job.others[0].read().contiguous())
        return
    for block in merged(job, how, kept):
        yield bytes_of(block.to(job.dtype).cpu().contiguous())


def _written(fd: int, data: memoryview, begin: int) -> int:
    left = data
    while left:
        count = os.pwrite(fd, left, begin)
        left, begin = left[count:], begin + count
    return len(data)


def _cast(stored: Stored, dtype: torch.dtype | None) -> Stored:
    if dtype is None:
        return stored
    return replace(stored, dtype=dtype, rows=lambda begin, end: stored.rows(begin, end).to(dtype))


class Kept:
    """Keeps the rows of tensors that are read more than once, as far as the memory for that goes."""

    def __init__(self, bytes: int) -> None:
        self.free, self._lock = bytes, threading.Lock()

    @contextmanager
    def room_for(self, job: Job) -> Iterator[Callable[[Stored], Rows]]:
        need = sum(each.bytes for each in (*job.others, *([job.base] if job.base else [])))
        with self._lock:
            fits = need <= self.free and METHODS[job.method].looks > 1
            self.free -= need if fits else 0
        try:
            yield _remembered if fits else (lambda stored: stored.rows)
        finally:
            with self._lock:
                self.free += need if fits else 0


def _remembered(stored: Stored) -> Rows:
    known: dict[int, Tensor] = {}

    def rows(begin: int, end: int) -> Tensor:
        if begin not in known:
            known[begin] = stored.rows(begin, end)
        return known[begin]

    return rows


class Flusher:
    """Has the disk write while the processors still work, so that the last fsync has little left to do."""

    def __init__(self, files: list[int]) -> None:
        self.files, self.waiting, self.over = files, 0, False
        self.error: OSError | None = None  # the system tells each error of a disk only once
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="flusher", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        with self._change:
            self.over = True
            self._change.notify()
        self._thread.join()
        if self.error:
            raise self.error

    def written(self, bytes: int) -> None:
        with self._change:
            self.waiting += bytes
            self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self.over or self.waiting >= _FLUSH)
                if self.over:
                    return
                self.waiting = 0
            try:
                for file in self.files:
                    os.fdatasync(file)
            except OSError as error:
                self.error = error
                return


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Several tensors are merged at a time: none of them needs several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

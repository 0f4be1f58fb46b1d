"""Merging: every tensor of a plan is read, merged and written block by block, several at a time."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from merge import weight_files
from merge.merge_planning import TensorJob
from merge.methods import METHODS
from merge.tensor_files import UserError, bytes_of
from merge.tensor_group import Group

_FLUSH = 64 << 20  # bytes after which the disk is asked to begin writing
Progress = Callable[[int], None]


@dataclass(frozen=True)
class MergeOptions:
    """How it is done; of the result, only random drops depend on it."""

    threads: int = 0  # tensors that are merged at a time; 0: as many as there are processors, at least two
    device: str = "cpu"
    seed: int = 0

    @property
    def workers(self) -> int:
        return self.threads or max(2, len(os.sched_getaffinity(0)))


def check_device(name: str) -> None:
    try:
        torch.zeros(1, device=name).cpu()  # "meta" has no numbers
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"the device {name} cannot be used here: {str(error).splitlines()[0]}") from None


def merged(job: TensorJob, how: MergeOptions) -> Iterator[Tensor]:
    """The blocks of a tensor, one after the other, in fp32. A method that looks twice reads twice: the second time the
    system still has it in its memory."""
    base, others = job.base.read_rows if job.base else None, [each.read_rows for each in job.others]
    group = Group(job.shape, others, base, job.name, job.models, how.seed, how.device)
    try:
        yield from METHODS[job.method].load()(group, job.params or {})
    finally:
        for each in job.inputs:
            each.done()


def write(jobs: Sequence[TensorJob], folder: Path, shard_size: int, how: MergeOptions, progress: Progress) -> list[str]:
    """All tensors into a model's files; the names of those with NaN or infinite numbers."""
    files = weight_files.shards(jobs, shard_size)
    broken = write_files(files, folder, how, progress)
    weight_files.write_index(folder, files)
    return broken


def write_files(
    files: Sequence[weight_files.WeightFile], folder: Path, how: MergeOptions, progress: Progress
) -> list[str]:
    """The same into files that somebody has named. The largest tensors come first, so that no thread is left with one
    at the end."""
    stop, broken = threading.Event(), set[str]()
    jobs = [job for each in files for job in each.jobs.values()]
    with (
        weight_files.laid_out(folder, files) as places,
        flushed({file for file, _ in places.values()}) as written,
        one_thread_each(),
    ):

        def make(job: TensorJob) -> None:
            file, begin = places[job.name]
            for block, good in rounded(job, how):
                if stop.is_set():
                    return
                if not good:
                    broken.add(job.name)
                data = bytes_of(block.cpu().contiguous())
                begin += _pwrite(file, data, begin)
                progress(len(data))
            written(job.bytes)

        with ThreadPoolExecutor(how.workers, "merge") as pool:
            futures = [pool.submit(make, job) for job in sorted(jobs, key=lambda job: -job.bytes)]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    return sorted(broken)


def fill(jobs: list[TensorJob], tensors: Mapping[str, Tensor], how: MergeOptions) -> list[str]:
    """All tensors into others that are in memory already, rounded as in files; the names of those with bad numbers."""
    broken = set[str]()

    @torch.no_grad()
    def make(job: TensorJob) -> None:
        place, begin = tensors[job.name].view(-1), 0
        for block, good in rounded(job, how):
            place[begin : begin + block.numel()].copy_(block.view(-1))
            begin += block.numel()
            if not good:
                broken.add(job.name)

    with one_thread_each(), ThreadPoolExecutor(how.workers, "merge") as pool:
        list(pool.map(make, sorted(jobs, key=lambda job: -job.bytes)))  # which raises what went wrong
    return sorted(broken)


def rounded(job: TensorJob, how: MergeOptions) -> Iterator[tuple[Tensor, bool]]:
    """A tensor's blocks as in files, and whether all of their numbers are good."""
    if not job.method:
        yield job.others[0].read().to(job.dtype), True
        return
    for block in merged(job, how):
        yield block.to(job.dtype), fits(block, job.dtype)


def fits(block: Tensor, dtype: torch.dtype) -> bool:
    """Whether all its numbers are finite, and stay so in this dtype."""
    (low, high), most = block.aminmax(), torch.finfo(dtype).max
    return bool(-most <= low and high <= most)


def _pwrite(fd: int, data: memoryview, begin: int) -> int:
    left = data
    while left:
        count = os.pwrite(fd, left, begin)
        left, begin = left[count:], begin + count
    return len(data)


@contextmanager
def flushed(files: set[int]) -> Iterator[Callable[[int], None]]:
    """Has the disk write while the processors still work, so that the last fsync has little left to do. It is told how
    many bytes were written."""
    waiting, change, syncs = 0, threading.Lock(), list[Future[None]]()

    def sync() -> None:
        for file in files:
            os.fdatasync(file)

    def written(bytes: int) -> None:
        nonlocal waiting
        with change:
            waiting += bytes
            if waiting >= _FLUSH and all(each.done() for each in syncs):
                for each in syncs:
                    each.result()  # the system tells each error of a disk only once
                syncs[:], waiting = [side.submit(sync)], 0

    with ThreadPoolExecutor(1, "flusher") as side:
        yield written
    for each in syncs:
        each.result()


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Several tensors are merged at a time: none of them needs several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

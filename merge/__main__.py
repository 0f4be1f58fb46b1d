"""Merge models by a recipe: mergekit's YAML in, a Hugging Face folder out.

    python -m merge recipe.yml merged-model
    python -m merge recipe.yml merged-model --shard-size 2GB --threads 8 --overwrite
    python -m merge recipe.yml merged-model --device cuda --seed 7

A recipe:

    merge_method: slerp
    base_model: org/model-a
    models:
      - model: org/model-a
      - model: ./model-b
    parameters:
      t: [0, 0.5, 1]        # over the layers
    dtype: bfloat16

docs/merging.md explains all methods and their parameters.
"""

import contextlib
import ctypes
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, validators

from fleet.wrong import Wrong

app = App(name="python -m merge", help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def main(
    recipe: Path,
    out: Path,
    *,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    shard_size: str = "5GB",
    threads: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    device: str = "cpu",
    seed: int = 0,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Merge.

    Parameters
    ----------
    recipe:
        The recipe, a YAML file.
    out:
        The folder to make.
    overwrite:
        Replace the folder if it exists.
    shard_size:
        The most bytes of a weight file.
    threads:
        Tensors that are merged at a time; 0: as many as there are processors.
    device:
        Where the arithmetic is done: cpu, cuda, cuda:1, mps.
    seed:
        Of random drops, in dare and della.
    quiet:
        No progress.
    """
    from merge import output  # after --help: it needs torch
    from merge.engine import How
    from merge.merging import merge

    keep_memory()
    open_many()
    how, size = How(threads, device, seed), output.size_of(shard_size)
    with bar(quiet) as progress:
        took = merge(recipe, out, shard_size=size, overwrite=overwrite, how=how, progress=progress)
    for note in took.notes:
        print(f"Note: {note}.")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    speed = (took.read + took.written) / took.seconds / 1e9
    print(
        f"{out}: {took.written / 1e9:.2f} GB of {took.read / 1e9:.2f} GB in {took.seconds:.1f} s, "
        f"{speed:.2f} GB/s read and written, peak memory {peak / 1e6:.0f} MB"
    )


def keep_memory() -> None:
    """Blocks come and go; giving their memory back to the system each time would cost as much as the arithmetic. All
    threads take them from one heap: what one of them has done with is there for the others."""
    with contextlib.suppress(OSError, AttributeError):
        libc, trim_threshold, mmap_threshold, heaps = ctypes.CDLL("libc.so.6"), -1, -3, -8
        libc.mallopt(heaps, 1)
        libc.mallopt(trim_threshold, 1 << 28)
        libc.mallopt(mmap_threshold, 1 << 28)


def open_many() -> None:
    """Every shard of every model is open at once; the usual limit of 1,024 files may be raised without asking."""
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def bar(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Progress by bytes, where somebody looks."""
    if quiet or not sys.stderr.isatty():
        yield lambda bytes, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("merging", total=None)
        yield lambda bytes, total: progress.update(task, advance=bytes, total=total)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """By a signal."""


def stop(number: int, _frame: object) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # once is enough: what has been written is being removed
    raise Stopped(number)


def run() -> int:
    for each in SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:  # nohup, and jobs in the background of a script
            signal.signal(each, stop)
    try:
        app()
    except Stopped as stopped:
        print("\nInterrupted; nothing is left behind.", file=sys.stderr)
        return 128 + stopped.args[0]
    except (Wrong, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(run())

"""What commands that write models have in common: memory, files, progress, and how they end."""

import contextlib
import ctypes
import resource
import signal
import sys
from collections.abc import Callable, Iterator

from fleet.errors import UserError
from fleet.plain import say


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
def bar(quiet: bool, what: str = "merging") -> Iterator[Callable[[int, int], None]]:
    """Progress by bytes, where somebody looks."""
    if quiet or not sys.stderr.isatty():
        yield lambda bytes, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from fleet.console import console

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr)) as progress:
        task = progress.add_task(what, total=None)
        yield lambda bytes, total: progress.update(task, advance=bytes, total=total)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """By a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop(number: int, _frame: object) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # once is enough: what has been written is being removed
    raise Terminated(number)


def run(app: Callable[[], object]) -> int:
    """A command to its end, or until it is told to stop; the code to end with."""
    before = {each: signal.getsignal(each) for each in SIGNALS}
    for each, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup, and jobs in the background of a script
            signal.signal(each, stop)
    try:
        return _ended(app)
    except Terminated as stopped:
        before = {}  # told once is enough, until the process has ended
        say(f"\nInterrupted; {_left(stopped) or 'nothing is left behind'}.", file=sys.stderr)
        return 128 + stopped.number
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _ended(app: Callable[[], object]) -> int:
    try:
        app()
    except (UserError, OSError) as error:
        say(*filter(None, (error, _left(error))), sep="; ", file=sys.stderr)
        return 2
    return 0


def _left(error: BaseException) -> str:
    """What was told of that lies there now, for the next time."""
    return "; ".join(getattr(error, "__notes__", ()))

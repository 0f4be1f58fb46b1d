"""What the store and the loop cost: `python -m benchmarks.store [--only PART ...] [--quick] [--dir DIR]`."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console

from benchmarks.figures import SEVERAL
from benchmarks.publishing import publishing
from benchmarks.registers import registers
from benchmarks.scaling import scaling
from benchmarks.straggler import straggler
from benchmarks.waiting import delay, idle
from fleet.run import mount_of

PARTS = {
    "registers": registers,
    "publishing": publishing,
    "delay": delay,
    "idle": idle,
    "scaling": scaling,
    "straggler": straggler,
}

ABOUT = """Measure the store and the worker loop, each figure beside its limit on the same disk in the same run.

python -m benchmarks.store                             everything, about ten minutes

python -m benchmarks.store --quick                     smaller sizes, about two minutes

python -m benchmarks.store --only registers scaling    these parts alone

python -m benchmarks.store --dir /mnt/shared           on another disk
"""

Part = Literal["registers", "publishing", "delay", "idle", "scaling", "straggler"]
app = App(name="python -m benchmarks.store", help=ABOUT, version_flags=[])


@app.default
def main(
    *,
    only: Annotated[tuple[Part, ...], SEVERAL] = (),
    quick: Annotated[bool, Parameter(negative=())] = False,
    dir: Path = Path("."),
) -> None:
    """Measure.

    Parameters
    ----------
    only
        The parts to measure; all by default.
    quick
        Smaller sizes and shorter times.
    dir
        A folder on the disk to measure; a temporary folder is made in it and removed at the end.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(width=None if sys.stdout.isatty() else 140)
    with _place(dir) as place:
        console.print(f"{mount_of(place)}, {os.cpu_count()} cores, {'quick' if quick else 'full'} sizes\n")
        for name in PARTS:
            if not only or name in only:
                with console.status(name):
                    shown = PARTS[name](place, quick)
                console.print(shown, "")


@contextmanager
def _place(where: Path) -> Iterator[Path]:
    """A temporary folder, which also holds what a starter would remember in this user's home."""
    place = Path(tempfile.mkdtemp(prefix="benchmark-", dir=where.absolute()))
    os.environ["XDG_STATE_HOME"] = str(place / "state")
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)

"""Equal slices of this machine's processors, by control groups: each process with a share of its own."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_PERIOD = 10_000  # microseconds: a slower processor, rather than one that stops again and again


@contextlib.contextmanager
def sliced(pids: Sequence[int], cores: float) -> Iterator[str]:
    """So many cores for each of these processes and their children; says why not, where groups cannot be made."""
    made, quota = list[Path](), round(cores * _PERIOD)
    old = (ROOT / "cpu").is_dir()  # version 1
    try:
        for pid in pids:
            group = ROOT / ("cpu" if old else "") / f"benchmark-{os.getpid()}-{pid}"
            group.mkdir()
            made.append(group)
            if old:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
            (group / "cgroup.procs").write_text(str(pid))
        why = ""
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
    try:
        yield why
    finally:
        for group in made:
            with contextlib.suppress(OSError):  # somebody in it is still ending
                group.rmdir()

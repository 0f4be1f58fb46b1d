"""`python -m fleet.ancestry RUN_DIR`: a run's family tree as ancestry.json, ancestry.png and genome.png."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from fleet import faults
from fleet.ancestry.files import GENOME, files, keep, leave
from fleet.ancestry.tree import tree
from fleet.config import Wrong
from fleet.disk import Disk
from fleet.history import History
from fleet.host import Host
from fleet.recipe import NotYet
from fleet.run import open_run


def draw(
    run_dir: Path,
    *,
    out: Annotated[Path | None, Parameter(help="A folder for the files; RUN_DIR by default.")] = None,
) -> None:
    """Write the family tree of a run, finished or not: who descends from whom, and how the genome changed.

    For example: python -m fleet.ancestry runs/edt --out pictures
    """
    run_dir = run_dir.absolute()
    store, _ = open_run(run_dir, Host(), "ancestry")
    history = History(store)
    with contextlib.suppress(NotYet, faults.Passing):  # what is not visible yet is not in the picture
        history.look_far()
    if not (grown := tree(history)).nodes:
        raise Wrong(f"{run_dir}: no model is finished yet, so there is no family tree to draw")
    written = leave(_folder(out), files(grown, run_dir.name)) if out else keep(history)
    print(*written, sep="\n")
    if all(file.name != GENOME for file in written):
        print(f"No {GENOME}: no member of this run has a genome")


def _folder(out: Path) -> Disk:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Wrong(f"--out {out}: cannot be made: {error.strerror}") from None
    return Disk(out)


if __name__ == "__main__":
    try:
        App(name="python -m fleet.ancestry", help=draw.__doc__, version_flags=[], default_command=draw)()
    except (Wrong, faults.Fault) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None

"""`python -m fleet.ancestry RUN_DIR`: a run's family tree as ancestry.json and ancestry.html."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from fleet import faults
from fleet.ancestry.ancestry_files import files, keep
from fleet.ancestry.growth import tree
from fleet.config import UserError
from fleet.history import opened
from fleet.plain import say


def draw(
    run_dir: Path,
    *,
    out: Annotated[Path | None, Parameter(help="A folder for the files; RUN_DIR by default.")] = None,
) -> None:
    """Write the family tree of a run, finished or not: who descends from whom, and how the genome changed.

    For example: python -m fleet.ancestry runs/edt --out family
    """
    history = opened(run_dir.absolute())
    if not (grown := tree(history)).nodes:
        raise UserError(f"{run_dir}: no model is finished yet, so there is no family tree to draw")
    written = _elsewhere(out, files(grown, run_dir.absolute().name)) if out else keep(history)
    say(*written, sep="\n")


def _elsewhere(out: Path, made: dict[str, bytes]) -> list[Path]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, data in made.items():
            (out / file).write_bytes(data)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written: {error.strerror}") from None
    return [out / file for file in made]


if __name__ == "__main__":
    try:
        App(name="python -m fleet.ancestry", help=draw.__doc__, version_flags=[], default_command=draw)()
    except (UserError, faults.Fault) as error:
        say(error, file=sys.stderr)
        raise SystemExit(2) from None

"""`python -m fleet.ancestry RUN_DIR`: a run's family tree as ancestry.json and ancestry.html."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fleet.ancestry.ancestry_files import files, write_family_tree
from fleet.ancestry.tree_builder import tree
from fleet.history import opened
from fleet.plain import say
from fleet.run_config import UserError
from fleet.single_command import command


def draw(
    run_dir: Path,
    *,
    out: Annotated[Path | None, Parameter(help="A folder for the files; RUN_DIR by default.")] = None,
) -> None:
    """Write the family tree of a run, finished or not: who descends from whom, and how the genome changed.

    For example:

        python -m fleet.ancestry runs/edt --out family
    """
    history = opened(run_dir)
    if not (grown := tree(history)).nodes:
        raise UserError(f"{run_dir}: no model is finished yet, so there is no family tree to draw")
    written: Sequence[object] = (
        _elsewhere(out, files(grown, history.store.root.name)) if out else write_family_tree(history)
    )
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
    command("fleet.ancestry", draw)

"""A finished model as an ordinary Hugging Face folder: `python -m train.export RUN_DIR --what average --out DIR`."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fleet import faults
from fleet.errors import UserError, absolute
from fleet.helping import app
from fleet.host import Host
from fleet.plain import say
from fleet.recipe import NotYet
from fleet.run import open_run


def export(
    run_dir: Path,
    *,
    what: Annotated[
        str,
        Parameter(help="average, best, or a member such as 12-m3. By default the average; of post-training the best."),
    ] = "",
    out: Annotated[Path | None, Parameter(help="Where to; RUN_DIR/export by default.")] = None,
    overwrite: Annotated[bool, Parameter(help="Into a folder that has files already.", negative="")] = False,
) -> None:
    """Write a model of a run as a Hugging Face folder, at the end or any time before.

    For example:

        python -m train.export runs/edt --what best --out my-model
    """
    if out and absolute(out) and not overwrite and out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out}: exists; --overwrite writes into it")
    out = out or run_dir / "export"
    if open_run(run_dir, Host(), "export")[1]["config"].get("algorithm") == "edt-evomerge":
        from train.posttrain_results import taken  # after --help: it needs torch

        taken(run_dir, what, out)
    else:
        from train.exporter import Exporter, show

        show(Exporter(run_dir), what or "average", out)


def main() -> None:
    try:
        app("python -m train.export", export.__doc__, default_command=export)()
    except NotYet as what:
        say(f"{what} is not finished yet; the run is too young to be exported", file=sys.stderr)
        raise SystemExit(2) from None
    except (UserError, faults.Fault, KeyError, ValueError) as error:
        say(*error.args, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

"""A finished model as a Hugging Face folder, and to the hub: `python -m train.export RUN --push org/name`."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from fleet import faults
from fleet.busy_notice import loading
from fleet.errors import UserError, absolute
from fleet.help_pages import app
from fleet.history import opened
from fleet.host import Host
from fleet.places import beside
from fleet.plain import say
from fleet.recipe import NotYet
from fleet.run import open_run

# What other runs write at their end: a model's folder, in the run's.
_WINNERS = {"evomerge": "winner", "merge-search": "final_model"}


def export(
    run: Path,
    *,
    what: Annotated[
        str,
        Parameter(help="average, best, or a member such as 12-m3. By default the average; of post-training the best."),
    ] = "",
    out: Annotated[Path | None, Parameter(help="Where to; RUN_DIR/export by default, or NAME/export.")] = None,
    overwrite: Annotated[bool, Parameter(help="Into a folder that has files already.", negative="")] = False,
    push: Annotated[str, Parameter(help="Then to this model of the hub, as org/name; private, if it is new.")] = "",
    public: Annotated[bool, Parameter(help="With --push: for everybody to see.", negative="")] = False,
) -> None:
    """Write a model of a run as a Hugging Face folder, at the end or any time before; and send it to the hub. RUN is a
    run's folder, or with --push a finished model's.

    For example:

        python -m train.export runs/edt --what best --out my-model
        python -m train.export runs/edt --push org/name
        python -m train.export merged-model --push org/name
    """
    if public and not push:
        raise UserError("--public is for --push org/name")
    if push:
        from merge import hub

        hub.may_push(push)
    folder = _made(run, what, out, overwrite, bool(push))
    if push:
        say(f"Sending {folder} to {push} ...")
        revision = hub.push(folder, push, public)
        say(f"{push} has it. To begin with it, or to merge it: {push}@{revision}")


def _made(run: Path, what: str, out: Path | None, overwrite: bool, ready: bool) -> Path:
    """The model's folder. One that is there already is only sent."""
    its = any(os.path.isfile(run / name) for name in ("config.json", "adapter_config.json"))
    if ready and its and not os.path.isfile(run / "run.json"):
        if what or out:
            raise UserError(f"{run}: a model's folder; --what and --out are for runs")
        return run
    if out and absolute(out) and not overwrite and out.is_dir() and any(out.iterdir()):
        raise UserError(f"{out}: exists; --overwrite writes into it")
    algorithm = str(open_run(run, Host(), "export")[1]["config"].get("algorithm"))
    if algorithm in _WINNERS:
        return _winner(run, algorithm, what, out, ready)
    out = out or beside(run) / "export"
    if algorithm in ("edt-evomerge", "es"):
        _late("posttrain_results").taken(run, what, out)
    elif algorithm.endswith("-loop"):
        _late("own_loop.loop_export").exported(run, what, out)
    else:
        late = _late("pretraining_export")
        late.show(late.Exporter(run), what or "average", out)
    return out


def _late(module: str) -> Any:
    """After --help: it needs torch."""
    with loading("what exports the model", say):
        return importlib.import_module(f"train.{module}")


def _winner(run: Path, algorithm: str, what: str, out: Path | None, ready: bool) -> Path:
    folder = beside(run) / _WINNERS[algorithm]
    if not (folder / "config.json").is_file():
        more = "; --save-final-model writes it" if algorithm == "merge-search" else ""
        raise UserError(f"{folder}: there is no model yet{more}")
    if what or out or not ready:
        raise UserError(f"{folder} is the model of this run; --push org/name sends it to the hub")
    from train.model_card import complete

    complete(folder, opened(run))
    return folder


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

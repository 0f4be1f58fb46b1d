"""Configurations that come along: `edt --preset tiny`; to edit it, `python -m fleet.presets tiny > evolution.json`."""

import json
from pathlib import Path

from fleet.errors import UserError
from fleet.our_packages import ROOT, presets_in
from fleet.plain import say
from fleet.run_config import read_json
from fleet.single_command import command

BASE_DIR = "runs"  # a preset's runs lie in the folder where somebody is


def known() -> dict[str, Path]:
    return {file.stem: file for file in presets_in(ROOT)}


def file_of(name: str) -> Path:
    if name not in known():
        raise UserError(f"--preset {name}: there is no such one; there are {', '.join(known())}")
    return known()[name]


def show(name: str = "", /) -> None:
    """Print a preset, to be saved as evolution.json and edited; without a name, say which there are.

    For example:

        python -m fleet.presets 150m > evolution.json
    """
    if not name:
        say(*known(), sep="\n")
        return
    say(json.dumps({**read_json(file_of(name)), "BASE_DIR": BASE_DIR}, indent=2))


if __name__ == "__main__":
    command("fleet.presets", show)

"""Where our code lies, in a clone or installed among other packages, and what its console commands are called."""

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

NAME = "edt"
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("evomerge", "fleet", "merge", "train")
SCRIPTS = ("diloco", "diloco_sim", "edt", "edt_es", "edt_evomerge", "edt_sim", "launch_to_machines", "own_loop_join")
# Console commands by the modules that they run, as pyproject.toml has them.
COMMANDS: Mapping[str, str] = {
    "diloco": "diloco",
    "edt": "edt",
    "evomerge.cli": "evomerge",
    "fleet.fork": "fleet-fork",
    "fleet.report": "fleet-report",
    "fleet.status": "fleet-status",
    "launch_to_machines": "launch-to-machines",
    "merge.evolve": "merge-evolve",
    "merge": "merge-models",
    "train.export": "train-export",
    "train.finetune": "train-finetune",
}


PRESETS = "fleet/preset_files"  # where setup.py puts the clone's configurations


def in_clone() -> bool:
    """Or in a copy of one; else it is installed."""
    return (ROOT / "pyproject.toml").is_file()


@cache
def installed() -> Distribution | None:
    """What the installer noted of the very code that runs; nothing where it was not installed, or only linked to."""
    try:
        found = distribution(NAME)
    except PackageNotFoundError:
        return None
    mine = Path(__file__).resolve()
    return found if Path(str(found.locate_file("fleet/our_packages.py"))).resolve() == mine else None


def files() -> list[str]:
    """As the installer noted them, but for its own, commands, and what Python compiles: names below ROOT."""
    found = installed()
    names = [file for file in (found.files or ()) if file.suffix != ".pyc"] if found else []
    return [str(file) for file in names if file.parts[0] != ".." and not file.parts[0].endswith(".dist-info")]


def pins() -> list[str]:
    """The lines of requirements.txt, where it is not here itself."""
    found = installed()
    return [line for line in (found.requires or ()) if ";" not in line] if found else []


def python_in(root: Path) -> list[Path]:
    """What makes results: our packages, and the scripts beside them; in site-packages there are others', too."""
    alone = [file for name in SCRIPTS if (file := root / f"{name}.py").is_file()]
    return sorted([*alone, *(file for name in PACKAGES for file in (root / name).rglob("*.py"))])


def presets_in(root: Path) -> list[Path]:
    """Configurations that come along, in a clone or where it was installed."""
    return sorted((root / ("configs" if (root / "configs").is_dir() else PRESETS)).glob("*.json"))


# -- how somebody calls a module of ours -------------------------------------------------------------------------------


def console_command() -> str:
    """The one that is running; empty where a module or a script was given to Python."""
    given = Path(sys.argv[0]).name
    return given if given in COMMANDS.values() else ""


def spoken(module: str) -> list[str]:
    """What to type for a module: its console command where there is no clone, and where somebody uses these."""
    if module in COMMANDS and (console_command() or not in_clone()):
        return [COMMANDS[module]]
    return ["python", f"{module}.py"] if (ROOT / f"{module}.py").is_file() else ["python", "-m", module]

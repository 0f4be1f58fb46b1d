"""Start the run that evolution.json describes on every machine of machines.json, and look after it.

The machines share one disk; SSH and Python are all that they need beside it. Workers go on when this command ends.
"""

from pathlib import Path

from fleet.remote.commands import main

METHOD_SCRIPTS = {
    "edt": ("edt.py", "--algorithm", "edt"),
    "edt-evomerge": ("edt.py", "--algorithm", "edt-evomerge"),
    "diloco": ("diloco.py",),
    "merge-search": ("-m", "merge.evolve"),
    "evomerge": ("-m", "evomerge.cli"),
    "es": ("edt.py", "--algorithm", "es"),
}


def command() -> None:
    main(METHOD_SCRIPTS, Path(__file__).parent, __doc__)


if __name__ == "__main__":
    command()

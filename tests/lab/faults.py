"""A machine whose view of the shared disk has misfortunes, of which the others notice nothing."""

import ctypes.util
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tests.lab.luck import Rule
from tests.lab.machine import Machine

LIBRARY = ctypes.util.find_library("fuse3")  # version 2 writes 4 KiB at a time
PROJECT = Path(__file__).resolve().parents[2]
BACKING, CONTROL = "/run/backing", "/run/faults.json"


def why_not() -> str:
    """Why there can be no such disk here, where there can be a lab; empty if there can."""
    if not (importlib.util.find_spec("mfusepy") and LIBRARY and os.path.exists("/dev/fuse")):
        return "misfortunes of the shared disk need mfusepy, Debian's fuse3, and /dev/fuse"
    return ""


class Faults:
    """Of one machine's shared disk, until its next boot; none at first. Only what starts later meets them."""

    def __init__(self, machine: Machine) -> None:
        self._machine, shared = machine, machine.lab.shared
        self.are()
        machine.do(f"mkdir {BACKING} /run/empty; mount --bind {shared} {BACKING}; mount --bind /run/empty {shared}")
        program = f"FUSE_LIBRARY_PATH={LIBRARY} {sys.executable} -m tests.lab.faultfs {BACKING} {shared} {CONTROL}"
        serves = f"{program} >/run/faults.log 2>&1 && ls {shared} && grep -q ^faultfs /proc/mounts"
        machine.do(f"cd {PROJECT}; {serves} || (cat /run/faults.log >&2; exit 1)")

    def are(self, *rules: Rule, absent: float = 0, stale: float = 0, listing: float = 0, seed: int = 0) -> None:
        """The misfortunes from now on, as luck.py explains them."""
        said = {"absent": absent, "stale": stale, "listing": listing, "seed": seed, "rules": [*map(asdict, rules)]}
        control = self._machine.root / CONTROL[1:]
        draft = control.with_suffix(".draft")
        draft.write_text(json.dumps(said))
        draft.rename(control)

    def struck(self) -> list[str]:
        """The calls that met one, such as "write /runs/x": on which a test has to insist."""
        log = self._machine.root / f"{CONTROL[1:]}.struck"
        return log.read_text().splitlines() if log.exists() else []

"""Which code this is: its commit, as git says, or as it was noted when the code was installed."""

import os
import subprocess
import tomllib
from pathlib import Path

from fleet.our_packages import NAME, ROOT, installed

NOTED = "fleet/commit.txt"  # setup.py writes it


def version_line() -> str:
    """What --version says."""
    return ", ".join(filter(None, (f"{NAME} {number()}", commit())))


def number() -> str:
    if found := installed():
        return found.version
    try:
        return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])
    except OSError:  # a copy of installed code, on another machine
        return ""


def code() -> str:
    """Which code a run was begun by."""
    return commit() or f"version {number()}"


def commit(root: Path = ROOT) -> str:
    """With a word where the code has changes; empty where nobody knows."""
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= with changes"]
    above = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent), "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(words, env=above, capture_output=True, text=True, timeout=20, check=True)
        return f"commit {done.stdout.strip()}"
    except (OSError, subprocess.SubprocessError):
        noted = root / NOTED
        return noted.read_text(encoding="utf-8").strip() if noted.is_file() else ""

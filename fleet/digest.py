"""One number for a whole run, `python -m fleet.digest RUN_DIR`: of every plan, metric, outcome and file. Equal numbers
mean equal bytes."""

import hashlib
from pathlib import Path

from fleet.history import History, opened
from fleet.places import address
from fleet.plain import say, several
from fleet.recipe import to_json
from fleet.single_command import command
from fleet.strictjson import text


def digest(history: History) -> str:
    """Of all finished rounds; history must have looked."""
    total = hashlib.sha256()
    for round in range(history.first_open):
        total.update(text([to_json(recipe) for recipe in history.plan(round)]).encode())
        for member in history.round(round):
            metrics, files = dict(member.metrics), dict(sorted(member.digests.items()))
            total.update(text([member.id, member.origin, metrics, files, member.absent]).encode())
    return total.hexdigest()


def show(run_dir: Path, /, *more: Path) -> None:
    """Say the digest of a run's finished rounds, and how many of them train; of several runs, a line each.

    For example:

        python -m fleet.digest runs/edt runs/edt-again
    """
    for folder in (run_dir, *more):
        history = opened(folder)
        state = "over" if history.over else "not over"
        say(f"{digest(history)}  {address(folder)}  ({several(max(0, history.first_open - 1), 'round')}, {state})")


if __name__ == "__main__":
    command("fleet.digest", show)

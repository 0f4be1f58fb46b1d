"""One number for a whole run: of every plan, metric, outcome and file. Equal numbers mean equal bytes."""

import hashlib

from fleet.history import History
from fleet.recipe import to_json
from fleet.strictjson import text


def digest(history: History) -> str:
    """Of all finished rounds; history must have looked."""
    total = hashlib.sha256()
    for round in range(history.first):
        plan = history.plan(round)
        total.update(text([to_json(recipe) for recipe in plan]).encode())
        for member in history.round(round):
            shown = [
                member.id,
                member.origin,
                dict(member.metrics),
                dict(sorted(member.digests.items())),
                member.absent,
            ]
            total.update(text(shown).encode())
    return total.hexdigest()

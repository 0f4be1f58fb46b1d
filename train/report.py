"""metrics.csv and loss.png: what the registers say, for people. Replaced whole; never read back but to see how far
they got."""

import contextlib
import csv
import io
from typing import Any

from fleet import faults
from fleet.history import History
from fleet.recipe import NotYet, name
from fleet.store import Store

TABLE, PICTURE = "metrics.csv", "loss.png"
_FIRST = ["round", "slot", "loss", "perplexity", "train_loss", "tokens", "seconds", "by"]


def keep(history: History) -> None:
    """Write the table afresh if rounds have been finished since it was written."""
    with contextlib.suppress(faults.Fault, NotYet):
        if _written(history.store) < history.first - 1:
            table = _table(rows(history))
            if len(table) <= 1 << 26:
                history.store.replace(TABLE, table.encode())


def rows(history: History) -> list[dict[str, Any]]:
    """A row for every member that has metrics, by round."""
    found = []
    for round in range(history.first):
        for recipe in history.plan(round):
            member = history[name(round, recipe.slot)]
            if "loss" in member.metrics or "train_loss" in member.metrics:
                outcome = history.outcome(member.origin)
                machine = {"seconds": f"{outcome.seconds:.3f}", "by": outcome.by}
                found.append({"round": round, "slot": recipe.slot, **member.metrics, **machine})
    return found


def picture(history: History) -> bool:
    """The loss over the rounds: each member's, and that of the averaged or global model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes, found = figure.add_subplot(), rows(history)
    single = [
        (row["round"], row["loss"]) for row in found if "loss" in row and row["slot"] not in ("average", "global")
    ]
    whole = [(row["round"], row["loss"]) for row in found if row["slot"] in ("average", "global")]
    if not single and not whole:
        return False
    if single:
        axes.plot(*zip(*single, strict=True), ".", color="tab:gray", alpha=0.6, label="each member")
    if whole:
        axes.plot(*zip(*whole, strict=True), "-o", color="tab:blue", label="averaged model")
    axes.set(xlabel="round", ylabel="loss on held-out text")
    axes.legend()
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    history.store.replace(PICTURE, data.getvalue())
    return True


def _table(found: list[dict[str, Any]]) -> str:
    more = sorted({key for row in found for key in row} - {*_FIRST})
    text = io.StringIO()
    writer = csv.DictWriter(text, [*_FIRST, *more], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def _written(store: Store) -> int:
    """The last round that the table has."""
    with contextlib.suppress(faults.Missing, ValueError, IndexError):
        last = store.disk.read(TABLE, 1 << 26).decode(errors="replace").rstrip().rpartition("\n")[2]
        return int(last.split(",")[0])
    return -1

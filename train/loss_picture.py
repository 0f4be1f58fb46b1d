"""The curve of a run, for whoever looks at it afterwards: loss.png, and an SVG for a model's card."""

import io
from typing import TYPE_CHECKING

from fleet.history import History
from fleet.recipe import Member

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "loss.png"
MEASURES = {"loss": "loss on held-out text, nats a token", "fitness": "fitness", "score": "score"}
Points = list[tuple[int, float]]


def picture(history: History) -> bool:
    """The loss over the rounds: each member's, and that of the averaged or global model."""
    if not (figure := drawn(history, "loss")):
        return False
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    history.store.replace(PICTURE, data.getvalue())
    return True


def curve(history: History) -> bytes:
    """The same as SVG, of whatever the run measures; the same bytes for the same run. Empty where nothing was."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "curve"}):
        figure = next(filter(None, (drawn(history, measure) for measure in MEASURES)), None)
        data = io.BytesIO()
        if figure:
            figure.savefig(data, format="svg", metadata={"Date": None})
        return data.getvalue()


def drawn(history: History, measure: str) -> "Figure | None":
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    found = [(n, each) for n in range(history.first_open) for each in history.round(n) if measure in each.metrics]
    members = [(n, each) for n, each in found if each.recipe.role != "summary" and each.recipe.args.get("on") != "test"]
    single, whole = (_points(some, measure) for some in (members, [e for e in found if e[1].recipe.role == "summary"]))
    if not single + whole:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    if single:
        axes.plot(*zip(*single, strict=True), ".", color="tab:gray", alpha=0.6, label="each member (validation)")
    if whole:
        axes.plot(*zip(*whole, strict=True), "-o", color="tab:blue", label="averaged model (test)")
    axes.set(xlabel="round", ylabel=MEASURES[measure])
    if measure == "loss":
        _in_bits(axes, [each for _, each in found])
    axes.legend()
    return figure


def _points(found: list[tuple[int, Member]], measure: str) -> Points:
    return [(n, value) for n, each in found if isinstance(value := each.metrics[measure], (int, float))]


def _in_bits(axes: "Axes", found: list[Member]) -> None:
    """A second axis; of the test text, if there is some."""
    there = sorted(found, key=lambda each: each.recipe.role != "summary")
    known = (each.metrics for each in there if each.metrics["loss"] and "bits_per_byte" in each.metrics)
    if bits := next(known, None):
        share = bits["bits_per_byte"] / bits["loss"]
        both = (lambda loss: loss * share, lambda bits: bits / share)
        axes.secondary_yaxis("right", functions=both).set_ylabel("bits per byte")

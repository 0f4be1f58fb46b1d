"""What people look at afterwards: loss.png."""

import io

from fleet.history import History

PICTURE = "loss.png"


def picture(history: History) -> bool:
    """The loss over the rounds: each member's, and that of the averaged or global model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes, rounds = figure.add_subplot(), range(history.first_open)
    found = [(n, each) for n in rounds for each in history.round(n) if "loss" in each.metrics]
    single = [(n, each.metrics["loss"]) for n, each in found if each.recipe.role != "summary"]
    whole = [(n, each.metrics["loss"]) for n, each in found if each.recipe.role == "summary"]
    if not found:
        return False
    if single:
        axes.plot(*zip(*single, strict=True), ".", color="tab:gray", alpha=0.6, label="each member (validation)")
    if whole:
        axes.plot(*zip(*whole, strict=True), "-o", color="tab:blue", label="averaged model (test)")
    axes.set(xlabel="round", ylabel="loss on held-out text, nats a token")
    there = sorted((each for _, each in found), key=lambda each: each.recipe.role != "summary")
    known = (each.metrics for each in there if each.metrics["loss"] and "bits_per_byte" in each.metrics)
    if bits := next(known, None):
        share = bits["bits_per_byte"] / bits["loss"]  # of the test text, if there is some
        both = (lambda loss: loss * share, lambda bits: bits / share)
        axes.secondary_yaxis("right", functions=both).set_ylabel("bits per byte")
    axes.legend()
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    history.store.replace(PICTURE, data.getvalue())
    return True

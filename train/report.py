"""What people look at afterwards: loss.png, and the command that evaluates a model."""

import io
import shlex
from pathlib import Path

from fleet.history import History

PICTURE = "loss.png"


def lm_eval(folder: Path, base: str = "") -> str:
    """The command that evaluates a model as everybody else's is; or an adapter, beside its base."""
    which = f"{base},peft={folder}" if base else str(folder)
    return f"lm_eval --model hf --model_args pretrained={shlex.quote(which)} --tasks hellaswag,arc_easy"


def picture(history: History) -> bool:
    """The loss over the rounds: each member's, and that of the averaged or global model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes, rounds = figure.add_subplot(), range(history.first)
    found = [(n, each) for n in rounds for each in history.round(n) if "loss" in each.metrics]
    single = [(n, each.metrics["loss"]) for n, each in found if each.recipe.role != "summary"]
    whole = [(n, each.metrics["loss"]) for n, each in found if each.recipe.role == "summary"]
    if not single and not whole:
        return False
    if single:
        axes.plot(*zip(*single, strict=True), ".", color="tab:gray", alpha=0.6, label="each member")
    if whole:
        axes.plot(*zip(*whole, strict=True), "-o", color="tab:blue", label="averaged model")
    axes.set(xlabel="round", ylabel="loss on held-out text, nats a token")
    known = (each.metrics for _, each in found if each.metrics["loss"] and "bits_per_byte" in each.metrics)
    if bits := next(known, None):
        share = bits["bits_per_byte"] / bits["loss"]  # the same for all: the text is
        both = (lambda loss: loss * share, lambda bits: bits / share)
        axes.secondary_yaxis("right", functions=both).set_ylabel("bits per byte")
    axes.legend()
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    history.store.replace(PICTURE, data.getvalue())
    return True

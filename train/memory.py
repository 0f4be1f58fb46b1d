"""How much of a GPU's memory a training takes, by what it is for: a formula of the model's shape, the batch and the
optimizer, for models like Llama that are not compiled, which remember the most.

    python -m train.memory configs/150m.json
"""

from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers import PretrainedConfig

from fleet.console import console
from fleet.run_config import load
from fleet.single_command import command
from train import chunked_loss
from train.kernels import MIXED
from train.model import described, has_vocabulary, layout_of, skeleton
from train.optimizers import WEIGHTS, layouts_of
from train.training_config import PRESETS, TrainConfig
from train.vector_layout import VectorLayout

_WIDE, _NARROW = 4, 2  # bytes of a number: of those that are kept, and of those that PRECISION multiplies
_OWN = 1.0e9  # that CUDA, its libraries and its allocator's gaps take of a GPU

ROOMS = (24, 48, 80)  # GB of the GPUs that people have


@dataclass(frozen=True)
class Memory:
    """Bytes on the device."""

    weights: float
    gradients: float
    optimizer: float
    narrow: float  # the weights once more, in PRECISION's numbers, from forward to backward
    layers: float  # what they remember of a batch until backward
    logits: float
    step: float  # Muon's, when nothing is remembered any more

    @property
    def kept(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.kept + max(self.narrow + self.layers + self.logits, self.step)


def memory_of(config: TrainConfig, batch: int = 0) -> Memory:
    """Of one process of a worker that has the whole model, or with DEVICES_PER_WORKER its rows and its share of it."""
    entry, ranks = config.initial_population[0], config.devices_per_worker
    shape = described(entry, config.trust_remote_code)
    layout = layout_of(skeleton(entry, config.vocab_size, config.trust_remote_code))
    shares = ranks if config.sharding_strategy != "NO_SHARD" else 1
    moments = sum(each.size for kind, each in layouts_of(layout, config).items() if kind != WEIGHTS)
    tokens = (batch or config.batch_size // ranks) * config.seq_length
    vocabulary = shape.vocab_size if has_vocabulary(entry) else config.vocab_size
    mixed = config.precision in (*MIXED, "auto")  # as it is settled on GPUs of today
    return Memory(
        weights=_WIDE * layout.size / shares,
        gradients=_WIDE * layout.size / shares,
        optimizer=_WIDE * moments / shares,
        narrow=_NARROW * (layout.hidden + vocabulary * _sizes(shape)["hidden"]) / shares if mixed else 0.0,
        layers=float(tokens * remembered(shape, mixed)),
        logits=_of_words(tokens, vocabulary, _sizes(shape)["hidden"]),
        step=_of_muon(layout) / shares if config.inner_optimizer != "adamw" else 0.0,
    )


def remembered(shape: PretrainedConfig, mixed: bool) -> int:
    """Bytes that all layers remember of one token. Of each layer: before attention and before the perceptron what came
    in, and it normalized with and without its weight; queries, keys, values and what attention found; of the perceptron
    the gate before and after, what goes through it, and the product. In mixed precision what came in stays wide, and
    each product that it goes into has a narrow copy of its own."""
    s = _sizes(shape)
    hidden, inner, attention = s["hidden"], s["inner"], 2 * s["queries"] + 2 * s["keys"]
    if mixed:
        layer = _WIDE * 4 * hidden + _NARROW * (5 * hidden + attention + 4 * inner)
        return s["layers"] * layer + _WIDE * 2 * hidden + _NARROW * hidden
    return s["layers"] * _WIDE * (6 * hidden + attention + 4 * inner) + _WIDE * 3 * hidden


def _of_words(tokens: int, vocabulary: int, hidden: int) -> float:
    """Where logits are there whole, their logarithms, and two gradients; where they are looked at in parts, a part and
    its logarithms, and until backward the gradients of the head and of what it is given."""
    if tokens * vocabulary <= chunked_loss.MOST:
        return 3.0 * _WIDE * tokens * vocabulary
    return 2.0 * _WIDE * chunked_loss.PART + _WIDE * hidden * (vocabulary + tokens)


def _sizes(shape: Any) -> dict[str, int]:
    """As Llama calls them; models that are like it in other words are taken for as wide as most are."""
    heads = getattr(shape, "num_attention_heads", None) or 1
    width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
    keys = (getattr(shape, "num_key_value_heads", None) or heads) * width
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    sizes = {"hidden": shape.hidden_size, "inner": inner, "layers": shape.num_hidden_layers}
    return {**sizes, "queries": heads * width, "keys": keys}


def _of_muon(layout: VectorLayout) -> float:
    """The next step of all matrices, and of one stack of them two copies and two squares, in bf16."""
    stacks = (2 * each.size + 2 * each.count * min(each.rows, each.columns) ** 2 for each in layout.stacks)
    return _WIDE * layout.hidden + _NARROW * max(stacks, default=0)


def largest_batch(config: TrainConfig, room: float) -> int:
    """The most sequences at a time, a power of two, that a GPU with so many bytes has room for; 0: not one."""
    fit = [size for size in (2**n for n in range(10)) if memory_of(config, size).total + _OWN <= room]
    return max(fit, default=0)


def table(configs: Path) -> str:
    """Of each preset, as its file in configs/ trains it: what it takes, and what would fit."""
    lines = ["| preset | T | BATCH_SIZE | it takes | kept | layers | logits |", "|---|---|---|---|---|---|---|"]
    lines[0] += "".join(f" {room} GB has room for |" for room in ROOMS)
    lines[1] += "---|" * len(ROOMS)
    for name in PRESETS:
        c = load(configs / f"{name}.json", TrainConfig)
        m = memory_of(c)
        sizes = (f"{each / 1e9:.2f} GB" for each in (m.total + _OWN, m.kept, m.layers, m.logits))
        fits = (f"{batch or 'none'}" for batch in (largest_batch(c, room * 1e9) for room in ROOMS))
        lines.append(f"| {' | '.join([name, str(c.seq_length), str(c.batch_size), *sizes, *fits])} |")
    return "\n".join(lines) + "\n"


# -- what is said ------------------------------------------------------------------------------------------------------


def show(config: Path = Path("evolution.json")) -> None:
    """Say what a configuration's training takes of a GPU.

    For example:

        python -m train.memory configs/150m.json
    """
    c = load(config, TrainConfig)
    found, table = memory_of(c), Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for each, value in zip(fields(found), astuple(found), strict=True):
        table.add_row(each.name, f"{value / 1e9:.2f} GB")
    table.add_row("at most at once", f"{found.total / 1e9:.2f} GB, and about {_OWN / 1e9:.0f} GB of CUDA's own")
    console().print(table)


if __name__ == "__main__":
    command("train.memory", show)

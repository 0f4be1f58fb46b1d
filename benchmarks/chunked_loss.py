"""The loss of a step whose words are compared a few rows at a time, beside one whose logits are there all at once: the
most memory beyond what there was, and a processor's seconds for forward and backward.

python -m benchmarks.chunked_loss [--quick]
"""

import gc
import time
import weakref
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from cyclopts import App
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.figures import goal, spread, table
from train.chunked_loss import summed

TOKENS, HIDDEN = 1024, 64
WORDS = (32_768, 131_072, 262_144)
app = App(name="python -m benchmarks.chunked_loss", help=__doc__, version_flags=[])


class LiveBytes(TorchDispatchMode):
    """Of all tensors that were made meanwhile and still are: now, and at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {_storage(each)._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and _storage(each)._cdata not in self._seen | given:
                self._count(_storage(each))
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def _storage(each: Tensor) -> torch.UntypedStorage:
    return each.untyped_storage()


def plain(hidden: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    return cross_entropy((hidden @ weight.T).float(), wanted)


def chunked(hidden: Tensor, weight: Tensor, wanted: Tensor) -> Tensor:
    return summed(hidden, weight, wanted, hidden.dtype) / len(wanted)


def seconds(loss: Callable[..., Tensor], given: tuple[Tensor, ...]) -> float:
    began = time.process_time()
    loss(*given).backward()
    return time.process_time() - began


def most_bytes(loss: Callable[..., Tensor], given: tuple[Tensor, ...]) -> int:
    gc.collect()
    with LiveBytes() as live:
        loss(*given).backward()
    return live.most


@app.default
def main(quick: bool = False) -> None:
    torch.set_num_threads(1)
    note = f"{TOKENS} tokens of {HIDDEN} numbers, fp32; seconds of one processor, interleaved, medians and ranges."
    names = ("words", "plain, MB", "chunked, MB", "plain, s", "chunked, s", "ratio", "goal")
    shown = table("A step's loss, forward and backward", *names, note=note)
    for words in WORDS:
        hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(words, HIDDEN).mul_(0.02)
        given = (hidden.requires_grad_(), weight.requires_grad_(), torch.randint(words, (TOKENS,)))
        bytes = [most_bytes(loss, given) / 1e6 for loss in (plain, chunked)]
        took = [(seconds(plain, given), seconds(chunked, given)) for _ in range(2 if quick else 4)][1:]
        before, after = map(list, zip(*took, strict=True))
        ratio = median(after) / median(before)
        cells = (*(f"{each:.0f}" for each in bytes), spread(before), spread(after), f"{ratio:.2f}")
        shown.add_row(f"{words:,}", *cells, goal(ratio <= 1.1, "at most 1.10"))
    Console(width=150).print(shown)


if __name__ == "__main__":
    app()

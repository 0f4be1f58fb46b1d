"""Flat vectors in members' files: whole ones in and out of memory, piece by piece."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fleet.work import Input, Work
from merge.files import Header, TensorEntry, bytes_of, chunks, read_header, write_header
from merge.outer import Outer
from merge.wire import pieces, received, send, sender
from train.model import VectorLayout

WEIGHTS = "weights.safetensors"  # the first ones: named tensors, laid out one after the other as the flat vector is
MOMENTUM, MOMENTS = "momentum.safetensors", "moments.safetensors"


def kept(outer: Outer) -> tuple[str, ...]:
    """The files of what the next outer step goes on from."""
    return (WEIGHTS, MOMENTUM) if outer.momentum else (WEIGHTS,)


def save(work: Any, name: str, vector: Tensor, wire: str = "fp32") -> str:
    """As one of the attempt's files, or of a snapshot's; returns its checksum."""
    with work.create(name) as file:
        send(file, len(vector), (piece.cpu() for piece in pieces(vector)), wire)
    return str(file.seal()[1])


def load(parent: Any, name: str, into: Tensor) -> None:
    with parent.open(name) as file:
        _fill(into, received(file, len(into)))


def save_weights(work: Work, vector: Tensor, layout: VectorLayout) -> None:
    """So that anybody's safetensors reads them."""
    with work.create(WEIGHTS) as file:
        write_header(file, Header({name: TensorEntry(torch.float32, shape) for name, shape in layout.shapes.items()}))
        for piece in pieces(vector):
            file.write(bytes_of(piece.cpu()))


def load_weights(parent: Input, into: Tensor) -> None:
    with parent.open(WEIGHTS) as file:
        read_header(file)
        _fill(into, chunks(file, torch.float32, len(into)))


@contextmanager
def created(work: Work, name: str, count: int, wire: str = "fp32") -> Iterator[Callable[[Tensor], None]]:
    """A vector to write piece by piece."""
    with work.create(name) as file:
        yield sender(file, count, wire)


@contextmanager
def opened(parents: Iterable[Input], name: str, count: int) -> Iterator[list[Iterator[Tensor]]]:
    """The same vector of several parents, to be read side by side."""
    with ExitStack() as stack:
        yield [received(stack.enter_context(parent.open(name)), count) for parent in parents]


def _fill(into: Tensor, numbers: Iterable[Tensor]) -> None:
    begin = 0
    for piece in numbers:
        into[begin : begin + len(piece)].copy_(piece)
        begin += len(piece)

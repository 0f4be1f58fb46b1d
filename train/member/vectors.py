"""Flat vectors in members' files: whole ones in and out of memory, several as one, piece by piece."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from fleet.work import Failed, Input, Work
from merge.files import Header, TensorEntry, bytes_of, chunks, read_header, write_header
from merge.outer import Outer, means, ranges
from merge.wire import pieces, received, send
from train.model import VectorLayout

WEIGHTS = "weights.safetensors"  # the first ones: named tensors, laid out one after the other as the flat vector is
MOMENTUM, MOMENTS = "momentum.safetensors", "moments.safetensors"
MOMENTS_WIRE = "bf16"  # small ones count as much as large ones, in the square root that divides a step
Joining = Callable[[list[Input], str, Tensor], None]  # the vectors of several members become one


def kept(outer: Outer) -> tuple[str, ...]:
    """The files of what the next outer step goes on from."""
    return (WEIGHTS, MOMENTUM) if outer.momentum else (WEIGHTS,)


def parents_of(work: Work) -> list[Input]:
    """Those that are there."""
    if found := [work.inputs[id] for id in work.recipe.parents if id in work.inputs]:
        return found
    raise Failed("none of its parents is there")


# -- one ---------------------------------------------------------------------------------------------------------------


def save(work: Any, name: str, vector: Tensor, wire: str = "fp32") -> None:
    """As one of the attempt's files, or of a snapshot's."""
    with work.create(name) as file:
        send(file, len(vector), (piece.cpu() for piece in pieces(vector)), wire)


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


def _fill(into: Tensor, numbers: Iterable[Tensor]) -> None:
    begin = 0
    for piece in numbers:
        into[begin : begin + len(piece)].copy_(piece)
        begin += len(piece)


# -- several -----------------------------------------------------------------------------------------------------------


@contextmanager
def opened(parents: Iterable[Input], name: str, count: int) -> Iterator[list[Iterator[Tensor]]]:
    """The same vector of several parents, to be read side by side."""
    with ExitStack() as stack:
        yield [received(stack.enter_context(parent.open(name)), count) for parent in parents]


def mean(parents: list[Input], name: str, into: Tensor) -> None:
    """EDT: of all members."""
    with opened(parents, name, len(into)) as several:
        _fill(into, means(several))


def joined(shards: list[Input], name: str, into: Tensor) -> None:
    """DiLoCo: one shard after the other."""
    for cut, shard in zip(ranges(len(into), len(shards)), shards, strict=True):
        load(shard, name, into[cut.start : cut.stop])


def settled(outer: Outer, join: Joining, members: list[Input], size: int) -> Tensor:
    """The weights of several members together as they are worth: without the last step's look ahead."""
    state = [torch.empty(size) for _ in kept(outer)]
    for name, whole in zip(kept(outer), state, strict=True):
        join(members, name, whole)
    return outer.settled(state)


def save_parts(work: Work, stem: str, vector: Tensor, count: int, wire: str) -> None:
    for number, cut in enumerate(ranges(len(vector), count)):
        save(work, part_of(stem, number), vector[cut.start : cut.stop], wire)


def part_of(stem: str, number: int) -> str:
    return f"{stem}-{number}.safetensors"

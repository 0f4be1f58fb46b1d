"""Flat vectors in members' files: whole ones in and out of memory, several as one, piece by piece."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleet.work import Failed, InputMember, Work
from merge.outer_step import OuterOptimizer, means, ranges
from merge.tensor_files import CHUNK, Header, TensorEntry, bytes_of, chunks, read_header, write_header
from merge.wire import WIRES, pieces, received, send
from train.exchange_config import ExchangeConfig
from train.vector_layout import VectorLayout

WEIGHTS, MOMENTUM = "weights", "momentum"  # the stems of files' names: a vector is in one file, or in parts
BEFORE, UPDATE = "before.safetensors", "update.safetensors"  # or weights are those before a step, less the step
# INNER_OPTIMIZER_STATE: what gradients' averages travel in, and those of their squares
STATE_WIRES = {"average": ("int8", "root8"), "narrow": ("int4", "root8"), "exact": ("fp32", "fp32")}
Joining = Callable[[list[InputMember], str, Tensor], None]  # the vectors of several members become one
FillStart = Callable[[str, Tensor], None]  # fills a vector with what a member begins with of this stem


@dataclass(frozen=True)
class Moment:
    """One of the inner optimizer's, as it travels."""

    stem: str
    count: int
    wire: str


def moments_of(config: ExchangeConfig, parameters: int, both: int) -> tuple[Moment, ...]:
    """Gradients' averages, and their squares', of what has some; none, where nobody asks for them."""
    if not config.keeps_moments:
        return ()
    average, square = STATE_WIRES[config.inner_optimizer_state]
    # files average-N, square-N: the inner optimizer's first and second moments, not an averaged model
    return Moment("average", parameters, average), Moment("square", both - parameters, square)


def outer_stems(outer: OuterOptimizer) -> tuple[str, ...]:
    """The stems of the vectors that an outer step changes: weights, and momentum if it has one."""
    return (WEIGHTS, MOMENTUM) if outer.momentum else (WEIGHTS,)


def parents_of(work: Work) -> list[InputMember]:
    """Those that are there."""
    if found := [work.inputs[id] for id in work.recipe.parents if id in work.inputs]:
        return found
    raise Failed("none of its parents is there")


# -- one ---------------------------------------------------------------------------------------------------------------


def file_of(stem: str, part: int | None = None) -> str:
    return f"{stem}.safetensors" if part is None else f"{stem}-{part}.safetensors"


def save(work: Any, name: str, vector: Tensor, wire: str = "fp32") -> None:
    """As one of the attempt's files, or of a snapshot's."""
    with work.create(name) as file:
        send(file, len(vector), (piece.cpu() for piece in pieces(vector)), wire)


def save_parts(work: Work, stem: str, vector: Tensor, count: int, wire: str, which: range | None = None) -> None:
    """For readers of a part each; or some of the parts."""
    cuts = ranges(len(vector), count)
    for number in range(count) if which is None else which:
        cut = cuts[number]
        save(work, file_of(stem, number), vector[cut.start : cut.stop], wire)


def load(parent: Any, name: str, into: Tensor) -> None:
    _fill(into, numbers(parent, name, len(into)))


def numbers(parent: Any, name: str, count: int) -> Iterator[Tensor]:
    """Of one file, piece by piece; they are right only if it is read to its end."""
    with parent.open(name) as file:
        yield from received(file, count)


def read_stem(parent: InputMember, stem: str, count: int) -> Iterator[Tensor]:
    """A stem's vector, in pieces of CHUNK: from one file, or from its parts; or, where weights travel as the step that
    leads to them, the weights before that step minus the step."""
    if stem == WEIGHTS and BEFORE in parent.files:
        for old, step in zip(numbers(parent, BEFORE, count), numbers(parent, UPDATE, count), strict=True):
            yield old - step
        return
    names = [file_of(stem)] if file_of(stem) in parent.files else _parts(parent, stem)
    parts = zip(names, ranges(count, len(names)), strict=True)
    several = itertools.chain.from_iterable(numbers(parent, name, len(cut)) for name, cut in parts)
    yield from _evenly(several) if len(names) > 1 else several


def _evenly(pieces: Iterator[Tensor]) -> Iterator[Tensor]:
    """As they come of a member in one file: a fork may have a mean of both kinds."""
    held = torch.empty(0)
    for piece in pieces:
        held = torch.cat([held, piece])
        while len(held) >= CHUNK:
            yield held[:CHUNK]
            held = held[CHUNK:]
    if len(held):
        yield held


def _parts(parent: InputMember, stem: str) -> list[str]:
    names = (file_of(stem, number) for number in itertools.count())
    return [*itertools.takewhile(lambda name: name in parent.files, names)]


def save_weights(work: Work, vector: Tensor, layout: VectorLayout) -> None:
    """So that anybody's safetensors reads them."""
    with work.create(file_of(WEIGHTS)) as file:
        write_header(file, Header({name: TensorEntry(torch.float32, shape) for name, shape in layout.shapes.items()}))
        for piece in pieces(vector):
            file.write(bytes_of(piece.cpu()))


def load_weights(parent: InputMember, size: int) -> Tensor:
    into = torch.empty(size)
    with parent.open(file_of(WEIGHTS)) as file:
        read_header(file)
        _fill(into, chunks(file, torch.float32, size))
    return into


def _fill(into: Tensor, numbers: Iterable[Tensor]) -> None:
    begin = 0
    for piece in numbers:
        into[begin : begin + len(piece)].copy_(piece)
        begin += len(piece)


# -- several -----------------------------------------------------------------------------------------------------------


def mean(members: list[InputMember], stem: str, into: Tensor, wire: str = "fp32") -> None:
    """EDT: of all members; through a wire, as if somebody else had made it."""
    several = means([read_stem(member, stem, len(into)) for member in members])
    _fill(into, (arrived(piece, wire) for piece in several))


def arrived(vector: Tensor, wire: str) -> Tensor:
    """What there is of it at the other end; a piece at a time, since what becomes codes takes far more room."""
    there, into = WIRES[wire], torch.empty_like(vector)
    _fill(into, (there.decode(there.encode(piece), len(piece)) for piece in pieces(vector)))
    return into


def joined(shards: list[InputMember], stem: str, into: Tensor) -> None:
    """Members that hold a range of the vector each, one after the other; of a list of one, its whole vector."""
    for cut, shard in zip(ranges(len(into), len(shards)), shards, strict=True):
        _fill(into[cut.start : cut.stop], read_stem(shard, stem, len(cut)))


def read(join: Joining, members: list[InputMember], stem: str, size: int) -> Tensor:
    """Of several members, as one vector in memory."""
    join(members, stem, into := torch.empty(size))
    return into


def without_lookahead(outer: OuterOptimizer, join: Joining, members: list[InputMember], size: int) -> Tensor:
    """The weights of several members together as they are worth: without the last step's look ahead."""
    return outer.without_lookahead([read(join, members, stem, size) for stem in outer_stems(outer)])

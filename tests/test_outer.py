"""What merges weights: the outer step, means, arcs, and how vectors travel. Exact, against formulas and libraries."""

import io
import math
from typing import get_args

import pytest
import safetensors.torch
import torch

from merge import outer_step, tensor_files, wire
from merge.methods.weighted_sums import slerp_all
from merge.tensor_group import weighted
from train.exchange_config import QUANTIZED_WIRES, ExchangeSection

SIZES = [0, 1, 63, 64, 65, 1000, tensor_files.CHUNK, tensor_files.CHUNK + 77]


def through(vector: torch.Tensor, how: str, count: int | None = None) -> torch.Tensor:
    file = io.BytesIO()
    wire.send(file, len(vector), wire.pieces(vector), how)
    file.seek(0)
    pieces = [piece.clone() for piece in wire.received(file, len(vector) if count is None else count)]
    assert file.read() == b""
    return torch.cat(pieces) if pieces else torch.empty(0)


def random(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_is_that_of_torch(nesterov):
    start, momentum = random(1000), torch.zeros(1000)
    parameter = torch.nn.Parameter(start.clone())
    theirs = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
    ours = outer_step.OuterOptimizer(0.7, 0.9, nesterov)
    for round in range(5):
        change = random(1000, round + 1)
        parameter.grad = change.clone()
        theirs.step()
        start, momentum = ours.step((start, momentum), change)
        assert torch.equal(start, parameter.data)


def test_pieces_make_the_same_step_as_the_whole():
    count = tensor_files.CHUNK * 2 + 77
    start, momentum, change = (random(count, seed) for seed in range(3))
    whole = outer_step.OuterOptimizer().step((start, momentum), change)
    cut = zip(*map(wire.pieces, (start, momentum, change)), strict=True)
    pieces = [outer_step.OuterOptimizer().step(before, change) for *before, change in cut]
    for n in range(2):
        assert torch.equal(torch.cat([piece[n] for piece in pieces]), whole[n])


def test_without_momentum_the_step_is_the_plain_mean():
    start, change = random(1000), random(1000, 1)
    plain = outer_step.OuterOptimizer(1.0, 0.0)
    (weights,) = plain.step([start], change)
    assert torch.equal(weights, start - change) and torch.equal(plain.without_lookahead([weights]), weights)
    with_zeros = outer_step.OuterOptimizer(1.0, 0.0).step([start, torch.zeros(1000)], change)
    assert torch.equal(with_zeros[0], weights)


def test_a_mean_is_summed_in_order():
    vectors = [random(1000, seed) for seed in range(5)]
    (mean,) = outer_step.means([iter([vector]) for vector in vectors])
    total = vectors[0]
    for vector in vectors[1:]:
        total = total + vector
    assert torch.equal(mean, total / 5)


@pytest.mark.parametrize("size, shards", [(1000, 1), (1000, 3), (64, 8), (1 << 20, 8), (5, 2)])
def test_ranges_cover_everything_in_whole_blocks(size, shards):
    found = outer_step.ranges(size, shards)
    assert len(found) == shards and [n for part in found for n in part] == [*range(size)]
    assert all(part.start % wire.BLOCK == 0 for part in found if part)
    assert max(map(len, found)) <= -(-size // shards) + wire.BLOCK


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(
    "how, share",
    [("fp32", 0.0), ("bf16", 2**-7), ("int12", 0.51 / 2032), ("int8", 0.52 / 127 + 2**-8), ("int4", 0.52 / 7 + 2**-8)],
)
def test_a_vector_arrives(count, how, share):
    vector = random(count) * 1e-6  # as small as changes are
    arrived = through(vector, how)
    assert arrived.shape == vector.shape and arrived.dtype == torch.float32
    if count:
        padded = torch.nn.functional.pad(vector, (0, -count % wire.BLOCK)).view(-1, wire.BLOCK)
        most = padded.abs().amax(1, keepdim=True).expand_as(padded).flatten()[:count]
        assert bool(((arrived - vector).abs() <= most * share).all())


@pytest.mark.parametrize(
    "how, bytes",
    [
        ("fp32", 4.01),
        ("bf16", 2.01),
        ("int12", 1.54),
        ("int8", 1.04),
        ("int4", 0.54),
        ("normal2", 0.29),
        ("root8", 1.04),
    ],
)
def test_the_wire_is_as_narrow_as_it_says(how, bytes):
    file = io.BytesIO()
    wire.send(file, 1 << 16, wire.pieces(random(1 << 16).abs()), how)
    assert len(file.getvalue()) / (1 << 16) <= bytes


def test_twelve_bits_lose_less_than_bf16():
    vector = random(1 << 16)
    lost = {how: (through(vector, how) - vector).square().mean().sqrt() for how in ("bf16", "int12")}
    assert lost["int12"] < lost["bf16"] / 3


def test_the_configuration_names_the_same_wires():
    named = {*get_args(ExchangeSection.model_fields["wire_dtype"].annotation)} - {""}
    assert named == {*wire.WIRES} - {"root8"}, "which is for what is never negative"
    entries = {name: wire.WIRES[name].entry(wire.BLOCK) for name in named}
    assert {name for name, entry in entries.items() if entry.bytes < 2 * wire.BLOCK} == {*QUANTIZED_WIRES}


@pytest.mark.parametrize("how", wire.WIRES)
def test_what_arrives_is_what_the_sender_thinks(how):
    vector = random(1000).abs() if how == "root8" else random(1000)
    assert torch.equal(wire.WIRES[how].decode(wire.WIRES[how].encode(vector), 1000), through(vector, how))


def test_squares_keep_their_size_and_small_ones_never_become_nothing():
    """A step is divided by their roots: those of a block within its largest one's 255th, and none of them zero."""
    squares = random(640).square() * 1e-12
    squares[5], squares[6] = 1e-30, 0.0
    arrived = through(squares, "root8")
    largest = squares.sqrt().view(-1, wire.BLOCK).amax(1, keepdim=True).expand(-1, wire.BLOCK).flatten()
    assert bool(((arrived.sqrt() - squares.sqrt()).abs() <= largest / 255 * 1.02).all())
    assert arrived[6] == 0 and bool((arrived[squares > 0] > 0).all())


def test_two_bits_lose_as_little_of_a_normal_distribution_as_two_bits_can():
    """Max (1960): with four levels 0.1175 of the variance is lost."""
    vector = random(1 << 18) * 1e-6
    lost = (through(vector, "normal2") - vector).square().mean() / vector.square().mean()
    assert 0.10 < float(lost) < 0.12
    assert not through(torch.zeros(100), "normal2").any()


def test_zeros_and_the_largest_number_of_a_block_survive_scaling():
    vector = torch.zeros(128)
    assert torch.equal(through(vector, "int4"), vector)
    vector[70] = 7.0
    assert torch.equal(through(vector, "int4"), vector)


def test_our_files_are_everybodys_files():
    file = io.BytesIO()
    wire.send(file, 1000, wire.pieces(random(1000)))
    assert torch.equal(safetensors.torch.load(file.getvalue())["vector"], random(1000))


@pytest.mark.parametrize("data, why", [
    (b"", "within its header"), (b"\xff" * 16, "would have"), (b"\x02\0\0\0\0\0\0\0[]", "not a safetensors"),
    (b"\x04\0\0\0\0\0\0\0{}  ", "not a vector"),
])  # fmt: skip
def test_what_is_no_vector_is_refused(data, why):
    with pytest.raises(tensor_files.UserError, match=why):
        [*wire.received(io.BytesIO(data), 10)]


def test_a_vector_of_another_size_or_cut_short_is_refused():
    with pytest.raises(tensor_files.UserError, match="not a vector of 999"):
        through(random(1000), "fp32", 999)
    file = io.BytesIO()
    wire.send(file, 1000, wire.pieces(random(1000)))
    with pytest.raises(tensor_files.UserError, match="too early"):
        [*wire.received(io.BytesIO(file.getvalue()[:-1]), 1000)]


def test_slerp_keeps_to_the_arc():
    a, b = random(100, 1), random(100, 2)
    x, y = a.double(), b.double()
    angle = math.acos(float(x @ y / (x.norm() * y.norm())))
    for t in (0.0, 0.3, 1.0):
        formula = (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)
        assert torch.allclose(slerp_all([a, b], [1 - t, t]).double(), formula, atol=1e-6)
    assert torch.allclose(slerp_all([a, 2 * a], [0.5, 0.5]), 1.5 * a)
    zero = torch.zeros(100)
    assert torch.equal(slerp_all([zero, b], [0.5, 0.5]), 0.5 * b)
    three = slerp_all([a, b, a], [0.25, 0.25, 0.5])
    assert torch.equal(three, slerp_all([slerp_all([a, b], [0.5, 0.5]), a], [0.5, 0.5]))


def test_linear_is_the_weighted_sum():
    a, b = random(100, 1), random(100, 2)
    wanted = 0.25 * a.double() + 0.75 * b.double()
    assert torch.allclose(weighted([a, b], [0.25, 0.75]).double(), wanted, atol=1e-6)

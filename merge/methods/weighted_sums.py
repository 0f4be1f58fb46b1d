"""Methods whose result is a weighted sum; where the weights depend on angles, after one look at the tensors.

All angles come from inner products, summed in float64; what happens between them is arithmetic on a few numbers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fleet.errors import UserError
from merge.methods.checks import shares
from merge.tensor_group import Group, Params, weighted
from merge.tensor_names import writes_to_residual

_PARALLEL = 1e-6  # sines below this mean that two directions are the same, or opposite


def linear(group: Group, p: Params) -> Iterator[Tensor]:
    """The weighted mean."""
    weights = shares(p["weight"]) if p["normalize"] else p["weight"]
    return (weighted(each, weights) for each in group.blocks())


def passthrough(group: Group, p: Params) -> Iterator[Tensor]:
    """One tensor, scaled."""
    (scale,), (residual,) = p["scale"], p["residual"]
    factor = scale * (residual if writes_to_residual(group.name) else 1.0)
    return (weighted(each, [factor]) for each in group.blocks())


def slerp(group: Group, p: Params) -> Iterator[Tensor]:
    """From the base to the other along the arc between their directions."""
    weights = arc(inner_products(group.blocks()), p["t"])
    return (weighted(each, weights) for each in group.blocks())


def nuslerp(group: Group, p: Params) -> Iterator[Tensor]:
    """The same between two models by their weights, of their changes where there is a base; row by row on request."""
    first, second = p["weight"]
    t = 0.5 if abs(first + second) < 1e-6 else second / (first + second)
    if p["nuslerp_flatten"]:
        a, b = arc(inner_products(_sides(group)), t)
        return (_back(base, weighted(sides, [a, b])) for base, sides in _parts(group))
    if p["nuslerp_row_wise"]:  # mergekit's word for vectors along the first dimension
        return _columns(group, t)
    return (_back(base, _each_row(sides, t)) for base, sides in _parts(group))


def multislerp(group: Group, p: Params) -> Iterator[Tensor]:
    """The weighted mean of directions, on the sphere, with the weighted mean length."""
    weights = shares(p["weight"]) if p["normalize_weights"] else list(p["weight"])
    found = _mean_direction(inner_products(_sides(group)), weights, p["eps"], group.name)
    return (_back(base, weighted(sides, found)) for base, sides in _parts(group))


def karcher(group: Group, p: Params) -> Iterator[Tensor]:
    """The mean of directions on the sphere, with the mean length."""
    found = karcher_weights(inner_products(group.blocks()), shares(p["weight"]), p["max_iter"], p["tol"])
    return (weighted(each, found) for each in group.blocks())


def model_stock(group: Group, p: Params) -> Iterator[Tensor]:
    """From the base towards the mean, the farther the more the changes agree."""
    n = len(group.others)
    if p["filter_wise"] and len(group.shape) > 1:
        for base, sides in group.changes():
            products = torch.stack([torch.stack([(a * b).sum(1, dtype=torch.float64) for b in sides]) for a in sides])
            t = _stock(products.movedim(2, 0)).float()[:, None]
            yield weighted(sides, [1 / n] * n).mul_(t).add_(base)
        return
    whole = float(_stock(inner_products(_sides(group))))
    for base, sides in group.changes():
        yield base + weighted(sides, [whole / n] * n)


# -- the arithmetic ----------------------------------------------------------------------------------------------------


def inner_products(blocks: Iterable[Sequence[Tensor]]) -> Tensor:
    """Of every tensor with every other one."""
    total: Tensor | None = None
    for block in blocks:
        wide = torch.stack([tensor.flatten() for tensor in block]).double()
        found = (wide @ wide.T).cpu()
        total = found if total is None else total.add_(found)
    if total is None:
        raise ValueError("tensors without numbers have no directions")
    return total


def cosines(products: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths, and the cosines between directions: 0 with what has none."""
    lengths = products.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    both = lengths[..., :, None] * lengths[..., None, :]
    return lengths, torch.where(both > 0, products / torch.where(both > 0, both, 1.0), 0.0).clamp(-1, 1)


def on_arc(aa: Tensor, ab: Tensor, bb: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """What slerp weighs two tensors with; on a line where they have the same direction, or opposite ones."""
    lengths = (aa * bb).clamp_min(0).sqrt()
    angle = torch.acos((ab / torch.where(lengths > 0, lengths, 1.0)).clamp(-1, 1))
    sine = torch.where(lengths > 0, torch.sin(angle), 0.0)
    straight, safe = sine < _PARALLEL, torch.where(sine < _PARALLEL, 1.0, sine)
    first = torch.where(straight, 1 - t, torch.sin((1 - t) * angle) / safe)
    return first, torch.where(straight, t, torch.sin(t * angle) / safe)


def arc(products: Tensor, t: float) -> list[float]:
    """The same for two whole tensors."""
    return [float(each) for each in on_arc(products[0, 0], products[0, 1], products[1, 1], t)]


def slerp_all(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Of tensors in memory: one after the other, each by its share of what has been merged so far."""
    merged, so_far = tensors[0], weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        so_far += weight
        t = weight / so_far if so_far else 0.5
        merged = weighted([merged, tensor], arc(inner_products([[merged, tensor]]), t))
    return merged


def karcher_weights(products: Tensor, weights: Sequence[float], steps: int, tol: float) -> list[float]:
    """Gradient descent on the sphere, in the span of the tensors' directions."""
    lengths, between = cosines(products)
    scale = float((torch.tensor(weights).double() * lengths).sum())
    here = torch.where(lengths > 0, torch.tensor(weights).double(), 0.0)
    if not here.any():
        return [0.0] * len(weights)
    share, safe = here / here.sum(), torch.where(lengths > 0, lengths, 1.0)

    def unit(v: Tensor) -> tuple[Tensor, float]:
        length = math.sqrt(max(0.0, float(v @ between @ v)))
        return (v / length if length > tol else v), length

    mean, length = unit(share)
    if length <= tol:  # they cancel out: any direction is as good
        mean = torch.eye(len(share), dtype=torch.float64)[int(share.nonzero()[0])]
    for _ in range(steps):
        dots = (between @ mean).clamp(-1, 1)
        angles, sines = torch.acos(dots), (1 - dots * dots).sqrt()
        pull = share * torch.where(sines > _PARALLEL, angles / torch.where(sines > 0, sines, 1.0), 0.0)
        step, length = unit(pull - (pull @ dots) * mean)
        if length < tol:
            break
        mean, _ = unit(math.cos(length) * mean + math.sin(length) * step)
    return [float(each) for each in scale * mean / safe]


def _mean_direction(products: Tensor, weights: Sequence[float], eps: float, name: str) -> list[float]:
    """The published way, through the tangent plane at this mean, leads back to it: there the weighted mean is 0."""
    w, (lengths, between) = torch.tensor(weights).double(), cosines(products)
    length = math.sqrt(max(0.0, float(w @ between @ w)))
    if not lengths.any() or (length < eps and len(w) == 2):
        return list(weights)
    if length < eps:
        raise UserError(
            f"multislerp: the directions of {name or 'the tensors'} cancel each other out with these weights"
        )
    return [float(each) for each in float(w @ lengths) / length * w / torch.where(lengths > 0, lengths, 1.0)]


def _stock(products: Tensor) -> Tensor:
    """How far from the base: n cos / (1 + (n - 1) cos), with the mean cosine of two changes."""
    n, (_, between) = products.shape[-1], cosines(products)
    first, second = torch.triu_indices(n, n, 1)
    mean = between[..., first, second].mean(-1)
    below = 1 + (n - 1) * mean
    return torch.where(below.abs() < 1e-6, 0.0, n * mean / torch.where(below.abs() < 1e-6, 1.0, below))


# -- with or without a base --------------------------------------------------------------------------------------------


def _parts(group: Group) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
    if group.base:
        yield from group.changes()
    else:
        yield from ((None, sides) for sides in group.blocks())


def _sides(group: Group) -> Iterator[list[Tensor]]:
    return (sides for _, sides in _parts(group))


def _back(base: Tensor | None, merged: Tensor) -> Tensor:
    return merged if base is None else merged.add_(base)


def _each_row(sides: Sequence[Tensor], t: float) -> Tensor:
    a, b = (side.double() for side in sides)
    aa, ab, bb = ((x * y).sum(1)[:, None] for x, y in ((a, a), (a, b), (b, b)))
    first, second = on_arc(aa, ab, bb, t)
    return (first * a + second * b).float()


def _columns(group: Group, t: float) -> Iterator[Tensor]:
    """Vectors along the first dimension: of a matrix its columns."""
    width = math.prod(group.shape[1:])
    total = torch.zeros(3, width, dtype=torch.float64, device=group.device)
    for place, (a, b) in _places(group, _sides(group)):
        for row, product in zip(total, (a * a, a * b, b * b), strict=True):
            row.index_add_(0, place, product)
    for (place, (a, b)), (base, _) in zip(_places(group, _sides(group)), _parts(group), strict=True):
        aa, ab, bb = total[:, place]
        first, second = on_arc(aa, ab, bb, t)
        yield _back(base, (first * a + second * b).float().view(-1, group.columns))


def _places(group: Group, blocks: Iterator[list[Tensor]]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Which vector along the first dimension each number belongs to."""
    begin, width = 0, math.prod(group.shape[1:])
    for sides in blocks:
        place = torch.arange(begin, begin + sides[0].numel(), device=group.device) % width
        begin += sides[0].numel()
        yield place, [side.double().flatten() for side in sides]

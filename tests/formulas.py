"""Every merge method as its formula says it: whole tensors in float64, sorted lists, no blocks, no tricks."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """A mask of the k largest; of equal ones those that come first."""
    flat = magnitudes.flatten().tolist()
    order = sorted(range(len(flat)), key=flat.__getitem__, reverse=True)  # which leaves equal ones in their order
    mask = torch.zeros(len(flat), dtype=torch.bool)
    mask[order[:k]] = True
    return mask.view_as(magnitudes)


def linear(xs, weight, normalize=True):
    total = sum(w * x for w, x in zip(weight, xs, strict=True))
    return total / sum(weight) if normalize else total


def on_arc(a: Tensor, b: Tensor, t: float) -> Tensor:
    lengths = a.norm() * b.norm()
    angle = torch.acos((torch.dot(a, b) / lengths).clamp(-1, 1)) if lengths > 0 else torch.zeros(())
    if torch.sin(angle) < 1e-6:
        return (1 - t) * a + t * b
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def slerp(xs, base, t):
    return on_arc(base.flatten(), xs[0].flatten(), t).view_as(base)


def nuslerp(xs, weight, base=None, nuslerp_flatten=True, nuslerp_row_wise=False):
    t = weight[1] / sum(weight) if abs(sum(weight)) >= 1e-6 else 0.5
    a, b = (x - base for x in xs) if base is not None else xs
    if nuslerp_flatten:
        found = on_arc(a.flatten(), b.flatten(), t).view_as(a)
    else:
        dim = 0 if nuslerp_row_wise else -1
        rows = [side.movedim(dim, -1) for side in (a, b)]
        width = rows[0].shape[-1]
        pairs = zip(*(side.reshape(-1, width) for side in rows), strict=True)
        found = torch.stack([on_arc(x, y, t) for x, y in pairs]).view(rows[0].shape).movedim(-1, dim)
    return found + base if base is not None else found


def multislerp(xs, weight, base=None, normalize_weights=True):
    sides = [x - base for x in xs] if base is not None else list(xs)
    w = [each / sum(weight) for each in weight] if normalize_weights else weight
    lengths = [side.norm() for side in sides]
    units = [side / length if length > 0 else side for side, length in zip(sides, lengths, strict=True)]
    mean = sum(each * unit for each, unit in zip(w, units, strict=True))
    if mean.norm() < 1e-8:
        found = sum(each * side for each, side in zip(w, sides, strict=True))
    else:
        mean = mean / mean.norm()
        tangents = [unit - (unit * mean).sum() * mean for unit in units]
        step = sum(each * tangent for each, tangent in zip(w, tangents, strict=True))
        far = step.norm()
        there = mean * torch.cos(far) + (step * torch.sin(far) / far if far > 0 else 0)
        found = there * sum(each * length for each, length in zip(w, lengths, strict=True))
    return found + base if base is not None else found


def karcher(xs, weight, max_iter=10, tol=1e-5):
    lengths = [float(x.norm()) for x in xs]
    scale = sum(w / sum(weight) * length for w, length in zip(weight, lengths, strict=True))
    kept = [(x / length, w) for x, length, w in zip(xs, lengths, weight, strict=True) if length > 0 and w]
    if not kept:
        return torch.zeros_like(xs[0])
    total = sum(w for _, w in kept)
    mean = sum(unit * w / total for unit, w in kept)
    mean = kept[0][0] if mean.norm() <= tol else mean / mean.norm()
    for _ in range(max_iter):
        step = torch.zeros_like(mean)
        for unit, w in kept:
            cosine = float((unit * mean).sum().clamp(-1, 1))
            sine = math.sqrt(1 - cosine * cosine)
            if sine > 1e-6:
                step += w / total * math.acos(cosine) / sine * (unit - cosine * mean)
        if step.norm() < tol:
            break
        mean = torch.cos(step.norm()) * mean + torch.sin(step.norm()) * step / step.norm()
        mean = mean / mean.norm()
    return scale * mean


def combined(base, changes, weight, vote, normalize, lam):
    weighed = [w * change for w, change in zip(weight, changes, strict=True)]
    if not vote:
        total = sum(weight)
        mixed = sum(weighed) / (total if normalize and abs(total) >= 1e-8 else 1.0)
        return base + lam * mixed
    sign = torch.where(sum(weighed) >= 0, 1.0, -1.0).double()
    mixed, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for each, w in zip(weighed, weight, strict=True):
        agrees = each.sign() == sign
        mixed += torch.where(agrees, each, 0.0)
        divisor += torch.where(agrees, w, 0.0)
    return base + lam * (mixed / torch.where(divisor == 0, 1.0, divisor) if normalize else mixed)


def thinned(change: Tensor, density: float, rescale: bool, gamma: float = 0.0) -> Tensor:
    n = change.numel()
    keep = int(density * n)
    top = min(int(gamma * n), n - keep)
    mask = largest(change.abs(), top + keep) & ~largest(change.abs(), top)
    kept = change * mask
    return kept * change.abs().sum() / kept.abs().sum() if rescale and kept.abs().sum() > 0 else kept


def family(vote: bool, thin: bool, normalize_by_default: bool, outliers: bool = False):
    def formula(xs, base, weight, density=None, gamma=None, rescale=False, normalize=normalize_by_default, lam=1.0):
        changes = [x - base for x in xs]
        if thin:
            gammas = (gamma or [0.01] * len(xs)) if outliers else [0.0] * len(xs)
            settings = zip(changes, density or [1.0] * len(xs), gammas, strict=True)
            changes = [thinned(change, d, rescale, g) for change, d, g in settings]
        return combined(base, changes, weight, vote, normalize, lam)

    return formula


task_arithmetic = family(vote=False, thin=False, normalize_by_default=False)
ties = family(vote=True, thin=True, normalize_by_default=True)
breadcrumbs = family(vote=False, thin=True, normalize_by_default=False, outliers=True)
breadcrumbs_ties = family(vote=True, thin=True, normalize_by_default=False, outliers=True)


def stock(base: Tensor, xs: Sequence[Tensor]) -> Tensor:
    """Of one vector."""
    n, changes, cosines = len(xs), [x - base for x in xs], []
    for i in range(n):
        for j in range(i + 1, n):
            lengths = changes[i].norm() * changes[j].norm()
            cosines.append(float(torch.dot(changes[i], changes[j]) / lengths) if lengths > 0 else 0.0)
    cosine = sum(cosines) / len(cosines)
    below = 1 + (n - 1) * cosine
    t = n * cosine / below if abs(below) >= 1e-6 else 0.0
    return t * sum(xs) / n + (1 - t) * base


def model_stock(xs, base, filter_wise=False):
    if not filter_wise or base.dim() == 1:
        return stock(base.flatten(), [x.flatten() for x in xs]).view_as(base)
    width = base.shape[-1]
    rows = zip(base.reshape(-1, width), *(x.reshape(-1, width) for x in xs), strict=True)
    return torch.stack([stock(row, others) for row, *others in rows]).view_as(base)


def sce(xs, base, select_topk=1.0):
    changes = [x - base for x in xs]
    if select_topk < 1:
        # the variances that the choice rests on are compared in float32, as they are computed
        narrow = [change.float() for change in changes]
        mean = sum(narrow) / len(narrow)
        varied = sum(torch.square(change - mean) for change in narrow) / len(narrow)
        mask = largest(varied, int(int(varied.count_nonzero()) * select_topk))
        changes = [change * mask for change in changes]
    energy = [float((change * change).sum()) for change in changes]
    weight = [each / sum(energy) if sum(energy) > 0 else 1 / len(xs) for each in energy]
    sign = torch.where(sum(changes) >= 0, 1.0, -1.0).double()
    mixed, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for change, w in zip(changes, weight, strict=True):
        agrees = change.sign() == sign
        mixed += torch.where(agrees, w * change, 0.0)
        divisor += torch.where(agrees, w, 0.0)
    return base + mixed / torch.where(divisor == 0, 1.0, divisor)


def ram(xs, base, epsilon=1e-5, r=0.0, alpha=0.0):
    changes = [x - base for x in xs]
    moved = [change.abs() > epsilon for change in changes]
    count = sum(each.int() for each in moved)
    found = base.clone()
    for change, each in zip(changes, moved, strict=True):
        unique, shared = each & (count == 1), each & (count > 1)
        ratio = int(shared.sum()) / int(unique.sum()) if unique.any() else 0.0
        found += torch.where(unique, (1 + r * min(ratio, alpha)) * change, 0.0)
        found += torch.where(shared, change / count.clamp(min=1), 0.0)
    return found


def ramplus_tl(xs, base, epsilon=1e-5, r=0.1, alpha=0.2):
    return ram(xs, base, epsilon, r, alpha)


def nearswap(xs, base, t):
    distance = (xs[0] - base).abs()
    share = torch.where(distance > 0, (t / torch.where(distance > 0, distance, 1.0)).clamp(0, 1), 0.0)
    return share * xs[0] + (1 - share) * base


def arcee_fusion(xs, base):
    p, q = torch.softmax(xs[0], -1), torch.softmax(base, -1)
    distance = (p * (p / q).log()).sum(-1, keepdim=True).clamp_min(0)
    found = (xs[0] - base).abs() * distance
    ordered, n = found.flatten().sort().values, found.numel()
    low, middle, high = (ordered[int(q * (n - 1))] for q in (0.25, 0.5, 0.75))
    return torch.where(found >= middle + 1.5 * (high - low), xs[0], base)

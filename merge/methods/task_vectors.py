"""Task arithmetic and its kin: every model's change from the base, thinned out, weighed, and summed.

A method of this family is made of two choices: what is dropped of a change, and whether the models vote on signs.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from merge.methods.magnitude_ranks import Cut, Largest, cuts, equal, masked_
from merge.tensor_group import Group, Params, summed, weighted

Thin = Callable[[Group, Params], list[Callable[[Tensor], Tensor]]]  # one for each model, to be fed block after block


def method(thin: Thin | None, vote: bool) -> Callable[[Group, Params], Iterator[Tensor]]:
    def merge(group: Group, p: Params) -> Iterator[Tensor]:
        thinned = thin(group, p) if thin else [_all] * len(group.others)
        weights, total = p["weight"], sum(p["weight"])
        divisor = total if p["normalize"] and abs(total) >= 1e-8 else 1.0
        for base, changes in group.changes():
            weighed = [rule(change).mul_(w) for rule, change, w in zip(thinned, changes, weights, strict=True)]
            mixed = _agreed(weighed, weights, p["normalize"]) if vote else summed(weighed).div_(divisor)
            yield mixed.mul_(p["lambda"]).add_(base)

    return merge


def _agreed(weighed: Sequence[Tensor], weights: Sequence[float], normalize: bool) -> Tensor:
    """Of those that go the way of the sum; a sum of 0 goes up."""
    sign = summed(weighed).add_(0.0)  # which makes a negative zero positive
    sign = torch.ones_like(sign).copysign_(sign)
    same = [each.mul_(sign).clamp_min_(0) for each in weighed]
    total = summed(same).mul_(sign)
    if not normalize:
        return total
    divisor = weighted([each.sign_() for each in same], weights)
    if (least := min(weights)) > 0:
        return total.div_(divisor.clamp_min_(least))  # which changes nothing but a zero
    return total.div_(divisor + equal(divisor, 0))


# -- what is dropped ---------------------------------------------------------------------------------------------------


def by_magnitude(group: Group, p: Params) -> list[Callable[[Tensor], Tensor]]:
    """Keep the largest."""
    if min(p["density"]) >= 1:
        return [_all] * len(group.others)
    wanted = [[int(density * group.size)] for density in p["density"]]
    found = cuts(lambda: _magnitudes(group), group.size, wanted)
    return _rescaled(group, p, lambda: [Largest(cut).kept for (cut,) in found])


def without_outliers(group: Group, p: Params) -> list[Callable[[Tensor], Tensor]]:
    """Keep the largest but for the very largest."""
    wanted = []
    for density, gamma in zip(p["density"], p["gamma"], strict=True):
        keep = int(density * group.size)
        top = min(int(gamma * group.size), group.size - keep)
        wanted.append([top, top + keep])
    found = cuts(lambda: _magnitudes(group), group.size, wanted)
    return _rescaled(group, p, lambda: [_between(top, both) for top, both in found])


def at_random(group: Group, p: Params) -> list[Callable[[Tensor], Tensor]]:
    """Keep each with the same probability; what is kept makes up for what is not."""
    return [
        _dropping(_words(group, model), density, 1 / density if p["rescale"] and density else 1.0)
        for model, density in zip(group.models, p["density"], strict=True)
    ]


def by_rank_at_random(group: Group, p: Params) -> list[Callable[[Tensor], Tensor]]:
    """Keep each with a probability that grows with its rank in its row."""
    settings = zip(group.models, p["density"], p["epsilon"], strict=True)
    return [_by_rank(_words(group, model), density, epsilon, p["rescale"]) for model, density, epsilon in settings]


def _magnitudes(group: Group) -> Iterator[list[Tensor]]:
    return ([change.abs_() for change in changes] for _, changes in group.changes())


def _all(change: Tensor) -> Tensor:
    return change


def _between(top: Cut, both: Cut) -> Callable[[Tensor], Tensor]:
    largest, more = Largest(top), Largest(both)
    return lambda change: more.kept(change) - largest.kept(change)


def _rescaled(
    group: Group, p: Params, rules: Callable[[], list[Callable[[Tensor], Tensor]]]
) -> list[Callable[[Tensor], Tensor]]:
    """On request, what is kept of a change is scaled to the sum of magnitudes that the whole had."""
    if not p["rescale"]:
        return rules()
    sums = torch.zeros(len(group.others), 2, dtype=torch.float64)
    counting = rules()
    for _, changes in group.changes():
        for row, rule, change in zip(sums, counting, changes, strict=True):
            row[0] += change.abs().sum(dtype=torch.float64).cpu()
            row[1] += rule(change).abs().sum(dtype=torch.float64).cpu()
    factors = [float(before / after) if after > 0 else 1.0 for before, after in sums]
    return [_scaled(rule, factor) for rule, factor in zip(rules(), factors, strict=True)]


def _scaled(rule: Callable[[Tensor], Tensor], factor: float) -> Callable[[Tensor], Tensor]:
    return lambda change: rule(change) * factor


def _dropping(words: Callable[[int], np.ndarray], density: float, factor: float) -> Callable[[Tensor], Tensor]:
    if density >= 1:
        return _all
    limit = round(density * 2**32) - 2**31

    def dropped(change: Tensor) -> Tensor:
        keep = torch.from_numpy(words(change.numel()) < limit).view(change.shape).to(change.device)
        return masked_(change, keep).mul_(factor)

    return dropped


def _by_rank(
    words: Callable[[int], np.ndarray], density: float, epsilon: float, rescale: bool
) -> Callable[[Tensor], Tensor]:
    if density >= 1 or density <= 0:
        return lambda change: change * density

    def dropped(change: Tensor) -> Tensor:
        ranks = change.abs().argsort(dim=1, stable=True, descending=True).argsort(dim=1)
        last = max(1, change.shape[1] - 1)
        rising = 1 - ranks / last if change.shape[1] > 1 else torch.full_like(change, 0.5)
        chance = (density - epsilon) + 2 * epsilon * rising
        words_here = torch.from_numpy(words(change.numel())).view(change.shape).to(change.device)
        draw = (words_here.double() + 2**31) / 2**32
        kept = change * (draw < chance)
        return kept / chance if rescale else kept

    return dropped


def _words(group: Group, model: str) -> Callable[[int], np.ndarray]:
    """Random 32-bit numbers: a function of seed, name and model, however many are drawn at once."""
    text = f"{group.seed}\n{group.name}\n{model}".encode()
    source = np.random.SFC64(np.frombuffer(hashlib.sha256(text).digest(), np.uint32).tolist())
    spare = np.empty(0, np.int32)

    def draw(count: int) -> np.ndarray:
        nonlocal spare
        fresh = source.random_raw((max(0, count - len(spare)) + 1) // 2).view(np.int32)
        words = np.concatenate([spare, fresh]) if len(spare) else fresh
        spare = words[count:]
        return words[:count]

    return draw


# -- the family --------------------------------------------------------------------------------------------------------

task_arithmetic = method(None, vote=False)
ties = method(by_magnitude, vote=True)
dare_linear = method(at_random, vote=False)
dare_ties = method(at_random, vote=True)
breadcrumbs = method(without_outliers, vote=False)
breadcrumbs_ties = method(without_outliers, vote=True)
della = method(by_rank_at_random, vote=True)
della_linear = method(by_rank_at_random, vote=False)

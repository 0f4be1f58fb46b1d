"""Merges of merges: what comes before the last one is never written, but made while it is read, tensor by tensor."""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from merge.donor import Donor
from merge.donors import Donors
from merge.engine import MergeOptions, merged
from merge.merge_planning import Job, plan
from merge.merge_recipe import Merge
from merge.tensor_group import in_memory
from merge.weights import Stored


class Staged(Donors):
    """Models by their references; some of these are names of recipes, which may name one another."""

    def __init__(self, recipes: Mapping[str, Merge], models: Donors, how: MergeOptions = MergeOptions()) -> None:
        super().__init__()
        self.recipes, self.models, self.how = recipes, models, how

    def _opened(self, reference: str) -> Donor:
        if reference not in self.recipes:
            return self.models[reference]
        made = plan(self.recipes[reference], self)
        tensors = {job.name: _to_be_merged(job, self.how) for job in made.jobs}
        return Donor(reference, made.leader.folder, made.config, tensors)


def _to_be_merged(job: Job, how: MergeOptions) -> Stored:
    if not job.method:
        return job.others[0]

    def compute() -> Tensor:
        whole, begin = torch.empty(math.prod(job.shape)), 0
        for block in merged(job, how):
            whole[begin : begin + block.numel()].copy_(block.view(-1))
            begin += block.numel()
        return whole

    return lazy(job.shape, job.dtype, compute)


def lazy(shape: tuple[int, ...], dtype: torch.dtype, compute: Callable[[], Tensor]) -> Stored:
    """A tensor that is computed when somebody first reads it, and forgotten when he says that he is done. It is not
    rounded: DTYPE is what it will have in a file."""
    known: list[Tensor] = []

    def rows(begin: int, end: int) -> Tensor:
        there = [*known[:1]] or [compute()]  # another thread may be done with it at any moment
        known[:] = there
        return in_memory(there[0].reshape(shape))(begin, end)

    return Stored(shape, dtype, rows, known.clear)


def over_all(donor: Donor, change: Callable[[str, Tensor], Tensor]) -> Donor:
    """A donor whose every tensor of numbers is seen through a function of its name and itself."""

    def changed(name: str, stored: Stored) -> Stored:
        def compute() -> Tensor:
            try:
                return change(name, stored.read().float())
            finally:
                stored.done()

        return lazy(stored.shape, stored.dtype, compute)

    def each() -> Iterator[tuple[str, Stored]]:
        for name, stored in donor.tensors.items():
            yield name, changed(name, stored) if stored.dtype.is_floating_point else stored

    return Donor(donor.reference, donor.folder, donor.config, dict(each()))

"""What a child of post-training begins as, and what others are given of it: a whole model, or an adapter on the given
one, which everybody has."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.nn.functional import pad

from fleet.scratch import passing
from fleet.work import Work
from merge.engine import one_thread_each
from merge.lora import adapter_merging
from merge.lora.adapter_writing import MatrixJob
from merge.lora.low_rank import low_rank
from train import adapters
from train.adapters import Factors
from train.member import posttraining_genome
from train.member.posttraining_runtime import ChildModel, PosttrainingRuntime, said_of, write_model
from train.posttrain.posttrain_sections import Adapter
from train.recipe_arguments import FIRST, PosttrainChildArgs, RolloutArgs, unique
from train.verdicts import NotFinite

_FRESH = math.sqrt(1 / 3)  # the length of a row of a new adapter's first factor


def child_weights(runtime: PosttrainingRuntime, work: Work, args: RolloutArgs | PosttrainChildArgs) -> "WholeChild":
    return (AdapterChild if runtime.config.travels_as_adapter else WholeChild)(runtime, work, args)


def looked_at(runtime: PosttrainingRuntime, work: Work, id: str) -> tuple[ChildModel, torch.dtype | None]:
    """A member that was made before, and to what its weights are yet to be rounded."""
    member = work.inputs[id]
    if adapters.SETTINGS not in member.files:
        return runtime.take_on(_copy(id), {id: member.folder}), None
    place = f"{work.inputs[FIRST].folder}+{member.folder}"
    return runtime.take_on(_copy(id), {id: place}), runtime.dtype_of(work)


class WholeChild:
    """A whole model: merged, changed, written."""

    child: ChildModel  # that learns

    def __init__(self, runtime: PosttrainingRuntime, work: Work, args: RolloutArgs | PosttrainChildArgs) -> None:
        self.runtime, self.work, self.c, self.parents = runtime, work, runtime.config, work.recipe.parents
        self.dtype = runtime.dtype_of(work)
        self.recipe = posttraining_genome.crossed(self.c, self.parents, work.recipe.genome, args.base)
        self.places = {id: work.inputs[id].folder for id in unique(*self.parents, args.base)}
        self.seed = self.c.seed + args.generation * 4096 + args.slot

    def born(self) -> ChildModel:
        """As its parents made it, before it has learned anything."""
        return self.runtime.take_on(self.recipe, self.places)

    def learning(self) -> Any:
        """What learns."""
        self.child = self.born()
        return self.adapted(self.c.adapter) if self.c.adapter else self.child.live.model

    def adapted(self, adapter: Adapter) -> Any:
        return adapters.adapted(self.child.live.model, adapter, self.seed, self.runtime.device)

    def learned(self, model: Any) -> ChildModel:
        """What came of it."""
        if self.c.adapter and self.c.adapter.four_bits:  # all bits of the weights have to come from the parents again
            self.runtime.dismiss()
            self.child = self.born()
            adapters.merged(model, self.child.live.model)
        elif self.c.adapter:
            adapters.merged(model)
        return self.child

    def write_files(self, child: ChildModel) -> None:
        """Into this attempt's own folder: the execution publishes them."""
        with self.work.folder() as place:
            write_model(place, child.said, child.files(self.dtype), self.runtime.merge_options)


class AdapterChild(WholeChild):
    """An adapter: the child's is what its parents' change, merged and brought to its rank, and goes on learning."""

    @cached_property
    def factors(self) -> Factors:
        found = self.layers.nothing(self.settings.r)
        changed = [id for id in self.parents if adapters.SETTINGS in self.work.inputs[id].files]
        if len(self.parents) > 1:
            found |= {name: each for name, each in self._merged()}
        elif changed:
            found |= safetensors.torch.load(self.work.inputs[changed[0]].read(adapters.WEIGHTS))
        return {name: each.to(self.dtype).contiguous() for name, each in found.items()}

    @property
    def settings(self) -> Adapter:
        assert self.c.adapter  # what it is about
        return self.c.adapter

    @property
    def layers(self) -> adapters.Layers:
        return self.runtime.layers(self.work)

    def born(self) -> ChildModel:
        """Its files are read as others will read them."""
        with passing("adapter") as folder:
            for name, data in self._files().items():
                (folder / name).write_bytes(data)
            return self.runtime.take_on(_copy(FIRST), {FIRST: f"{self.work.inputs[FIRST].folder}+{folder}"})

    def learning(self) -> Any:
        self.child = self.runtime.take_on(_copy(FIRST), {FIRST: self.work.inputs[FIRST].folder})
        model = self.adapted(self.settings)
        adapters.put(model, self.factors)
        return model

    def learned(self, model: Any) -> ChildModel:
        self.factors = adapters.taken(model, self.dtype)
        if not all(bool(each.isfinite().all()) for each in self.factors.values()):
            raise NotFinite(f"its adapter is too large for {self.dtype}")
        if self.settings.four_bits:
            self.runtime.dismiss()
        return self.born()

    def write_files(self, child: ChildModel) -> None:
        for name, data in self._files().items():
            self.work.write(name, data)

    def _files(self) -> dict[str, bytes]:
        return adapters.files_of(self.factors, self.layers, self.settings)

    def _merged(self) -> Iterator[tuple[str, Tensor]]:
        """Any method merges what adapters change: a given model changes nothing."""
        how, said = self.runtime.merge_options, said_of(self.recipe)
        with ExitStack() as stack:
            there = [self._opened(id, stack) for id in self.places]
            jobs = adapter_merging.plan_adapters(said, there, self.settings.r, how).matrices
            with one_thread_each(), ThreadPoolExecutor(how.workers, "decompose") as pool:
                for pair in pool.map(self._decomposed, jobs):
                    yield from pair

    def _opened(self, id: str, stack: ExitStack) -> adapter_merging.Adapter:
        folder = self.places[id]
        if adapters.SETTINGS in self.work.inputs[id].files:
            return replace(adapter_merging.opened(str(folder), stack), reference=id)
        return adapter_merging.Adapter(id, folder, {"fan_in_fan_out": self.layers.turned}, {})

    def _decomposed(self, job: MatrixJob) -> list[tuple[str, Tensor]]:
        """The first factor's rows are as long as a new one's: an optimizer takes steps of one size in both."""
        low, r = low_rank(job.change, job.most), self.settings.r
        a, b = job.pair(low.left, low.right)
        lengths = a.norm(dim=1, keepdim=True)
        a = a / lengths.clamp(min=1e-30) * _FRESH
        b = b * lengths.T / _FRESH / (self.settings.alpha / r)
        more = r - low.rank  # of a narrow matrix
        a, b = pad(a, (0, 0, 0, more)), pad(b, (0, more))
        return [*zip(job.keys, (a.float(), b.float()), strict=True)]


def _copy(id: str) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": id}]}

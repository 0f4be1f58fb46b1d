"""Merges that are never written: a model in memory that takes on the weights of one merge after the other; and merges
of merges, of which what comes before the last one is made while it is read, tensor by tensor."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.errors import first_line
from fleet.scratch import passing
from fleet.untrusted_model import check_words_in
from merge import engine
from merge.donor import Donor, LazyTensor
from merge.donors import Donors
from merge.merge_planning import Plan, TensorJob, plan_merge
from merge.merge_recipe import MergeRecipe
from merge.merging import SETTINGS, TOKENIZER_FILES, furnish
from merge.tensor_files import UserError
from merge.tensor_group import in_memory


@dataclass(frozen=True)
class LiveModel:
    """A model whose weights may be replaced, and its tokenizer."""

    model: Any
    tokenizer: Any
    words: str  # equal for equal tokenizers
    places: Mapping[str, Tensor] | None  # where its weights are; None: they lie otherwise than in files

    def fill(self, plan: Plan, how: engine.MergeOptions) -> None:
        """Take on the weights of a plan, rounded as in files."""
        if self.places is None:
            raise UserError("this model's weights lie otherwise in memory than in files")
        if broken := engine.fill(plan.jobs, self.places, how):
            raise UserError(f"{broken[0]} has numbers that are not finite, or too large for its dtype")


class LiveModels:
    """One model after the other: each as long as what it is to take on has its shape."""

    def __init__(self, device: str, trust: bool = False) -> None:
        self.device, self.trust = device, trust
        self.now: LiveModel | None = None
        self._key = ""

    def shaped(self, said: MergeRecipe, plan: Plan, leave: Callable[[], None], with_model: bool = True) -> LiveModel:
        """A model for a plan, without its weights; whoever else holds the last one is asked to leave it."""
        if self.now is None or self._key != key_of(plan):
            self.now = None  # first out, then in: there may be no room for both
            leave()
            self.now, self._key = furnished(said, plan, self.device, self.trust, with_model), key_of(plan)
        return self.now

    def loaded(self, folder: Path, **more: Any) -> Any:
        """From its files, where weights lie otherwise in memory than in them."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=self.trust, **more)
        return model.eval() if more else model.to(self.device).eval()


def furnished(said: MergeRecipe, plan: Plan, device: str, trust: bool = False, with_model: bool = True) -> LiveModel:
    """A model of a plan's shape, without its weights."""
    with passing("live") as place:
        furnish(place, said, plan, None)
        tokenizer = tokenizer_in(place, plan.leader.reference, trust)
        model = _empty(place, plan, device, trust) if with_model else None
    places = places_in(model, plan) if model is not None else None
    return LiveModel(model if places is not None else None, tokenizer, _words(plan), places)


def tokenizer_in(folder: Path, called: str, trust: bool = False) -> Any:
    from transformers import AutoTokenizer

    check_words_in(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    except Exception as error:  # whatever a tokenizer's files and class can come up with
        raise UserError(f"{called}: its tokenizer cannot be loaded: {first_line(error)}") from None


def key_of(plan: Plan) -> str:
    """Plans with equal keys can take turns in one model."""
    config = {key: value for key, value in plan.config.items() if key not in ("_name_or_path", "transformers_version")}
    dtypes = {job.name: str(job.dtype) for job in plan.jobs}
    several = dtypes if len({*dtypes.values()}) > 1 else [*dtypes.values()][:1]
    return json.dumps([config, _words(plan), several], sort_keys=True)


def _empty(place: Path, plan: Plan, device: str, trust: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(place, trust_remote_code=trust)
    dtypes = {job.dtype for job in plan.jobs if job.method}
    if len(dtypes) > 1:
        return None
    dtype = dtypes.pop() if dtypes else torch.float32
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust)
    model.tie_weights()
    return model.eval()  # weights that ask for no gradient are multiplied with cut inputs in a slower way


def _words(plan: Plan) -> str:
    """Models of equal tokenizers and templates can be asked the same tokens."""
    made = plan.vocabulary
    folder, names = (made.source.folder, SETTINGS) if made else (plan.leader.folder, TOKENIZER_FILES)
    files = [folder / name for name in names]
    found = [hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "-" for file in files]
    return " ".join([made.digest, *found] if made else found)


def places_in(model: Any, plan: Plan) -> Mapping[str, Tensor] | None:
    """Where each tensor of the plan lies in the model; nothing where they are not the very same tensors."""
    state = model.state_dict(keep_vars=True)
    jobs = {job.name: job for job in plan.jobs}
    filled = {state[name].data_ptr() for name in jobs if name in state}
    fits = all(
        name in state and tuple(state[name].shape) == job.shape and state[name].dtype == job.dtype
        for name, job in jobs.items()
    )
    whole = all(tensor.data_ptr() in filled for tensor in state.values())
    return {name: state[name].detach() for name in jobs} if fits and whole else None


# -- merges of merges --------------------------------------------------------------------------------------------------


class Staged(Donors):
    """Models by their references; some of these are names of recipes, which may name one another."""

    def __init__(
        self, recipes: Mapping[str, MergeRecipe], models: Donors, how: engine.MergeOptions = engine.MergeOptions()
    ) -> None:
        super().__init__()
        self.recipes, self.models, self.how = recipes, models, how

    def _opened(self, reference: str) -> Donor:
        if reference not in self.recipes:
            return self.models[reference]
        plan = plan_merge(self.recipes[reference], self)
        tensors = {job.name: _to_be_merged(job, self.how) for job in plan.jobs}
        return Donor(reference, plan.leader.folder, plan.config, tensors)


def _to_be_merged(job: TensorJob, how: engine.MergeOptions) -> LazyTensor:
    if not job.method:
        return job.others[0]

    def compute() -> Tensor:
        whole, begin = torch.empty(math.prod(job.shape)), 0
        for block in engine.merged(job, how):
            whole[begin : begin + block.numel()].copy_(block.view(-1))
            begin += block.numel()
        return whole

    return lazy(job.shape, job.dtype, compute)


def lazy(shape: tuple[int, ...], dtype: torch.dtype, compute: Callable[[], Tensor]) -> LazyTensor:
    """A tensor that is computed when somebody first reads it, and forgotten when he says that he is done. It is not
    rounded: DTYPE is what it will have in a file."""
    known: list[Tensor] = []

    def rows(begin: int, end: int) -> Tensor:
        there = [*known[:1]] or [compute()]  # another thread may be done with it at any moment
        known[:] = there
        return in_memory(there[0].reshape(shape))(begin, end)

    return LazyTensor(shape, dtype, rows, known.clear)


def over_all(donor: Donor, change: Callable[[str, Tensor], Tensor]) -> Donor:
    """A donor whose every tensor of numbers is seen through a function of its name and itself."""

    def changed(name: str, stored: LazyTensor) -> LazyTensor:
        def compute() -> Tensor:
            try:
                return change(name, stored.read().float())
            finally:
                stored.done()

        return lazy(stored.shape, stored.dtype, compute)

    seen = {name: changed(name, each) for name, each in donor.tensors.items() if each.dtype.is_floating_point}
    return replace(donor, tensors={**donor.tensors, **seen})

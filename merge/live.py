"""A model in memory that takes on the weights of one merge after the other."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fleet.plausible_words import check_words_in
from fleet.scratch import passing
from merge import engine, model_folder
from merge.engine import MergeOptions
from merge.files import UserError
from merge.merge_planning import Plan
from merge.merge_recipe import Merge


@dataclass(frozen=True)
class LiveModel:
    """A model whose weights may be replaced, and its tokenizer."""

    model: Any
    tokenizer: Any
    words: str  # equal for equal tokenizers
    places: Mapping[str, torch.Tensor] | None  # where its weights are; None: they lie otherwise than in files

    def fill(self, made: Plan, how: MergeOptions) -> None:
        """Take on the weights of a plan, rounded as in files."""
        if self.places is None:
            raise UserError("this model's weights lie otherwise in memory than in files")
        if broken := engine.fill(made.jobs, self.places, how):
            raise UserError(f"{broken[0]} has numbers that are not finite, or too large for its dtype")


def furnished(said: Merge, made: Plan, device: str, trust: bool = False, with_model: bool = True) -> LiveModel:
    """A model of a plan's shape, without its weights."""
    from transformers import AutoTokenizer

    with passing("live") as place:
        model_folder.furnish(place, said, made, None)
        check_words_in(place)
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust)
        except Exception as error:  # whatever a tokenizer's files and class can come up with
            line = " ".join(str(error).split())[:200]
            raise UserError(f"{made.leader.reference}: its tokenizer cannot be loaded: {line}") from None
        model = _empty(place, made, device, trust) if with_model else None
    places = places_in(model, made) if model is not None else None
    return LiveModel(model if places is not None else None, tokenizer, _words(made), places)


def key_of(made: Plan) -> str:
    """Plans with equal keys can take turns in one model."""
    config = {key: value for key, value in made.config.items() if key not in ("_name_or_path", "transformers_version")}
    dtypes = {job.name: str(job.dtype) for job in made.jobs}
    several = dtypes if len({*dtypes.values()}) > 1 else [*dtypes.values()][:1]
    return json.dumps([config, _words(made), several], sort_keys=True)


def _empty(place: Path, made: Plan, device: str, trust: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(place, trust_remote_code=trust)
    dtypes = {job.dtype for job in made.jobs if job.method}
    if len(dtypes) > 1:
        return None
    dtype = dtypes.pop() if dtypes else torch.float32
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust)
    model.tie_weights()
    return model.eval()  # weights that ask for no gradient are multiplied with cut inputs in a slower way


def _words(made: Plan) -> str:
    """Models of equal tokenizers and templates can be asked the same tokens."""
    if made.vocabulary:
        return f"{made.vocabulary.source.reference} {made.vocabulary.size}"
    files = (made.leader.folder / name for name in model_folder.TOKENIZER_FILES)
    return " ".join(hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "-" for file in files)


def places_in(model: Any, made: Plan) -> Mapping[str, torch.Tensor] | None:
    """Where each tensor of the plan lies in the model; nothing where they are not the very same tensors."""
    state = model.state_dict(keep_vars=True)
    jobs = {job.name: job for job in made.jobs}
    filled = {state[name].data_ptr() for name in jobs if name in state}
    fits = all(
        name in state and tuple(state[name].shape) == job.shape and state[name].dtype == job.dtype
        for name, job in jobs.items()
    )
    whole = all(tensor.data_ptr() in filled for tensor in state.values())
    return {name: state[name].detach() for name in jobs} if fits and whole else None

"""What a worker of post-training keeps in memory: a model that takes on one member after another, and the questions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fleet.run_config import UserError
from fleet.work import NotOnThisMachine, Work
from merge import engine
from merge.donor import LazyTensor
from merge.donors import Donors
from merge.engine import MergeOptions
from merge.json_files import read_json
from merge.live_models import LiveModel, LiveModels, places_in
from merge.merge_planning import Plan, TensorJob, plan_merge
from merge.merge_recipe import MergeRecipe, merge_of, text_of
from merge.merging import SHARD, furnish, merge_into
from merge.tensor_group import in_memory
from train import lm_eval_tasks
from train.adapters import Layers
from train.few_questions import FewQuestions
from train.learner import Learner, best_device
from train.lm_eval_tasks import TaskEvaluation
from train.model import described, without_numbers
from train.posttrain import posttrain_fitness
from train.posttrain.posttrain_config import PosttrainConfig
from train.recipe_arguments import FIRST
from train.training_config import TrainConfig

Recipe = Mapping[str, Any]


class PosttrainingRuntime:
    def __init__(self, config: PosttrainConfig) -> None:
        self.config, self.device = config, best_device()
        self.merge_options = MergeOptions(threads=config.threads, seed=config.seed % (1 << 31))
        self._models = LiveModels(str(self.device), config.trust_remote_code)
        self._learner: Learner | None = None
        self._evaluation: TaskEvaluation | None = None
        self._few: tuple[int, FewQuestions] | None = None
        self._layers: Layers | None = None

    # -- the model ----------------------------------------------------------------------------------------------------

    def take_on(self, recipe: Recipe, places: Mapping[str, Path | str]) -> "ChildModel":
        """The recipe's model, in fp32 and in memory; the next one takes its place."""
        said = said_of({**recipe, "out_dtype": "float32"})
        with Donors(places) as donors:
            plan = plan_merge(said, donors)
            known = self._models.shaped(said, plan, self.dismiss)
            if known.places is not None and self._learner is not None:
                known = replace(known, places=places_in(known.model, plan))  # its weights lie in the learner's vector
            known.fill(plan, self.merge_options)
        return ChildModel(said, plan, known)

    def learner(self, known: LiveModel, config: TrainConfig, objective: Any) -> Learner:
        """For all of the model's weights; the same one for all children of a shape."""
        if self._learner is None:
            self._learner = Learner(known.model, config, self.device, objective)
        return self._learner

    def layers(self, work: Work) -> Layers:
        """That adapters have a place in, of the given model."""
        if self._layers is None:
            assert self.config.adapter  # only then somebody asks
            given, trust = str(work.inputs[FIRST].folder), self.config.trust_remote_code
            self._layers = Layers.of(without_numbers(described(given, trust), trust), self.config.adapter)
        return self._layers

    def dtype_of(self, work: Work) -> torch.dtype:
        """Of members' files."""
        found: torch.dtype = getattr(torch, self.config.dtype or str(work.inputs[FIRST].metrics["dtype"]))
        return found

    def forget(self) -> None:
        """Let go of what the evaluation holds: the model has other weights now."""
        if self._evaluation:
            self._evaluation.forget()

    def dismiss(self) -> None:
        """Let go of the model, and of the memory that it took."""
        self.forget()
        self._models.now = self._learner = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # -- the questions -------------------------------------------------------------------------------------------------

    @cached_property
    def loaded(self) -> dict[str, Any]:
        loaded = posttrain_fitness.load_tasks(self.config)
        if loaded and lm_eval_tasks.digest(loaded) != self.config.tasks_digest:
            raise NotOnThisMachine("the questions of FITNESS are others on this machine than where the run began")
        return loaded

    def evaluation(self, tokenizer: Any) -> TaskEvaluation | None:
        if self._evaluation is None and self.loaded:
            room = self.config.batch_size * self.config.seq_length  # as when it learns, which needs far more
            self._evaluation = TaskEvaluation(posttrain_fitness.asked(self.config), tokenizer, self.loaded, tokens=room)
        return self._evaluation

    def few(self, calibration: Mapping[str, Any], draw: int) -> FewQuestions:
        """A generation is asked the same ones."""
        if self._few is None or self._few[0] != draw:
            items = posttrain_fitness.items(self.config, self.loaded)
            self._few = draw, FewQuestions.of(items, calibration, self.config.seed, draw)
        return self._few[1]


@dataclass(frozen=True)
class ChildModel:
    """A model in memory, and what it was made by."""

    said: MergeRecipe
    plan: Plan
    live: LiveModel

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether its weights are numbers, and stay so in this dtype."""
        return all(engine.fits(each.detach(), dtype) for each in self.live.model.parameters())

    def files(self, dtype: torch.dtype, state: Mapping[str, Tensor] | None = None) -> Plan:
        """Its weights as they are now, or those of its parts, as a plan whose tensors are only to be written."""
        state, jobs = state or self.live.model.state_dict(), list[TensorJob]()
        for job in self.plan.jobs:
            tensor = state[job.name].detach().cpu()
            wanted = dtype if tensor.dtype.is_floating_point else tensor.dtype
            if not bool(tensor.to(wanted).isfinite().all()):
                raise UserError(f"{job.name} has numbers that are not finite, or too large for {dtype}")
            jobs.append(TensorJob(job.name, job.shape, wanted, (LazyTensor(job.shape, wanted, in_memory(tensor)),)))
        key = "dtype" if "dtype" in self.plan.config else "torch_dtype"
        return replace(self.plan, jobs=jobs, config={**self.plan.config, key: str(dtype).removeprefix("torch.")})


def ends_in(folder: Path) -> Any:
    """Of answers, which generation_config.json names: a model that is built by its config.json does not know it."""
    file = folder / "generation_config.json"
    return read_json(file).get("eos_token_id") if file.is_file() else None


# -- members' folders -------------------------------------------------------------------------------------------------


def merged(work: Work, recipe: Recipe, places: Mapping[str, Path], how: MergeOptions) -> None:
    """A merge as the member's files."""
    with work.folder() as place, Donors(places) as donors:
        merge_into(place, said_of(recipe), donors, how)


def write_model(place: Path, said: MergeRecipe, plan: Plan, how: MergeOptions) -> None:
    """A plan whose tensors are only to be written, as a model's folder."""
    engine.write(plan.jobs, place, SHARD, how, lambda bytes: None)
    furnish(place, said, plan, None)


def said_of(recipe: Recipe) -> MergeRecipe:
    return merge_of(recipe, text_of(recipe))

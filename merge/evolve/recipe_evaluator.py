"""What makes candidates: donors that stay in memory, a live model that takes on one recipe after the other, and the
questions that each of them is asked."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fleet.errors import from_home
from fleet.run_config import UserError
from fleet.scratch import passing
from fleet.store import REGISTER_LIMIT
from merge.donor import Donor, LazyTensor, weight_files
from merge.donors import Donors, located, parts_of
from merge.engine import MergeOptions
from merge.evolve import scoring
from merge.evolve.cma_es import Search
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_space import Space
from merge.live_models import LiveModel, LiveModels
from merge.merge_planning import Plan, plan_merge
from merge.merge_recipe import MergeRecipe, merge_of, text_of
from merge.merging import TOKENIZER_FILES, merge_into
from merge.search.search_worker import CandidateEvaluator
from merge.tensor_group import in_memory
from train import lm_eval_tasks
from train.few_questions import Items, asked_for
from train.fitness_from import Interview
from train.lm_eval_tasks import TaskEvaluation
from train.question_marks import Metrics

_MEMORY = Path("/dev/shm")
_GLANCE = 1 << 16  # bytes of a file at each end
_BESIDE = ("config.json", "adapter_config.json", *TOKENIZER_FILES)


class Resident(Donors):
    """Donors that are opened once, wherever they lie now; with a device, their tensors are read once, too."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def know(self, copies: Mapping[str, Path]) -> None:
        """Where models lie beside the search, too: from now on they are read there."""
        for name, place in copies.items():
            if self.places.get(name) != place:  # new, or behind another handle of the disk
                self._open.pop(name, None)
        self.places.update(copies)

    def _opened(self, reference: str) -> Donor:
        donor = super()._opened(reference)
        if not self.device:
            return donor
        return replace(donor, tensors={name: self._read(each) for name, each in donor.tensors.items()})

    def _read(self, stored: LazyTensor) -> LazyTensor:
        tensor = stored.read().to(self.device)
        return LazyTensor(stored.shape, stored.dtype, in_memory(tensor))  # an adapter's sum is wider, and stays so


def files_of(reference: str) -> Iterator[Path]:
    """Whatever is read of a model, and of its adapter: where they were given, not where copies lie."""
    for part, stem in zip(parts_of(reference), ("", "adapter_model"), strict=True):
        if part.endswith(".gguf"):
            yield from_home(part)
        elif part:
            folder = located(part)
            yield from weight_files(folder, stem)[0]
            yield from filter(Path.is_file, (folder / name for name in _BESIDE))


class RecipeEvaluator(CandidateEvaluator[TaskEvaluation]):
    def __init__(self, config: SearchConfig) -> None:
        super().__init__(config.seed, config.fitness_questions)
        torch.set_num_threads(config.threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        merging = device if config.merge_cuda else "cpu"
        self.config, self.live = config, LiveModels(device, config.trust_remote_code)
        self.how = MergeOptions(threads=config.threads, device=merging)
        self.donors = Resident(merging if config.in_memory and not config.buffered else "")
        self._engine: Any = None  # vLLM

    def loaded(self) -> dict[str, Any]:
        return lm_eval_tasks.load(scoring.asked(self.config), self.config.allow_benchmark_tasks)

    def questions_for(self, live: LiveModel) -> TaskEvaluation:
        asked = scoring.asked(self.config)
        return TaskEvaluation(asked, live.tokenizer, self.eval_tasks, self.config.batch_size or None)

    def check(self) -> Metrics:
        """Tasks, metrics, and whether the donors fit together: before anything is merged."""
        scoring.check(self.config, self.eval_tasks)
        layers = self.donors[self.config.genome.models[0]].layers
        if layers is None:
            raise UserError(f"{self.config.genome.models[0]}: its config.json does not say how many layers it has")
        space = Space(self.config.genome, layers)
        recipe = {key: value for key, value in space.recipe(space.start()).items() if key != "dtype"}
        self._check_plan(space)
        said = merge_of(recipe, text_of(recipe))
        plan = plan_merge(said, self.donors)
        for part in self.config.genome.filters:
            if not any(part in job.name for job in plan.jobs):
                some = ", ".join(sorted({job.name.split(".")[-2] for job in plan.jobs})[:12])
                raise UserError(f"genome.filters: {part!r} is in no tensor's name; parts of names are {some}")
        evaluation = self.questions(self._shaped(said, plan))
        if evaluation.chat and not evaluation.tokenizer.chat_template:
            raise UserError("apply_chat_template: the models' tokenizer has no chat template")
        dtypes = {job.dtype for job in plan.jobs if job.method}
        dtype = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else "float32"
        known = {"layers": layers, "dtype": dtype, "coordinates": space.size, "tensors": len(plan.jobs)}
        return {**known, "notes": json.dumps(plan.notes), "digest": self.digest}

    def _check_plan(self, space: Space) -> None:
        """A generation's recipes stand in one register."""
        point, population = space.start(0), Search(tuple(space.start()), 1.0, self.config.population_size, 0).population
        size = population * len(json.dumps([space.recipe(point), point]))
        if size > REGISTER_LIMIT:
            raise UserError(
                f"the plan of a generation of {population} candidates with {space.size} coordinates would take "
                f"{size / 1e6:.0f} MB; at most {REGISTER_LIMIT / 1e6:.0f} are possible: lower the population size, or "
                "raise genome.layer_granularity, or give a few genome.layer_splits instead"
            )

    @cached_property
    def digest(self) -> str:
        """Of what is asked, and of the models as far as a glance shows: with others a search does not go on."""
        found = hashlib.sha256(lm_eval_tasks.digest(self.eval_tasks).encode())
        for file in (file for name in self.config.models for file in files_of(name)):
            with file.open("rb") as opened:
                found.update(f"{file.name} {file.stat().st_size}\n".encode() + opened.read(_GLANCE))
                opened.seek(-min(_GLANCE, file.stat().st_size), 2)
                found.update(opened.read())
        return found.hexdigest()

    def merged(self, recipe: Mapping[str, Any], out: Path) -> int:
        """A candidate in a folder that is there."""
        stats = merge_into(out, merge_of(recipe, text_of(recipe)), self.donors, self.how)
        if broken := [note for note in stats.notes if "not finite" in note]:
            raise UserError(broken[0])
        return stats.written

    def scored(self, recipe: Mapping[str, Any], how: Interview = Interview(), there: Path | None = None) -> Metrics:
        """What became of a candidate, which may be merged already."""
        said = merge_of(recipe, text_of(recipe))
        plan = plan_merge(said, self.donors)
        live = self._shaped(said, plan)
        evaluation = self.questions(live)
        if live.places is not None and not there:
            live.fill(plan, self.how)
            return scoring.scored(self.config, evaluation, live.model, how)
        with ExitStack() as stack:
            if not there:
                there = stack.enter_context(passing("candidate", self._scratch()))
                self.merged(recipe, there)
            return scoring.scored(self.config, evaluation, self._read(there, evaluation), how)

    def items(self) -> Items:
        c = self.config
        parts = lm_eval_tasks.parted(scoring.asked(c), self.eval_tasks, c.holdout)
        return Items(c.tasks, asked_for("validation", parts, c.fitness_from, c.seed))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _shaped(self, said: MergeRecipe, plan: Plan) -> LiveModel:
        c = self.config
        fills = c.in_memory and not (c.buffered or c.vllm or c.quantized)
        return self.live.shaped(said, plan, self.forget, fills)

    def _scratch(self) -> Path | None:
        """Memory, for what only vLLM reads; else the usual place for temporary files."""
        return _MEMORY if self.config.vllm and self.config.in_memory and _MEMORY.is_dir() else None

    def _read(self, place: Path, evaluation: TaskEvaluation) -> Any:
        if self.config.vllm:
            return self._engine_with(place)
        evaluation.forget()
        if not self.config.quantized:
            return self.live.loaded(place)
        from transformers import BitsAndBytesConfig

        how = BitsAndBytesConfig(load_in_8bit=self.config.load_in_8bit, load_in_4bit=self.config.load_in_4bit)
        return self.live.loaded(place, quantization_config=how, device_map=self.live.device)

    def _engine_with(self, place: Path) -> Any:
        """vLLM is started once; later candidates are read into it."""
        if self._engine is None:
            from lm_eval.models.vllm_causallms import VLLM

            trust, size = self.config.trust_remote_code, self.config.batch_size or "auto"
            self._engine = VLLM(str(place), dtype="auto", trust_remote_code=trust, batch_size=size)
        else:
            self._engine.model.collective_rpc("reload_weights", kwargs={"weights_path": str(place)})
            self._engine.model.reset_prefix_cache()  # it remembers what the last candidate thought
        return self._engine

"""The keys of a merge search: the genome file's and the command line's. No torch: whoever only looks waits for none."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from fleet.errors import refuse
from fleet.run_config import FleetConfig, Section, Text, UserError, bound, operational, validated, whole
from merge import strictyaml
from merge.merge_recipe import fields
from train.fitness_config import FEW_ALONE, OF_FITNESS_FROM, OF_FITNESS_QUESTIONS, FitnessFrom

ALGORITHM = "merge-search"
METHODS = Literal[
    "linear", "slerp", "nuslerp", "multislerp", "karcher", "task_arithmetic", "ties", "dare_linear", "dare_ties",
    "breadcrumbs", "breadcrumbs_ties", "della", "della_linear",
]  # fmt: skip
_BASED = ("task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties", "della")
NORMALIZED = ("linear", *_BASED, "della_linear")
_NO_BASE = ("linear", "slerp", "karcher")  # slerp's base is the strongest model of its layers


class MergeGenome(Section):
    """What is searched."""

    models: tuple[Text, ...] = bound(..., "The models to merge.", min_length=2, max_length=64, strict=False)
    merge_method: METHODS = bound(..., "How.")
    base_model: str = bound("", "The base, for methods that have one; not one of the models.")
    tokenizer_source: str = bound("", "As in a recipe.")
    layer_granularity: int = bound(0, "So many layers share their parameters; 0: all do.", ge=0, le=100_000)
    layer_splits: int = bound(
        0, "So many split points are searched, too: between two, layers share parameters.", ge=0, le=100_000
    )
    normalize: bool | None = bound(None, "As in a recipe.")
    allow_negative_weights: bool = bound(False, "Else weights are taken by their absolute value.")
    smooth: bool = bound(False, "Parameters run over the layers, from group to group, instead of jumping.")
    filters: tuple[Text, ...] = bound(
        (), "Parts of tensors' names that have parameters of their own: mlp, self_attn.", max_length=16, strict=False
    )
    dtype: Literal["float32", "bfloat16", "float16"] = bound("float32", "Of inputs before the arithmetic.")
    out_dtype: Literal["", "float32", "bfloat16", "float16"] = bound("", "Of the result; empty: the models' own.")

    @model_validator(mode="after")
    def _check(self) -> "MergeGenome":
        method, base, based = self.merge_method, self.base_model, self.merge_method in (*_BASED, "della_linear")
        no_filters = "it knows no smooth and no filters"
        refuse(
            [
                (based and not base, f"base_model is missing: {method} merges changes of a base"),
                (
                    base and method in _NO_BASE,
                    f"base_model is {base!r}, but {method} has no base; make it one of the models",
                ),
                (base in self.models, f"base_model {base!r} is one of the models: its change of itself is nothing"),
                (len(set(self.models)) < len(self.models), "models: one of them stands there twice"),
                (
                    method == "nuslerp" and len(self.models) != 2,
                    f"models: nuslerp merges two models, here are {len(self.models)}",
                ),
                (
                    method == "slerp" and (self.smooth or self.filters),
                    f"slerp selects two models for each group of layers: {no_filters}",
                ),
                (self.normalize is not None and method not in NORMALIZED, f"{method} knows no normalize"),
                (
                    method in ("slerp", "karcher") and self.allow_negative_weights,
                    f"{method} takes weights by their absolute value: allow_negative_weights has no sense",
                ),
                (len(set(self.filters)) < len(self.filters), "filters: one of them stands there twice"),
                (
                    self.layer_splits and self.layer_granularity,
                    "layer_splits and layer_granularity both say which layers share parameters: one of them is enough",
                ),
                (self.smooth and not self.layer_granularity, "smooth needs a layer_granularity"),
            ]
        )
        return self


class EvalTask(Section):
    """What is scored."""

    name: Text = bound(..., "An lm-eval task or group.")
    weight: float = bound(1.0, "In the score; a negative one minimises.", ge=-1e6, le=1e6)
    metric: Text = bound("acc,none", "As lm-eval names it: metric,filter.")

    @property
    def key(self) -> str:
        """Its name in tables."""
        return f"{self.name}/{self.metric}"


class SearchConfig(FleetConfig):
    """A search. Its storage path is the folder of a run."""

    genome: MergeGenome = bound(..., "What is searched.")
    tasks: tuple[EvalTask, ...] = bound(..., "What is scored.", min_length=1, max_length=64, strict=False)
    limit: int | None = bound(None, "Questions of each task.", ge=1, le=10**7)
    num_fewshot: int | None = bound(None, "Examples in each prompt.", ge=0, le=1000)
    shuffle: bool = bound(False, "Let the seed choose which questions the limit leaves, instead of the first ones.")
    random_init: bool = bound(False, "Begin anywhere, not at equal weights.")
    apply_chat_template: bool | None = bound(None, "By default where the tokenizer has one.")
    fewshot_as_multiturn: bool = bound(True, "With a chat template: examples are turns of the talk.")
    max_fevals: int = bound(100, "Candidates, at most.", ge=1, le=10**6)
    sigma0: float = bound(1 / 6, "How far the first candidates scatter.", gt=0, le=100)
    population_size: int = bound(0, "Candidates of a generation; 0: 4 + 3 ln(coordinates).", ge=0, le=4096)
    seed: int = bound(
        0, "Of the points, of shuffled questions, and of what is held out for the test.", ge=0, le=2**63 - 1
    )
    fitness_from: FitnessFrom = bound("all", OF_FITNESS_FROM)
    fitness_questions: int = bound(0, OF_FITNESS_QUESTIONS, ge=0, le=10**6)
    holdout: float = bound(0.0, "Hold out this share of the questions, to test the winner by at the end.", ge=0, lt=1)
    batch_size: int = bound(0, "Requests at a time; 0: as many as suit the kind of device.", ge=0, le=65536)
    task_path: tuple[Text, ...] = bound(
        (), "A folder with tasks of one's own; may be given several times.", strict=False
    )
    load_in_8bit: bool = bound(False, "Score candidates in 8 bits (bitsandbytes, on a GPU).")
    load_in_4bit: bool = bound(False, "Score candidates in 4 bits (bitsandbytes, on a GPU).")
    vllm: bool = bound(False, "Let candidates answer in vLLM.")
    reshard: bool = bound(
        False, "Copy each model into one file below the storage path first: quicker where models lie on a slow disk."
    )
    buffered: bool = bound(False, "Candidates are merged and scored by different workers.")
    allow_benchmark_tasks: bool = bound(
        False, "Let lm-eval's own tasks be the target: public test sets, whose scores mean nothing afterwards."
    )
    trust_remote_code: bool = bound(False, "Let models run code of their own.")
    in_memory: bool = operational(True, "Build candidates in a model that stays in memory, instead of folders.")
    merge_cuda: bool = operational(False, "Merge on the GPU.")

    @model_validator(mode="before")
    @classmethod
    def _older(cls, values: Any) -> Any:
        """A race was a key of its own."""
        if not isinstance(values, dict) or "race" not in values:
            return values
        found = {key: value for key, value in values.items() if key != "race"}
        return {**found, "fitness_from": "racing"} if values["race"] else found

    @model_validator(mode="after")
    def _check(self) -> "SearchConfig":
        keys, weights = {task.key for task in self.tasks}, [task.weight for task in self.tasks]
        refuse(
            [
                (len(keys) < len(self.tasks), "tasks: one of them stands there twice with the same metric"),
                (not any(weights), "tasks: all weights are 0, so that every score would be 0"),
                (self.fitness_questions and self.fitness_from != "irt", f"--fitness-questions: {FEW_ALONE}"),
                (0 < self.population_size < 3, "population_size: CMA-ES needs at least 3 candidates of a generation"),
            ]
        )
        return self

    @property
    def models(self) -> list[str]:
        """All that are merged, the base last."""
        return [*self.genome.models, *([self.genome.base_model] if self.genome.base_model else [])]

    @property
    def quantized(self) -> bool:
        return self.load_in_8bit or self.load_in_4bit


IN_FILE = "genome tasks limit num_fewshot shuffle random_init apply_chat_template fewshot_as_multiturn"


def read(path: Path, options: Mapping[str, Any]) -> SearchConfig:
    """The genome file and the command line's options as one record; models that lie here by their absolute paths."""
    try:
        given = fields(strictyaml.parse(strictyaml.read(path)), "the file", IN_FILE)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(given.get("genome"), dict) or not given.get("tasks"):
        raise UserError(f"{path}: `genome:` and `tasks:` are expected; docs/merge-search.md has examples")
    if not isinstance(given["tasks"], list):
        raise UserError(f"{path}: tasks: a list is expected, of names or of {{name, weight, metric}}")
    said = {key: each for key, each in given["genome"].items() if each is not None}
    genome = validated(MergeGenome, said, f"{path}: genome", str)
    tasks = [_task(each, f"{path}: tasks, number {n}") for n, each in enumerate(given["tasks"], 1)]
    models, base = tuple(whole(each, Path()) for each in genome.models), whole(genome.base_model, Path())
    known = genome.model_copy(update={"models": models, "base_model": base})
    more = {**given, "genome": known.model_dump(), "tasks": [task.model_dump() for task in tasks]}
    validated(SearchConfig, more, str(path), str)  # what is wrong by itself; the rest comes of the options
    return validated(SearchConfig, {**more, **options}, "the command line", _option)


def _option(key: str) -> str:
    """What a key is called there."""
    named = {"seed": "random-seed", "task_path": "task-search-path", "time_limit_hours": "timeout"}
    return f"--{named.get(key, key.replace('_', '-'))}"


def _task(value: Any, where: str) -> EvalTask:
    value = {"name": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise UserError(f"{where}: a name, or name, weight and metric, is expected")
    return validated(EvalTask, value, where, str)

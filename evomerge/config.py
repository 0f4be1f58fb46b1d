"""What a tournament is told: records that people edit in place, checked at every assignment. No torch."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fleet.places import here
from fleet.run_config import FleetConfig, Metrics, Text, UserError, bound, lowered, read_json, validated
from train.fitness_config import FEW_ALONE, OF_FITNESS_FROM, OF_FITNESS_QUESTIONS, FitnessFrom

MergeSpace = Literal["ps", "dfs", "ps_dfs"]
Technique = Literal["linear", "slerp", "ties", "dare", "frankenmerge", "dfs"]

BUILTIN = "builtin:"
BITS = "bits per byte"
SPECIALISTS = ("code", "prose", "names")
STAGES: Mapping[str, tuple[Technique, ...]] = {
    "first": ("linear", "slerp"),
    "second": ("ties", "dare"),
    "third": ("frankenmerge", "dfs"),
}
TECHNIQUES = tuple(each for stage in STAGES.values() for each in stage)
_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob)/([^/?#]+))?[^ ]*")
_LONGEST = 200  # characters of a name
_PLAIN = re.compile(rf"[^\x00-\x1f\x7f]{{1,{_LONGEST}}}")


class Editable(BaseModel):
    """Fields may be assigned; each assignment is checked."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid", allow_inf_nan=False)


class ModelReference(Editable):
    """A model: what it is called here, and where it is: a folder, a .gguf file, a hub id or a link to its page."""

    name: str = Field("", description="What it is called here; by default the last part of its path.")
    path: str = Field(..., description="A folder, a .gguf file, a hub id, or a link to a model's hub page.")

    def __init__(self, name: str = "", path: str | Path = "", **more: Any) -> None:
        super().__init__(**{"name": name, "path": str(path), **more})

    @field_validator("path")
    @classmethod
    def _located(cls, path: str) -> str:
        if page := _PAGE.fullmatch(path.strip()):
            path = page[1] + (f"@{page[2]}" if page[2] and page[2] != "main" else "")
        if not path.strip() or "\0" in path or path.startswith(("http://", "https://")):
            raise ValueError("a folder, a .gguf file, a hub id or a link to a model's hub page is expected")
        return path.strip()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        values = {"path": values} if isinstance(values, str) else values
        if isinstance(values, dict) and not values.get("name"):
            path = str(values.get("path", "")).rstrip("/")
            return {**values, "name": re.split(r"[/:]", path.removesuffix(".gguf"))[-1][:_LONGEST]}
        return values

    @field_validator("name")
    @classmethod
    def _readable(cls, name: str) -> str:
        if not _PLAIN.fullmatch(name):
            raise ValueError(f"a name of up to {_LONGEST} characters is expected, without control characters")
        return name

    @property
    def builtin(self) -> str:
        """Which of the default models it is; empty: none."""
        return self.path.removeprefix(BUILTIN) if self.path.startswith(BUILTIN) else ""


class MergeSettings(Editable):
    """How models are merged."""

    merge_method: MergeSpace = Field(
        "ps_dfs",
        description="ps, parameter space: weights are combined; dfs, data flow space: layers are stacked; "
        "ps_dfs: both in turn.",
    )
    techniques: tuple[Technique, ...] = Field(
        TECHNIQUES, description="Of these each stage takes one: linear or slerp, ties or dare, frankenmerge or dfs."
    )
    base_model: ModelReference | None = Field(
        None, description="What the models were fine-tuned from, for ties and dare. None: the mean of the models."
    )
    density: float = Field(0.7, gt=0, le=1, description="The share of changes that ties and dare keep at first.")
    points: int = Field(
        3, ge=1, le=64, description="So many values each weight has, spread from the first to the last layer."
    )
    longest_path: float = Field(
        1.5, ge=1, le=8, description="So many times the models' layers a path may have at most."
    )
    dtype: Literal["", "float32", "bfloat16", "float16"] = Field(
        "", description="Of merged models; empty: the models' own."
    )
    trust_remote_code: bool = Field(False, description="Let models run code of their own.")

    @field_validator("techniques")
    @classmethod
    def _once(cls, techniques: tuple[str, ...]) -> tuple[str, ...]:
        if not techniques:
            raise ValueError(f"at least one of {', '.join(TECHNIQUES)} is needed")
        return tuple(dict.fromkeys(techniques))

    def of_stage(self, stage: str) -> list[str]:
        """The techniques that are allowed, in the order of the stage."""
        wanted = {"ps": ("first", "second"), "dfs": ("third",)}.get(self.merge_method, tuple(STAGES))
        return [each for each in STAGES[stage] if each in self.techniques and stage in wanted]


class EvolutionSettings(Editable):
    """How merged models compete."""

    population_size: int = Field(8, ge=2, le=256, description="Merged models of a generation.")
    num_generations: int = Field(8, ge=1, le=10_000, description="The most there will be.")
    patience: int = Field(5, ge=1, le=10_000, description="Generations without a better model, after which it ends.")
    tournament_size: int = Field(3, ge=1, le=256, description="So many compete for each place among the parents.")
    selection: Literal["score", "niches"] = Field(
        "score",
        description="Who wins a tournament. niches: by score, but what a question or passage brings is divided among "
        "those who solve it.",
    )
    mates: Literal["lower half", "attraction"] = Field(
        "lower half",
        description="Who are merged with each other. attraction: a winner and somebody who solves what it does not.",
    )
    elite: int = Field(2, ge=1, le=255, description="So many of the best go on unchanged.")
    mutation_rate: float = Field(0.5, gt=0, le=1, description="How likely each coefficient or layer is mutated.")
    mutation_strength: float = Field(0.3, gt=0, le=10, description="How far.")
    weight_noise: float = Field(
        0.0, ge=0, le=1, description="Noise on mutants' weights, in parts of each tensor's spread; 0: none."
    )
    seed: int = Field(1, ge=0, le=2**63 - 1, description="Where all randomness begins.")

    @property
    def compares_questions(self) -> str:
        """Why models are compared question by question; empty: they are not."""
        return "mates attraction" if self.mates == "attraction" else "selection niches" * (self.selection == "niches")


class TaskSettings(Editable):
    """A task of lm-eval."""

    name: str = Field(..., min_length=1, description="Its name.")
    metric: str = Field("acc,none", min_length=1, description="What counts of it.")
    weight: float = Field(1.0, ge=-1e6, le=1e6, description="Its share of the score; negative where less is better.")

    @property
    def key(self) -> str:
        """Its name among objectives."""
        return self.name if self.metric == "acc,none" else f"{self.name}:{self.metric}"


class EvaluationSettings(Editable):
    """What makes one model better than another."""

    text: str = Field("", description="A .txt, .jsonl or .parquet file; empty: built-in text of three kinds.")
    text_field: str = Field("text", min_length=1, description="The field that holds a document.")
    passages: int = Field(
        64,
        ge=8,
        le=100_000,
        description="Passages for validation, and as many for the test, if the text has so many.",
    )
    text_weight: float = Field(
        1.0, ge=0, le=1e6, description="The text's share of the score, in bits per byte; 0: none."
    )
    tasks: list[TaskSettings] = Field(
        [], description="Tasks of lm-eval that count, too; or in one text: name[:weight],name[:weight]."
    )
    task_path: list[str] = Field([], description="Folders with tasks of one's own.")
    limit: int | None = Field(None, ge=2, description="Questions of a task.")
    num_fewshot: int | None = Field(None, ge=0, description="Examples in prompts.")
    fitness_from: FitnessFrom = Field("all", description=OF_FITNESS_FROM)
    fitness_questions: int = Field(0, ge=0, le=1_000_000, description=OF_FITNESS_QUESTIONS)
    holdout: float = Field(
        0.3, ge=0, lt=1, description="The share of a task's questions that is held out for the test at the end."
    )
    allow_benchmark_tasks: bool = Field(
        False, description="Let lm-eval's own tasks be the target: public test sets, whose scores mean nothing then."
    )
    batch_tokens: int = Field(0, ge=0, le=1 << 24, description="Tokens of a batch; 0: what suits the device.")

    @field_validator("tasks", mode="before")
    @classmethod
    def _listed(cls, tasks: Any) -> Any:
        if not isinstance(tasks, str):
            return tasks
        parts = [each.strip().partition(":") for each in tasks.split(",")]
        try:
            return [TaskSettings(name=name, weight=float(weight or 1)) for name, _, weight in parts]
        except ValueError:
            raise ValueError("name or name:weight is expected") from None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.tasks and not self.text_weight:
            raise ValueError("text_weight is 0 and there are no tasks: nothing says which model is better")
        if self.fitness_from != "all" and not self.tasks:
            raise ValueError(f"fitness_from {self.fitness_from} is about the questions of tasks, and there are none")
        if self.fitness_questions and self.fitness_from != "irt":
            raise ValueError(f"fitness_questions: {FEW_ALONE}")
        return self


class Configuration(Editable):
    """All of it."""

    models: list[ModelReference] = Field(..., min_length=2, max_length=16)
    merge_settings: MergeSettings = Field(default_factory=MergeSettings)
    evolution_settings: EvolutionSettings = Field(default_factory=EvolutionSettings)
    evaluation_settings: EvaluationSettings = Field(default_factory=EvaluationSettings)
    out: str = Field("runs/evomerge", min_length=1, description="The folder of the tournament; the same one goes on.")
    workers: int = Field(0, ge=0, le=1024, description="Models at a time; 0: as many as processors or GPUs allow.")
    threads: int = Field(1, ge=1, le=1024, description="Of one worker.")
    machines: str = Field("", description="A machines.json, to work on other machines that share the disk of `out`.")
    ssh_config: str = Field("", description="For machines: another SSH client configuration than ~/.ssh/config.")
    metrics: tuple[Metrics, ...] = Field(
        ("csv",), description="Where metrics go: csv always, and whichever of the others are named."
    )
    wandb_project: str = Field(
        "", description="Of metrics wandb; empty: WANDB_PROJECT in the environment, or evomerge."
    )
    wandb_entity: str = Field("", description="Of metrics wandb: its owner; empty: whoever is logged in.")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Of workers' logs and ours.")

    @field_validator("models")
    @classmethod
    def _each_once(cls, models: list[ModelReference]) -> list[ModelReference]:
        for key in ("name", "path"):
            there = [getattr(each, key) for each in models]
            if twice := next((each for each in there if there.count(each) > 1), ""):
                raise ValueError(f"two models have the {key} {twice!r}")
        return models

    @property
    def base(self) -> ModelReference | None:
        """What the models were fine-tuned from, if anybody knows."""
        of_defaults = ModelReference("base", BUILTIN + "base") if all(model.builtin for model in self.models) else None
        return self.merge_settings.base_model or of_defaults

    @property
    def folder(self) -> Path:
        return here(Path(self.out))

    def save(self, path: Path | str) -> None:
        Path(path).write_text(
            json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, path: Path | str) -> "Configuration":
        """From a JSON file; what it does not name is as in `create_default_config()`."""
        value = read_json(Path(path))
        if not isinstance(value, dict):
            raise UserError(f"{path}: an object is expected, {{...}}")
        given = lowered(value, str(path))
        given["models"] = given.get("models") or default_models()
        return validated(cls, given, str(path), spelled=str)


def default_models() -> list[ModelReference]:
    """Three small specialists of one base, which are trained here when they are first needed."""
    return [ModelReference(name, BUILTIN + name) for name in SPECIALISTS]


def model_at(path: str) -> ModelReference:
    """As people give one in a command."""
    return validated(ModelReference, {"path": path}, f"model {path}", spelled=str)


def create_default_config() -> Configuration:
    return Configuration(models=default_models())


def with_models(config: Configuration, given: Sequence[str]) -> Configuration:
    """The first so many models replaced; an empty text keeps the one that is there."""
    there = [*config.models, *default_models()][: max(3, len(config.models))]
    replaced = [model_at(path) if path else each for path, each in zip(given, there, strict=False)]
    models, names = [*replaced, *there[len(given) :]], set[str]()
    for each in models:
        name, n = each.name, 2
        while each.name in names:
            each.name, n = f"{name}-{n}", n + 1
        names.add(each.name)
    folders = [os.path.realpath(each.path) if os.path.exists(each.path) else each.path for each in models]
    if twice := [one.path for n, one in enumerate(models) if folders[n] in folders[:n]]:
        raise UserError(f"{twice[0]} is given twice; each model should be another one")
    config.models = models
    return config


class TournamentConfig(FleetConfig):
    """A tournament as a run is bound to it."""

    models: tuple[ModelReference, ...] = bound(..., "The models to merge.", strict=False)
    merge_settings: MergeSettings = bound(..., "How they are merged.")
    evolution_settings: EvolutionSettings = bound(..., "How merged models compete.")
    evaluation_settings: EvaluationSettings = bound(..., "What makes one better.")
    text_digest: Text = bound("none", "Of the text; found out by whoever starts the run.")

    @property
    def rounds(self) -> int:
        """Generations, with irt the finals, and the held-out test."""
        return self.evolution_settings.num_generations + (self.evaluation_settings.fitness_from == "irt") + 1

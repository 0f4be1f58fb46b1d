"""What edt.py and diloco.py are on the command line: checked first, then run, then a model that others can load."""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from fleet.config import UserError, whole
from fleet.errors import absolute, first_line
from fleet.fork import Carried
from fleet.method import Method
from fleet.plain import say
from fleet.recipe import Strategy
from fleet.start import main
from fleet.work import Maker
from train.config import TrainConfig
from train.parent_selection import BY_LOSS
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain_results import BreedView
from train.posttrain_results import finished as finished_breeding

_MOST = 1 << 20  # files that DiLoCo writes in a round, names of parents in a plan of EDT: a plan is one register
_SKILL, _SEED, _QUESTIONS = "skill_", 1, 1200  # of each task that is built in


def run(algorithm: str, about: str | None, strategy: Callable[[TrainConfig], Strategy], *others: Method[Any]) -> None:
    make = partial(_maker, "train.member.pretrained")
    main(Method(algorithm, about or "", TrainConfig, strategy, make, prepared, finished, forked=_forked), others=others)


def breeding(algorithm: str, about: str | None, strategy: Any) -> Method[PosttrainConfig]:
    make = partial(_maker, "train.member.posttrained")
    more = (prepared_breeding, finished_breeding)
    return Method(algorithm, about or "", PosttrainConfig, strategy, make, *more, view=BreedView)


def _maker(module: str, config: Any) -> Maker:
    """From a module that takes a while to import."""
    made: Maker = importlib.import_module(module).maker(config)
    return made


def finished(config: TrainConfig, folder: Path) -> None:
    from train.export import Exporter, show

    show(Exporter(folder), "average", folder / "export")


def _forked(*asked: Any) -> Carried:
    from train.forking import forked  # which waits for torch

    return forked(*asked)


def refuse(*problems: tuple[object, str]) -> None:
    """Say the first one that there is."""
    if found := next((what for there, what in problems if there), ""):
        raise UserError(found)


def _located(sources: tuple[Any, ...], where: Path, endings: tuple[str, ...]) -> tuple[Any, ...]:
    """Local files by their whole paths, from the configuration's folder on: workers may be anywhere."""
    return tuple(each.model_copy(update={"source": whole(each.source, where, endings)}) for each in sources)


# -- pre-training ------------------------------------------------------------------------------------------------------


def prepared(config: TrainConfig, where: Path) -> TrainConfig:
    """Complain about what cannot work before anything is trained; find out what the run is to be bound to."""
    from train import text
    from train.member.prepare import check_text, tokenizer_sources

    models = (whole(each, where) if isinstance(each, str) else each for each in config.initial_population)
    found = {
        "datasets": _located(config.datasets, where, text.FILES),
        "initial_population": tuple(models),
        "tokenizer": whole(config.tokenizer, where),
    }
    config = config.model_copy(update=found)
    if config.algorithm == "edt":
        _check_evolution(config)
    shards, size = config.shard_count, config.population_size
    too_many = config.algorithm == "diloco" and shards * size > _MOST
    refuse((too_many, f"SHARDS is {shards}: {_many('files', shards, size)}"))
    for source in config.datasets:
        text.check(source)
    _check_rounds(config)
    _check_batches(config)
    _check_models(config)
    if not (where / config.base_dir / config.project_name / "run.json").is_file():
        check_text(config)
    of_python = any(text.kind_of(each).of_python for each in (*config.datasets, *tokenizer_sources(config)))
    return config.model_copy(update={"stdlib_digest": text.stdlib_digest() if of_python else ""})


def _check_evolution(config: TrainConfig) -> None:
    size, group, selection = config.population_size, config.parents_of_a_child, config.selects
    by_loss, rules = config.selects_by_fitness, f"{', '.join(BY_LOSS[:-1])} or {BY_LOSS[-1]}"
    equally = f"with SELECTION {selection} everybody is a parent equally often; use {rules}, or 0"
    powers = f"powers of two, not POPULATION_SIZE {size} and GROUP_SIZE {group}"
    refuse(
        (size < group, f"POPULATION_SIZE is {size}, smaller than a group of GROUP_SIZE {group}"),
        (
            by_loss and config.elitism >= size,
            f"ELITISM is {config.elitism}: it must be below POPULATION_SIZE, which is {size}",
        ),
        (
            by_loss and group * size > _MOST,
            f"GROUP_SIZE is {group}: {_many('parents', group, size)}, where fitness decides",
        ),
        (not by_loss and config.elitism, f"ELITISM is {config.elitism}, but {equally}"),
        (
            not by_loss and config.previous_generation,
            f"PREVIOUS_GENERATION needs SELECTION {rules}, not {selection}",
        ),
        (not by_loss and size % group, f"POPULATION_SIZE is {size}, not a multiple of GROUP_SIZE {group}"),
        (
            selection == "hypercube" and (size & (size - 1) or group & (group - 1)),
            f"SELECTION hypercube needs {powers}",
        ),
    )


def _many(what: str, each: int, population: int) -> str:
    return f"{each * population:,} {what} a round with POPULATION_SIZE {population}; at most {_MOST:,} are possible"


def _check_rounds(config: TrainConfig) -> None:
    """Rounds that end before they have grown are not what INNER_STEPS says."""
    last, wanted = config.max_generations, config.inner_steps
    if config.steps_in(last) < wanted:
        need = next(round for round in count(last) if config.steps_in(round) == wanted)
        raise UserError(
            f"MAX_GENERATIONS is {last}: rounds grow from FIRST_INNER_STEPS {config.first_inner_steps} to INNER_STEPS "
            f"{wanted}, which round {need} is the first to have; raise MAX_GENERATIONS or FIRST_INNER_STEPS, or lower "
            "INNER_STEPS"
        )


def _check_batches(config: TrainConfig) -> None:
    devices, rows = config.devices_per_worker, config.batch_size
    near = max(devices, round(rows / devices) * devices)
    several = f"with DEVICES_PER_WORKER {devices} it must be a multiple of that, such as {near}"
    unknown = not any(each.evaluated for each in config.datasets)
    refuse(
        (unknown, "DATASETS: none is evaluated; without held-out text there is no loss to tell"),
        (rows % devices, f"BATCH_SIZE is {rows}: {several}"),
    )


def _check_models(config: TrainConfig) -> None:
    from train.member.prepare import named_tokenizer, tokenizer_name
    from train.model import can_be_built, described

    for entry in config.initial_population:
        can_be_built(entry, config.trust_remote_code)
        most = getattr(described(entry, config.trust_remote_code), "max_position_embeddings", None)
        short = isinstance(most, int) and config.seq_length > most
        refuse((short, f"SEQ_LENGTH is {config.seq_length}, but model {entry!r} has {most} positions"))
    several = len(config.initial_population) > 1 and config.algorithm == "diloco"
    refuse((several, "INITIAL_POPULATION: DiLoCo begins with one model"))
    if named := tokenizer_name(config):
        try:
            named_tokenizer(named, config.trust_remote_code)
        except Exception as error:  # whatever a hub, a network and a tokenizer's class can come up with
            raise UserError(f"tokenizer {named!r}: cannot be loaded: {first_line(error)}") from None


# -- post-training -----------------------------------------------------------------------------------------------------


def prepared_breeding(config: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Complain about what cannot work before anything is made."""
    from merge.donors import Donors
    from train import tasks
    from train.member import first_members
    from train.model import described
    from train.posttrain import posttrain_fitness

    c = _absolute(config, where)
    loaded = posttrain_fitness.load_tasks(c)
    with Donors() as donors:
        first, *others = (donors[name] for name in c.models)
        for each in (first, *others):
            described(str(each.folder), c.trust_remote_code)
        notes = [note for each in others for note in first_members.check_alike(first, each)]
        first_members.check_crossover(c, donors)
        first_members.check_learning(c, first, first_members.common_template([first, *others]))
    for note in [*dict.fromkeys(notes), *_few(c, loaded)]:
        say(f"Note: {note}.")
    return c.model_copy(update={"tasks_digest": tasks.digest(loaded) if loaded else ""})


def _few(c: PosttrainConfig, loaded: Mapping[str, Any]) -> list[str]:
    """Where a task has fewer questions than are to be asked."""
    from train.tasks import validation_count

    there = {name: len(task.eval_docs) for name, task in loaded.get("tasks", {}).items()}
    asked = {name: validation_count(name, count, c.holdout) for name, count in there.items()}
    few = {name: count for name, count in asked.items() if count < c.questions}
    return [f"task {n}: {k} questions are for validation, {there[n] - k} for the test" for n, k in few.items()]


def _absolute(c: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Local files as they are found from anywhere. Built-in models and questions are made beside the run."""
    from train.text import ROW_FILES

    endings, beside = (*ROW_FILES, ".gguf"), absolute(where / c.base_dir)
    models = [whole(name, where, endings) for name in _started(c.initial_population, beside)]
    base = {"base_model": whole(c.base_model, where, endings)} if c.base_model else {}
    tasks = (whole(folder, where, endings) for folder in c.task_path)
    found = {
        "initial_population": tuple(models),
        "mutation_datasets": _located(c.mutation_datasets, where, endings),
        "crossover": {**c.crossover, **base},
        "task_path": (*tasks, *_built_in_tasks(c, beside)),
    }
    return c.model_copy(update=found)


def _started(names: tuple[str, ...], beside: Path) -> list[str]:
    """`skill:compare` is a small model that has one of the built-in skills, and is trained once."""
    from train.skills import PREFIX

    asked = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    if not asked:
        return list(names)
    from train.starters import NAMES, starters

    unknown, there = [name for name in asked if name not in NAMES], ", ".join(PREFIX + name for name in NAMES)
    refuse((unknown, f"INITIAL_POPULATION: there is no {PREFIX}{unknown[0] if unknown else ''}; there are {there}"))
    made = starters(beside / "starters")
    return [str(made[name.removeprefix(PREFIX)]) if name.startswith(PREFIX) else name for name in names]


def _built_in_tasks(c: PosttrainConfig, beside: Path) -> list[str]:
    """The questions of the built-in skills."""
    from train.skills import write_tasks

    if not any(each.task.startswith(_SKILL) for each in c.fitness):
        return []
    write_tasks(beside / "skills", _SEED, _QUESTIONS)
    return [str(beside / "skills")]

"""What edt.py and diloco.py are on the command line: checked first, then run, then a model that others can load."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fleet.busy_notice import loading
from fleet.errors import absolute, refuse
from fleet.method import Method
from fleet.places import beside, here
from fleet.plain import say
from fleet.recipe import Strategy
from fleet.run import begun as run_begun
from fleet.run_config import UserError, whole
from fleet.start import main
from train import lm_eval_tasks, source_names, text_sources
from train.auto_settings import resolve_auto
from train.exchange_checks import exchange_problems, fewest_to_begin_with
from train.member.counted_text import check_text, counted, in_words, refuse_short
from train.posttrain import posttrain_fitness
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import GYM
from train.posttrain_results import BreedView, show_winner
from train.recipe_arguments import OFF_DEVICE
from train.rl import reward_curves
from train.rl.verifier import digest_of
from train.skills import PREFIX, write_tasks
from train.token_budget import tokenizer_name, tokenizer_sources
from train.training_config import PRESETS, PRESETS_REACH, TrainConfig

_SKILL, _SEED, _QUESTIONS = "skill_", 1, 1200  # of each task that is built in


def run(algorithm: str, about: str | None, strategy: Callable[[TrainConfig], Strategy], *others: Method[Any]) -> None:
    make, forked = (partial(_late, *each) for each in (("member.pretraining_tasks", "maker"), ("forking", "forked")))
    more: dict[str, Any] = {"forked": forked, "slots": lambda config: config.population_size, "off_device": OFF_DEVICE}
    more["libraries"] = ("train.member.pretraining_tasks",)
    steps = (prepare, resolve_auto, show_result, preview)
    main(Method(algorithm, about or "", TrainConfig, strategy, make, *steps, **more), others=others)


def breeding(
    algorithm: str, about: str | None, strategy: Any, tasks: str = "member.posttraining_tasks"
) -> Method[PosttrainConfig]:
    make, libraries = partial(_late, tasks, "maker"), (f"train.{tasks}",)
    steps = (prepare_breeding, resolve_auto, show_winner)
    more: dict[str, Any] = {"view": BreedView, "libraries": libraries, "points": reward_curves.points}
    return Method(algorithm, about or "", PosttrainConfig, strategy, make, *steps, **more)


def _late(module: str, function: str, *asked: Any) -> Any:
    """From a module that takes a while to import."""
    with loading():
        found = importlib.import_module(f"train.{module}")
    return getattr(found, function)(*asked)


def show_result(config: TrainConfig, folder: Path) -> None:
    with loading("what exports the model", say):
        from train.pretraining_export import Exporter, show

    show(Exporter(folder), "average", beside(folder) / "export")


def _located(sources: tuple[Any, ...], where: Path, endings: tuple[str, ...]) -> tuple[Any, ...]:
    """Local files by their whole paths, from the configuration's folder on: workers may be anywhere."""
    return tuple(each.model_copy(update={"source": whole(each.source, where, endings)}) for each in sources)


# -- pre-training ------------------------------------------------------------------------------------------------------


def prepare(config: TrainConfig, where: Path, tell: Callable[[str], object] = say) -> TrainConfig:
    """Complain about what cannot work before anything is trained; find out what the run is to be bound to."""
    chosen, config = not config.first_inner_steps, resolve_auto(found_from(config, where), where)
    check_settings(config)
    source_names.check([each.source for each in config.datasets], where)
    for source in config.datasets:
        text_sources.check(source)
    _check_models(config)
    if not run_begun(here(Path(config.base_dir), where) / config.project_name):
        for source in config.datasets:
            text_sources.check_keys(source)
        check_text(config, tell)
        for note in filter(None, (chosen and _long_first(config), slow_start(config))):
            tell(f"Note: {note}.")
    of_python = any(text_sources.kind_of(each).of_python for each in (*config.datasets, *tokenizer_sources(config)))
    found_out = {"stdlib_digest": text_sources.stdlib_digest() if of_python else "", "betas": config.adamw_betas}
    return config.model_copy(update=found_out)


def preview(config: TrainConfig, where: Path) -> Iterator[str]:
    """How many tokens each source has, and how many the run needs; or why it would be refused."""
    config = found_from(config, where)
    check_settings(config)
    for source in config.datasets:
        text_sources.check(source)
        text_sources.check_keys(source)
    counts = [*counted(config, whole=True)]
    refuse_short(config, counts)
    return in_words(counts)


def check_settings(config: TrainConfig) -> None:
    """Complain about what cannot work whatever the files say that it names."""
    refuse(_problems(config))


def _long_first(config: TrainConfig) -> str:
    """Where rounds are too few to grow from a single step."""
    first, wanted, rounds = config.first_inner_steps, config.inner_steps, config.max_generations
    short = f"from fewer, {rounds} rounds do not grow to INNER_STEPS {wanted}"
    return f"the first round has {first} steps (FIRST_INNER_STEPS): {short}" if first > 1 else ""


def slow_start(config: TrainConfig) -> str:
    """Where the rate rises for more than a tenth of all steps, how many would do; a fork has risen already."""
    steps = config.total_steps
    if config.forked or config.warmup_steps <= steps / 10:
        return ""
    long = f"{config.warmup_steps} of {steps} steps"
    if config.warmup_steps >= steps:
        long = f"{config.warmup_steps} steps, and the run has {steps}"
    return f"the rate rises for {long}: WARMUP_STEPS {steps // 20}"


def found_from(config: TrainConfig, where: Path) -> TrainConfig:
    """With local models, tokenizers and texts by their whole paths, and first rounds that others can grow from."""
    models = tuple(whole(each, where) if isinstance(each, str) else each for each in config.initial_population)
    named = {
        "tokenizer": whole(config.tokenizer, where),
        "datasets": _located(config.datasets, where, text_sources.FILES),
    }
    first = config.first_inner_steps or fewest_to_begin_with(config)
    return config.model_copy(update={"initial_population": models, "first_inner_steps": first, **named})


def _problems(config: TrainConfig) -> Iterator[tuple[object, str]]:
    """Each possible one, and whether it is there."""
    yield from exchange_problems(config)
    devices, rows = config.devices_per_worker, config.batch_size
    near = max(devices, round(rows / devices) * devices)
    several = f"with DEVICES_PER_WORKER {devices} it must be a multiple of that, such as {near}"
    unknown = not any(each.evaluated for each in config.datasets)
    yield unknown, "DATASETS: none is evaluated; without held-out text there is no loss to tell"
    yield rows % devices, f"BATCH_SIZE is {rows}: {several}"


def _check_models(config: TrainConfig) -> None:
    unknown = [each for each in config.initial_population if each not in PRESETS or config.seq_length > PRESETS_REACH]
    if not (unknown or tokenizer_name(config)):
        return  # at once: what reads models takes seconds to load
    with loading():
        from train.member.pretraining_round_zero import named_tokenizer
        from train.model import can_be_built, described, in_a_line
    for entry in unknown:
        can_be_built(entry, config.trust_remote_code)
        most = getattr(described(entry, config.trust_remote_code), "max_position_embeddings", None)
        if isinstance(most, int) and config.seq_length > most:
            raise UserError(f"SEQ_LENGTH is {config.seq_length}, but model {entry!r} has {most} positions")
    if named := tokenizer_name(config):
        with in_a_line(f"tokenizer {named!r}: cannot be loaded"):
            named_tokenizer(named, config.trust_remote_code)


# -- post-training -----------------------------------------------------------------------------------------------------


def prepare_breeding(config: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Complain about what cannot work before anything is made."""
    with loading():
        from merge.donors import Donors
        from train.member import posttraining_round_zero as round_zero
        from train.model import described
        from train.rl.question_rows import few_held_out
    c = resolve_auto(_absolute(config, where), where)
    source_names.check([each.source for each in c.mutation_datasets], where, kinds=(f"{PREFIX}*", f"{GYM}*"))
    loaded = posttrain_fitness.load_tasks(c)
    with Donors() as donors:
        first, *others = (donors[name] for name in c.models)
        for each in (first, *others):
            described(str(each.folder), c.trust_remote_code)
        notes = [note for each in others for note in round_zero.check_alike(first, each)]
        round_zero.check_crossover(c, donors)
        round_zero.check_learning(c, first, round_zero.common_template([first, *others]))
    if c.adapter and not c.travels_as_adapter:
        notes.append(
            f"ADAPTER is for {len(c.models)} models: members travel whole, since an adapter fits only one of them"
        )
    few = filter(None, (few_held_out(c, each) for each in c.mutation_datasets if c.answering))
    for note in [*dict.fromkeys(notes), *_few(c, loaded), *_the_same(c), *few]:
        say(f"Note: {note}.")
    verifier = digest_of(c.answering.verifier) if c.answering and c.answering.verifier else ""
    return c.model_copy(
        update={"tasks_digest": lm_eval_tasks.digest(loaded) if loaded else "", "verifier_digest": verifier}
    )


def _few(c: PosttrainConfig, loaded: Mapping[str, Any]) -> list[str]:
    """Where a task has fewer questions than are to be asked."""
    from train.lm_eval_tasks import parted
    from train.posttrain.posttrain_fitness import asked

    there = parted(asked(c), loaded, c.holdout) if loaded else {"validation": {}, "test": {}}
    few = [name for name, some in there["validation"].items() if len(some) < c.questions]
    sides = {name: [len(there[part][name]) for part in there] for name in few}
    return [f"task {name}: {k} questions are for validation, {n} for the test" for name, (k, n) in sides.items()]


def _the_same(c: PosttrainConfig) -> list[str]:
    """Where generations are hardly asked anything new of held-out rows."""
    from train.posttrain.example_rows import HELD, wanted

    most = round(HELD * wanted(c) * (1 - c.holdout))
    if not (c.asks_loss or c.asks_reward) or most >= 2 * c.questions:
        return []
    asked = f"at most {most} rows of a data set are for validation, and QUESTIONS is {c.questions}"
    return [f"{asked}: generations are asked {'all' if most <= c.questions else 'mostly the same'}"]


def _absolute(c: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Local files as they are found from anywhere. Built-in models and questions are made beside the run."""
    endings, beside = (*text_sources.ROW_FILES, ".gguf"), absolute(where / c.base_dir)
    models = [whole(name, where, endings) for name in _started(c.initial_population, beside)]
    base = {"base_model": whole(c.base_model, where, endings)} if c.base_model else {}
    found = {
        "initial_population": tuple(models),
        "mutation_datasets": _located(c.mutation_datasets, where, endings),
        "crossover": {**c.crossover, **base},
        "grpo": c.grpo.found_from(where) if c.grpo else None,
        "es": c.es.found_from(where) if c.es else None,
        "task_path": (*(whole(folder, where, endings) for folder in c.task_path), *_built_in_tasks(c, beside)),
    }
    return c.model_copy(update=found)


def _started(names: tuple[str, ...], beside: Path) -> list[str]:
    """`skill:compare` is a small model that has one of the built-in skills, and is trained once."""
    asked = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    if not asked:
        return list(names)
    from train.starter_models import NAMES, starters

    if unknown := [name for name in asked if name not in NAMES]:
        there = ", ".join(PREFIX + name for name in NAMES)
        raise UserError(f"INITIAL_POPULATION: there is no {PREFIX}{unknown[0]}; there are {there}")
    made = starters(beside / "starters")
    return [str(made[name.removeprefix(PREFIX)]) if name.startswith(PREFIX) else name for name in names]


def _built_in_tasks(c: PosttrainConfig, beside: Path) -> list[str]:
    """The questions of the built-in skills."""
    asked = any(each.task.startswith(_SKILL) for each in c.fitness)
    return [str(write_tasks(beside / "skills", _SEED, _QUESTIONS))] if asked else []

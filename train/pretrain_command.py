"""What edt.py and diloco.py are on the command line: checked first, then run, then a model that others can load."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from fleet.config import UserError, whole
from fleet.errors import first_line
from fleet.method import Method
from fleet.recipe import Strategy
from fleet.start import main
from fleet.work import Maker
from train.config import TrainConfig

_MOST = 1 << 20  # files that DiLoCo writes in a round, names of parents in a plan of EDT: a plan is one register


def run(algorithm: str, about: str | None, strategy: Callable[[TrainConfig], Strategy], *others: Method[Any]) -> None:
    mine = Method(algorithm, about or "", TrainConfig, strategy, _maker, prepared, finished)
    main(mine, others=others)


def _maker(config: TrainConfig) -> Maker:
    from train.member.making import maker

    return maker(config)


def prepared(config: TrainConfig, where: Path) -> TrainConfig:
    """Complain about what cannot work before anything is trained; find out what the run is to be bound to."""
    from train import text

    config = _absolute(config, where)
    if config.algorithm == "edt":
        _check_evolution(config)
    if config.algorithm == "diloco" and config.shard_count * config.population_size > _MOST:
        raise UserError(f"SHARDS is {config.shard_count}: {_many('files', config.shard_count, config.population_size)}")
    for source in config.datasets:
        text.check(source)
    _check_rounds(config)
    _check_sources(config)
    _check_group(config)
    _check_models(config)
    _check_tokenizer(config)
    return config.model_copy(update={"stdlib_digest": text.stdlib_digest() if _uses_stdlib(config) else ""})


def finished(config: TrainConfig, folder: Path) -> None:
    from train.export import Exporter, show

    show(Exporter(folder), "average", folder / "export")


def _absolute(config: TrainConfig, where: Path) -> TrainConfig:
    """Local files by their whole paths, from the configuration's folder on: workers may be anywhere."""
    from train import text

    datasets = (each.model_copy(update={"source": whole(each.source, where, text.FILES)}) for each in config.datasets)
    models = (whole(each, where) if isinstance(each, str) else each for each in config.initial_population)
    tokenizer = whole(config.tokenizer, where)
    return config.model_copy(
        update={"datasets": tuple(datasets), "initial_population": tuple(models), "tokenizer": tokenizer}
    )


def _uses_stdlib(config: TrainConfig) -> bool:
    from train.member.prepare import tokenizer_name

    return any(each.source == "stdlib" for each in config.datasets) or not tokenizer_name(config)


def _check_evolution(config: TrainConfig) -> None:
    size, group = config.population_size, config.parents_of_a_child
    if size < group:
        raise UserError(f"POPULATION_SIZE is {size}, smaller than a group of GROUP_SIZE {group}")
    if config.selects_by_fitness:
        if config.elitism >= size:
            raise UserError(f"ELITISM is {config.elitism}: it must be below POPULATION_SIZE, which is {size}")
        if group * size > _MOST:
            raise UserError(f"GROUP_SIZE is {group}: {_many('parents', group, size)}, where fitness decides")
        return
    if config.elitism:
        raise UserError(
            f"ELITISM is {config.elitism}, but with SELECTION {config.selects} everybody is a parent equally often; "
            "use rank, tournament or random, or 0"
        )
    if config.previous_generation:
        raise UserError(f"PREVIOUS_GENERATION needs SELECTION rank, tournament or random, not {config.selects}")
    if size % group:
        raise UserError(f"POPULATION_SIZE is {size}, not a multiple of GROUP_SIZE {group}")
    if config.selects == "hypercube" and (size & (size - 1) or group & (group - 1)):
        raise UserError(f"SELECTION hypercube needs powers of two, not POPULATION_SIZE {size} and GROUP_SIZE {group}")


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


def _check_sources(config: TrainConfig) -> None:
    if not any(each.evaluated for each in config.datasets):
        raise UserError("DATASETS: none is evaluated; without held-out text there is no loss to tell")


def _check_group(config: TrainConfig) -> None:
    devices, rows = config.devices_per_worker, config.batch_size
    if rows % devices:
        near = max(devices, round(rows / devices) * devices)
        raise UserError(
            f"BATCH_SIZE is {rows}: with DEVICES_PER_WORKER {devices} it must be a multiple of that, such as {near}"
        )


def _check_tokenizer(config: TrainConfig) -> None:
    from train.member.prepare import named_tokenizer, tokenizer_name

    if named := tokenizer_name(config):
        try:
            named_tokenizer(named, config.trust_remote_code)
        except Exception as error:  # whatever a hub, a network and a tokenizer's class can come up with
            raise UserError(f"tokenizer {named!r}: cannot be loaded: {first_line(error)}") from None


def _check_models(config: TrainConfig) -> None:
    from train.model import can_be_built, described

    for entry in config.initial_population:
        can_be_built(entry, config.trust_remote_code)
        most = getattr(described(entry, config.trust_remote_code), "max_position_embeddings", None)
        if isinstance(most, int) and config.seq_length > most:
            raise UserError(f"SEQ_LENGTH is {config.seq_length}, but model {entry!r} has {most} positions")
    if len(config.initial_population) > 1 and config.algorithm == "diloco":
        raise UserError("INITIAL_POPULATION: DiLoCo begins with one model")

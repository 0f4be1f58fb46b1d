"""EDT-EvoMerge on the command line: checked first, then run, then the winner as a folder, with how it compares."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fleet.ancestry.files import keep
from fleet.config import Wrong
from fleet.history import History, opened
from fleet.recipe import Member
from fleet.start import Method
from fleet.work import Maker, Parent
from train.posttrain import fitness
from train.posttrain.config import PosttrainConfig

_SKILL, _SEED, _QUESTIONS = "skill_", 1, 1200  # of each task that is built in


def method(algorithm: str, about: str, strategy: Any) -> Method[PosttrainConfig]:
    return Method(algorithm, about, PosttrainConfig, strategy, _maker, prepared, finished)


def _maker(config: PosttrainConfig) -> Maker:
    from train.member.bred import maker

    return maker(config)


# -- before ------------------------------------------------------------------------------------------------------------


def prepared(config: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Complain about what cannot work before anything is made."""
    from merge.donors import Donors
    from train.member import founding
    from train.posttrain import data

    c = _absolute(config, where)
    fitness.load_tasks(c)
    with Donors() as donors:
        first = donors[c.initial_population[0]]
        for name in c.initial_population:
            founding.check_causal(donors[name], c.trust_remote_code)
        for name in c.initial_population[1:]:
            founding.check_alike(first, donors[name])
    founding.check_crossover(c)
    for source in c.mutation_datasets:
        data.look(c, source)
    return c


def _absolute(c: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Local files by their whole paths, from the configuration's folder on: workers may be anywhere. Built-in models
    and questions are made beside the run."""

    def whole(name: str) -> str:
        path = Path(name).expanduser()
        local = (where / path).exists() or name.endswith((".jsonl", ".parquet", ".gguf"))
        return str((where / path).resolve()) if local else name

    beside = (where / c.base_dir).resolve()
    datasets = tuple(each.model_copy(update={"source": whole(each.source)}) for each in c.mutation_datasets)
    return c.model_copy(
        update={
            "initial_population": tuple(map(whole, _started(c.initial_population, beside))),
            "mutation_datasets": datasets,
            "task_path": (*map(whole, c.task_path), *_built_in_tasks(c, beside)),
        }
    )


def _started(names: Sequence[str], beside: Path) -> list[str]:
    """`skill:compare` is a small model that has one of the built-in skills, and is trained once."""
    from train.skills import PREFIX

    if not any(name.startswith(PREFIX) for name in names):
        return list(names)
    from train.starters import starters

    made = starters(beside / "starters")
    if unknown := [name for name in names if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in made]:
        raise Wrong(
            f"INITIAL_POPULATION: there is no {unknown[0]}; there are {', '.join(PREFIX + name for name in made)}"
        )
    return [str(made[name.removeprefix(PREFIX)]) if name.startswith(PREFIX) else name for name in names]


def _built_in_tasks(c: PosttrainConfig, beside: Path) -> list[str]:
    """The questions of the built-in skills."""
    from train.skills import write_tasks

    if not any(each.task.startswith(_SKILL) for each in c.fitness):
        return []
    write_tasks(beside / "skills", _SEED, _QUESTIONS)
    return [str(beside / "skills")]


# -- after -------------------------------------------------------------------------------------------------------------


def finished(c: PosttrainConfig, folder: Path) -> None:
    """The winner's folder, its rivals beside it, the family tree."""
    history = opened(folder)
    last = history.first - 1
    winner = history[f"{last}/winner"]
    (id,) = winner.recipe.merge["of"]
    out = exported(history, id, folder / "winner")
    Console().print(table(c, history, last))
    for each in noted(history, len(c.initial_population)):
        print(f"Note: {each}.")
    print("The family tree:", *keep(history), sep="\n  ")
    print(f"The winner, {history[id].origin}: {out}")


def exported(history: History, id: str, out: Path) -> Path:
    """A member's files are a model's folder."""
    files = Parent(history[id], history.files(id))
    draft = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    for name in files.files.files:
        shutil.copyfile(files.path(name), draft / name)
    shutil.rmtree(out, ignore_errors=True)
    draft.rename(out)
    return out


def table(c: PosttrainConfig, history: History, last: int) -> Table:
    """On questions that nobody was chosen by; by how much the winner is ahead, in standard errors."""
    shown = Table(title="On what nobody was chosen by", title_justify="left")
    keys = [each.key for each in c.fitness]
    for column in ("", "fitness", "the winner is ahead by", *keys):
        shown.add_column(column, justify="left" if not column else "right", overflow="fold")
    winner = history[f"{last}/winner"]
    shown.add_row("winner", _with_error(winner), "", *_values(winner, keys))
    for n, name in enumerate(c.initial_population):
        start = history[f"{last}/start-{n}"]
        ahead, error = fitness.ahead(c, winner.metrics, start.metrics)
        shown.add_row(
            name.rstrip("/").rpartition("/")[2],
            _with_error(start),
            f"{ahead:+.4f} ± {error:.4f}",
            *_values(start, keys),
        )
    shown.caption = "± one standard error; differences are of the same questions."
    return shown


def _with_error(member: Member) -> str:
    return f"{member.metrics['fitness']:.4f} ± {member.metrics['error']:.4f}"


def _values(member: Member, keys: list[str]) -> list[str]:
    values = json.loads(member.metrics["objectives"])
    return [f"{values[key]:.4f}" for key in keys]


def noted(history: History, count: int) -> list[str]:
    found = [note for n in range(count) for note in json.loads(history[f"0/init-{n}"].metrics["notes"])]
    return list(dict.fromkeys(found))

"""EDT-EvoMerge on the command line: checked first, then run, then the winner as a folder, with how it compares."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from fleet.config import UserError, whole
from fleet.console import console
from fleet.history import History, opened
from fleet.method import Method
from fleet.plain import say
from fleet.progress import Progress
from fleet.recipe import Member, place
from fleet.work import Input, Maker
from train import rows, tasks
from train.posttrain import posttrain_fitness
from train.posttrain.card import called, card
from train.posttrain.posttrain_config import PosttrainConfig

_SKILL, _SEED, _QUESTIONS = "skill_", 1, 1200  # of each task that is built in


def method(algorithm: str, about: str, strategy: Any) -> Method[PosttrainConfig]:
    return Method(algorithm, about, PosttrainConfig, strategy, _maker, prepared, finished, view=BreedView)


def _maker(config: PosttrainConfig) -> Maker:
    from train.member.posttrained import maker

    return maker(config)


# -- before ------------------------------------------------------------------------------------------------------------


def prepared(config: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Complain about what cannot work before anything is made."""
    from merge.donors import Donors
    from train.member import first_members

    c = _absolute(config, where)
    loaded = posttrain_fitness.load_tasks(c)
    with Donors() as donors:
        first, *others = (donors[name] for name in c.models)
        for each in (first, *others):
            first_members.check_causal(each, c.trust_remote_code)
        notes = [note for each in others for note in first_members.check_alike(first, each)]
        first_members.check_crossover(c, donors)
        first_members.check_learning(c, first, first_members.common_template([first, *others]))
    for note in [*dict.fromkeys(notes), *_few(c, loaded)]:
        say(f"Note: {note}.")
    return c.model_copy(update={"tasks_digest": tasks.digest(loaded) if loaded else ""})


def _few(c: PosttrainConfig, loaded: Mapping[str, Any]) -> list[str]:
    """Where a task has fewer questions than are to be asked."""
    found = []
    for name, task in loaded.get("tasks", {}).items():
        there = len(task.eval_docs)
        if (chosen := tasks.chosen_of(name, there, c.holdout)) < c.questions:
            found.append(f"task {name}: {chosen} questions choose, {there - chosen} are kept for the end")
    return found


def _absolute(c: PosttrainConfig, where: Path) -> PosttrainConfig:
    """Local files by their whole paths, from the configuration's folder on: workers may be anywhere. Built-in models
    and questions are made beside the run."""

    def local(name: str) -> str:
        return whole(name, where, (*rows.FILES, ".gguf"))

    beside = (where / c.base_dir).resolve()
    datasets = tuple(each.model_copy(update={"source": local(each.source)}) for each in c.mutation_datasets)
    return c.model_copy(
        update={
            "initial_population": tuple(map(local, _started(c.initial_population, beside))),
            "mutation_datasets": datasets,
            "crossover": {**c.crossover, **({"base_model": local(c.base_model)} if c.base_model else {})},
            "task_path": (*map(local, c.task_path), *_built_in_tasks(c, beside)),
        }
    )


def _started(names: Sequence[str], beside: Path) -> list[str]:
    """`skill:compare` is a small model that has one of the built-in skills, and is trained once."""
    from train.skills import PREFIX

    if not any(name.startswith(PREFIX) for name in names):
        return list(names)
    from train.starters import NAMES, starters

    if unknown := [name for name in names if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in NAMES]:
        there = ", ".join(PREFIX + name for name in NAMES)
        raise UserError(f"INITIAL_POPULATION: there is no {unknown[0]}; there are {there}")
    made = starters(beside / "starters")
    return [str(made[name.removeprefix(PREFIX)]) if name.startswith(PREFIX) else name for name in names]


def _built_in_tasks(c: PosttrainConfig, beside: Path) -> list[str]:
    """The questions of the built-in skills."""
    from train.skills import write_tasks

    if not any(each.task.startswith(_SKILL) for each in c.fitness):
        return []
    write_tasks(beside / "skills", _SEED, _QUESTIONS)
    return [str(beside / "skills")]


# -- meanwhile ---------------------------------------------------------------------------------------------------------


class BreedView(Progress):
    names_members = False
    measure = "fitness"
    best: Callable[[Sequence[float]], float] = max

    def line(self, round: int) -> str:
        if round == 0:
            return "\n".join(["the given models and the data are ready", *map(data_text, self.data())])
        if round == self.history.last - 1 and self.history.ended:
            return "the winner and all that it began with have answered the held-out questions"
        members = [each for each in self.history.round(round) if each and self.values([each])]
        if not members:
            return super().line(round)
        best = max(members, key=lambda each: each.metrics["fitness"])
        slot, values = place(best.id)[1].removeprefix("look-"), self.values(members)
        mean = sum(values) / len(values)
        words = [f"generation {round}: fitness: best {_with_error(best)} ({slot}), mean {mean:.4f}"]
        return ", ".join([*words, *self.diverged(self.history.round(round))])

    def data(self) -> list[Member]:
        return [each for each in self.history.round(0) if each.recipe.task == "data"]


def data_text(member: Member) -> str:
    found = member.metrics
    words = [f"{found['rows'] - found['held']} rows to learn from", f"{found['held']} held out"]
    words += [f"{found['cut']} were cut at SEQ_LENGTH"] if found["cut"] else []
    words += [f"{found['left_out']} left out, with no answer to learn"] if found["left_out"] else []
    return f"  {member.recipe.args['name']}: {', '.join(words)}"


# -- after -------------------------------------------------------------------------------------------------------------


def finished(c: PosttrainConfig, folder: Path) -> None:
    """The winner's folder, its rivals beside it, the family tree."""
    from fleet.ancestry.ancestry_files import keep

    history = opened(folder)
    last = history.first - 1
    winner = history[f"{last}/winner"]
    (id,) = winner.recipe.parents
    out = exported(history, id, folder / "winner")
    console().print(table(c, history, last))
    say("The family tree:", *keep(history), sep="\n  ")
    if place(history[id].origin)[0] == 0:
        say(f"No child was fitter than {called(c, history[id].origin)}, which is the winner as it was given.")
    say(f"The winner, {history[id].origin}: {out}")


def taken(run_dir: Path, what: str, out: Path) -> None:
    """A member as a folder, at the end or before it."""
    history = opened(run_dir)
    last = history.first - 1
    if last < 1:
        raise UserError("no generation is finished yet; there is nothing to export")
    id = what.replace("-", "/", 1)
    if what in ("", "best"):
        fit = [each for each in history.round(last) if each and "fitness" in each.metrics]
        best = next((each for each in fit if each.id.endswith("/winner")), None) or max(fit, key=_fitness)
        id = best.recipe.parents[0] if best.recipe.task == "look" else best.id
    if not place(id)[1].startswith(("m", "init-", "best")):
        raise UserError(f"--what {what}: best, or a generation and a member, as in 3-m0")
    say(f"Exported ({id}): {exported(history, id, out)}")


def _fitness(member: Member) -> float:
    return float(member.metrics["fitness"])


def exported(history: History, id: str, out: Path) -> Path:
    """A member's files are a model's folder; a card says where it comes from."""
    from merge.merging import RECIPE
    from merge.output import whole as whole_folder

    c = PosttrainConfig.joined(history.store.read("run.json")["config"], {})
    member = Input(history[id], history.files(id))
    with whole_folder(out, sum(file.stat().st_size for file in member.folder.iterdir()), overwrite=True) as draft:
        for name in member.files.files:
            if name not in ("README.md", RECIPE):  # they tell of the merge only
                shutil.copyfile(member.path(name), draft / name)
        (draft / "README.md").write_text(card(c, history, id))
    return out


def table(c: PosttrainConfig, history: History, last: int) -> Table:
    """On held-out questions; by how much the winner is ahead, in standard errors."""
    shown = Table(title="Held-out test", title_justify="left")
    keys = [each.key for each in c.fitness]
    for column in ("", "fitness", "the winner is ahead by", *keys):
        shown.add_column(column, justify="left" if not column else "right", overflow="fold")
    winner = history[f"{last}/winner"]
    shown.add_row("winner", _with_error(winner), "", *_values(winner, keys))
    for n, name in enumerate(c.initial_population):
        start = history[f"{last}/start-{n}"]
        ahead, error = posttrain_fitness.ahead(c, winner.metrics, start.metrics)
        shown.add_row(
            name.rstrip("/").rpartition("/")[2],
            _with_error(start),
            f"{ahead:+.4f} ± {_number(error)}",
            *_values(start, keys),
        )
    shown.caption = "± one standard error; differences are of the same questions."
    return shown


def _with_error(member: Member) -> str:
    return f"{member.metrics['fitness']:.4f} ± {_number(member.metrics.get('error'))}"


def _number(error: float | None) -> str:
    return "?" if error is None else f"{error:.4f}"


def _values(member: Member, keys: list[str]) -> list[str]:
    values = json.loads(member.metrics["objectives"])
    return [f"{values[key]:.4f}" for key in keys]

"""What there is of a post-training run for people: how it gets on; then the winner as a folder, and how it compares."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from rich.table import Table

from fleet import lm_eval_command
from fleet.ancestry.tree import Tree, line_of
from fleet.ancestry.tree_builder import tree
from fleet.console import console
from fleet.history import History, opened
from fleet.payload import InputMember
from fleet.permissions import leaving
from fleet.places import beside, on_hub
from fleet.plain import say, several
from fleet.progress import Progress
from fleet.recipe import Member, round_and_slot
from fleet.run_config import UserError
from train import model_card
from train.kept_rounds import files_of
from train.posttrain import posttrain_fitness
from train.posttrain.posttrain_config import PosttrainConfig
from train.recipe_arguments import FIRST
from train.rl import reward_curves

ADAPTER = "adapter"  # a folder in a model's
_INIT = "0/init-"


# -- meanwhile ---------------------------------------------------------------------------------------------------------


class BreedView(Progress):
    names_members = False
    measure = "fitness"
    best: Callable[[Sequence[float]], float] = max

    def line(self, round: int) -> str:
        if round == 0:
            data = (each for each in self.history.round(0) if each.recipe.task == "data")
            return "\n".join(["the given models and the data are ready", *map(data_text, data)])
        if round == self.history.last - 1 and self.history.ended:
            return "the winner and all that it began with have answered the held-out questions"
        made = (each for each in self.history.round(round) if each and each.id == each.origin)
        members, answers = [each for each in made if self.values([each])], reward_curves.line(self.history, round)
        if not members:
            return f"generation {round}: {answers}" if answers else super().line(round)
        best, values = max(members, key=lambda each: each.metrics["fitness"]), self.values(members)
        slot, mean = round_and_slot(best.id)[1].removeprefix("look-"), sum(values) / len(values)
        words = [f"generation {round}: fitness: best {_with_error(best)} ({slot}), mean {mean:.4f}"]
        said = ", ".join([*words, *self.diverged(self.history.round(round))])
        return "; ".join(filter(None, [said, answers]))


def data_text(member: Member) -> str:
    found = member.metrics
    words = [f"{several(found['rows'] - found['held'], 'row')} to learn from", f"{found['held']} held out"]
    words += [f"{found['cut']} were cut at SEQ_LENGTH"] if found["cut"] else []
    words += [f"{found['left_out']} left out, with no answer to learn"] if found["left_out"] else []
    return f"- {member.recipe.args['name']}: {', '.join(words)}"


# -- after -------------------------------------------------------------------------------------------------------------


def show_winner(c: PosttrainConfig, folder: Path) -> None:
    """The winner's folder, its rivals beside it, the family tree."""
    from fleet.ancestry.ancestry_files import write_family_tree

    history = opened(folder)
    last = history.first_open - 1
    (id,) = history[f"{last}/winner"].recipe.parents
    out = exported(history, id, beside(folder) / "winner")
    console().print(table(c, history, last))
    say("The family tree:", *write_family_tree(history), sep="\n  ")
    if round_and_slot(history[id].origin)[0] == 0:
        say(f"No child was fitter than {called(c, history[id].origin)}, which is the winner as it was given.")
    _say_where(f"The winner, {history[id].origin}: {out}", out, c)


def taken(run_dir: Path, what: str, out: Path) -> None:
    """A member as a folder, at the end or before it."""
    history = opened(run_dir)
    last = history.first_open - 1
    if last < 1:
        raise UserError("no generation is finished yet; there is nothing to export")
    id = what.replace("-", "/", 1)
    if what in ("", "best"):
        fit = [each for each in history.round(last) if each and "fitness" in each.metrics]
        if not fit:
            raise UserError("no member is published yet; there is nothing to export")
        fit = [each for each in fit if each.id == each.origin] or fit  # what is carried answered other questions
        best = next((each for each in fit if each.id.endswith("/winner")), None) or max(
            fit, key=lambda each: each.metrics["fitness"]
        )
        id = best.recipe.parents[0] if best.recipe.task == "look" else best.id
    if not round_and_slot(id)[1].startswith(("m", "init-", "best", "cell-")):
        raise UserError(f"--what {what}: best, or a generation and a member, as in 3-m0")
    c = PosttrainConfig.joined(history.store.read("run.json")["config"], {})
    _say_where(f"Exported ({id}): {exported(history, id, out)}", out, c)


def _say_where(what: str, out: Path, c: PosttrainConfig) -> None:
    say(*filter(None, [what, lm_eval_command.hint(out, asked_of(c))]), sep="\n")


def asked_of(c: PosttrainConfig) -> lm_eval_command.Asked:
    """Its own tasks; where rewards chose it, lm_eval has none that fits."""
    if names := tuple(dict.fromkeys(each.task for each in c.tasks)):
        return lm_eval_command.Asked(names, c.task_path, c.num_fewshot)
    return lm_eval_command.NOTHING if c.asks_reward else lm_eval_command.PUBLIC


@leaving()
def exported(history: History, id: str, out: Path) -> Path:
    """A member's files are a model's folder, or become one with the given model's; a card says where it comes from."""
    from merge.atomic_output import atomic_folder
    from merge.merging import RECIPE
    from train.adapters import SETTINGS

    c = PosttrainConfig.joined(history.store.read("run.json")["config"], {})
    member, given = files_of(history, id), files_of(history, FIRST)
    size = sum(size for size, _ in (*member.files.values(), *given.files.values()))
    with atomic_folder(out, size, overwrite=True) as draft:
        if SETTINGS in member.files:
            _put_together(c, given, member, draft)
        else:
            for name in member.files:
                shutil.copyfile(member.path(name), draft / name)
        for name in ("README.md", RECIPE):  # they tell of the merge only
            (draft / name).unlink(missing_ok=True)
        (draft / "README.md").write_text(card(c, history, id, out), encoding="utf-8")
        model_card.complete(draft, history)
    return out


def _put_together(c: PosttrainConfig, given: InputMember, member: InputMember, draft: Path) -> None:
    """A whole model, and in a folder of its own the adapter."""
    from merge.donors import Donors
    from merge.merge_recipe import merge_of, text_of
    from merge.merging import merge_into
    from train.adapters import SETTINGS

    dtype = c.dtype or str(given.metrics["dtype"])
    said = {"merge_method": "passthrough", "models": [{"model": FIRST}], "out_dtype": dtype}
    with Donors({FIRST: f"{given.folder}+{member.folder}"}) as donors:
        merge_into(draft, merge_of(said, text_of(said)), donors)
    (draft / ADAPTER).mkdir()
    for name in member.files:
        shutil.copyfile(member.path(name), draft / ADAPTER / name)
    about = {**json.loads(member.read(SETTINGS)), "base_model_name_or_path": c.models[0]}
    (draft / ADAPTER / SETTINGS).write_text(json.dumps(about, indent=2))


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


# -- README.md of a member that leaves its run ------------------------------------------------------------------------


def card(c: PosttrainConfig, history: History, id: str, out: Path) -> str:
    """Who it descends from, what it has learned, how fit it was."""
    origin = history[id].origin
    known = tree(history)
    line = line_of(known, origin).all
    first = [called(c, each) for each in line if each.startswith(_INIT)]
    hub = [*filter(on_hub, first)]
    fields = {"library_name": "transformers", "tags": ["merge"], **({"base_model": hub} if hub else {})}
    parts = (
        f"---\n{yaml.safe_dump(fields, sort_keys=False).strip()}\n---\n# {c.project_name}, member {origin}",
        f"Bred by {c.algorithm} from:\n\n" + "\n".join(f"- `{name}`" for name in first),
        "## Data\n\n" + "\n".join(data_text(each) for each in history.round(0) if each.recipe.task == "data"),
        "## Descent\n\n" + "\n".join(_described(known, history, each) for each in line if not each.startswith("0/")),
        *filter(None, [lm_eval_command.section(out, asked_of(c))]),
        f"## Configuration\n\n```json\n{json.dumps(c.bound(), indent=2)}\n```",
    )
    return "\n\n".join(parts) + "\n"


def called(c: PosttrainConfig, id: str) -> str:
    """A first member, by the name that was given."""
    return c.models[int(id.removeprefix(_INIT))] if id.startswith(_INIT) else id


def _described(known: Tree, history: History, id: str) -> str:
    node, member = known.nodes[id], history[id]
    words = [f"{node.technique} of {' and '.join(node.parents)}" if len(node.parents) > 1 else f"of {node.parents[0]}"]
    if "steps" in member.metrics:
        data = member.recipe.genome["data"]
        shares = ", ".join(f"{each / sum(data.values()):.0%} {name}" for name, each in data.items() if each)
        args = member.recipe.args
        by = args.get("learns_by") or args.get("how")  # as older runs called it
        words += [f"{by} for {several(member.metrics['steps'], 'step')} on {shares}"]
    return f"- `{id}`: {'; '.join(words)}; fitness {member.metrics['fitness']:.4f}"

"""A whole tournament: checked, started here or on other machines, and at its end the winner as a folder."""

import sys
import textwrap
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from evomerge import fitness_evaluator, tournament_results
from evomerge.config import Configuration, EvaluationSettings, ModelReference, TournamentConfig
from evomerge.given_models import check_alike, check_causal, resolved, tell
from evomerge.model_builder import builder
from evomerge.tournament_method import ALGORITHM
from evomerge.tournament_view import TournamentView, better_ones, final_table, front_table
from evomerge.utils import EvoMergeException, answer_to, load_models, prompted
from fleet import gpus, lm_eval_command
from fleet.ancestry.ancestry_files import PAGE, write_family_tree
from fleet.busy_notice import saying
from fleet.console import console
from fleet.errors import absolute, refuse
from fleet.history import opened
from fleet.local import Starter
from fleet.metrics import sinks
from fleet.permissions import leaving
from fleet.places import address, beside
from fleet.run_config import UserError
from merge.atomic_output import Busy, Taken
from merge.search.search_command import folder_named, make_parents

_PROMPTS, _BEGINNING = 2, 40  # of the test's passages; characters of each
_SAMPLE = 40  # tokens


def winner_of(config: Configuration) -> str:
    """The winner's folder. The same call goes on where it stopped."""
    completed = prepared(config)
    if config.machines:
        from fleet.remote.hand_over import hand_over

        ssh = Path(config.ssh_config) if config.ssh_config else None
        code = hand_over(completed, ("-m", "evomerge.cli"), Path(config.machines), ssh)
    else:
        count = gpus.workers(config.workers or None, None, config.threads)
        code = TournamentStarter(completed, config.folder.parent, count, TournamentView).run()
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise UserError(
            f"the tournament in {address(config.folder)} stopped before its end (exit code {code}); see above"
        )
    return str(concluded(config.folder))


class TournamentStarter(Starter):
    """Starts local workers by evomerge/cli.py, also where a program of somebody else's called `winner_of`."""

    def script(self) -> list[str]:
        return [sys.executable, str(Path(__file__).with_name("cli.py"))]


def prepared(config: Configuration) -> TournamentConfig:
    """Whatever cannot work is said before anything is begun."""
    sinks.check(config.metrics)
    where = folder_named(config.out, "--out")
    refuse(
        [
            (config.machines and not Path(config.machines).is_file(), f"{config.machines}: cannot be read"),
            (config.machines and config.workers, "workers: machines.json says how many each machine has"),
            (config.ssh_config and not config.machines, "ssh_config: it is for machines"),
        ]
    )
    known = config.model_copy(deep=True)
    m, e, base = known.merge_settings, known.evaluation_settings, [config.base] if config.base else []
    models = resolved([*config.models, *base], where.parent if config.machines else None)
    check_alike(models)
    check_causal(models, m.trust_remote_code)
    m.base_model = models.pop() if base else None
    if m.base_model and m.base_model.path in [model.path for model in models]:
        raise UserError(f"base_model {m.base_model.name} is one of the models: its change of itself is nothing")
    compares = config.evolution_settings.compares_questions
    refuse([(compares and e.fitness_from != "all", f"fitness_from {e.fitness_from}: {compares} compares all marks")])
    fitness_evaluator.load_tasks(e, config.evolution_settings.seed, compares)
    if e.text:
        e.text = str(absolute(Path(e.text)))
    e.task_path = [str(absolute(Path(folder))) for folder in e.task_path]
    shared = {key: value for key, value in known if key in TournamentConfig.model_fields}
    run = {"algorithm": ALGORITHM, "project_name": where.name, "base_dir": address(where.parent)}
    make_parents(where, "--out")
    with saying("reading what they are asked", tell):
        digest = fitness_evaluator.digest(e)
    return TournamentConfig(**{**shared, **run, "models": models, "text_digest": digest})


# -- the end -----------------------------------------------------------------------------------------------------------


def concluded(folder: Path) -> Path:
    """Where the winner is; everything else is said and written on the way."""
    shown, history = console(), opened(folder)
    found = tournament_results.read(history)
    if not history.over:
        raise UserError(f"the tournament in {address(folder)} is not over; the same command goes on with it")
    if not found.tested:
        raise UserError(f"no model could be made and scored: {address(folder)}/workers has the logs")
    where = winner_in(folder, found)
    history.store.replace(tournament_results.HISTORY, tournament_results.as_json(found))
    write_family_tree(history)
    shown.print(final_table(found))
    for line in better_ones(found):
        shown.print(line, soft_wrap=True, markup=False, highlight=False)
    if len(found.front) > 1 and len(found.tested[0].objectives) > 1:
        shown.print(front_table(found))
    for line in samples(found, where):
        shown.print(line, markup=False, highlight=False)
    shown.print(f"The family tree: {address(folder / PAGE)}", soft_wrap=True, highlight=False)
    shown.print(f"The winner, {found.tested[0].name}: {where}", soft_wrap=True, highlight=False)
    shown.print(lm_eval_command.hint(where), soft_wrap=True, markup=False, highlight=False)
    return where


@leaving()
def winner_in(folder: Path, found: tournament_results.TournamentOutcome) -> Path:
    """Its formula follows from the run: the model is made when it is missing."""
    out = beside(folder) / tournament_results.WINNER
    while not (out / "config.json").is_file():
        try:
            with builder(found.config) as models:
                models.write(found.tested[0].formula, out)
        except Busy:  # another starter makes the same,
            time.sleep(0.1)
        except Taken:  # or has made it just now
            if not (out / "config.json").is_file():
                raise
    return out


def samples(found: tournament_results.TournamentOutcome, winner: Path) -> Iterator[str]:
    """How the winner and the models go on with the same words, those with which passages of the test begin."""
    trust, e = found.config.merge_settings.trust_remote_code, found.config.evaluation_settings
    passages = fitness_evaluator.texts(e if e.text_weight else EvaluationSettings())["test"].texts
    prompts = [*islice(dict.fromkeys(filter(None, map(beginning, passages))), _PROMPTS)]
    for model in [ModelReference("winner", winner), *found.config.models]:
        ((name, loaded, tokenizer),) = load_models([model], trust_remote_code=trust)
        for prompt in prompts:
            try:
                count = prompted(tokenizer, prompt)["input_ids"].shape[1]
                said = answer_to(loaded, tokenizer, prompt, count + _SAMPLE)
            except EvoMergeException as error:
                said = f"({error})"
            first, rest = (textwrap.shorten(each, 140, placeholder=" ...") for each in (prompt, said))
            yield f'{name}, to "{first}": {rest}'


def beginning(passage: str) -> str:
    """Its first words; of a text without blanks its first characters."""
    text = passage.strip()
    first = text[:_BEGINNING]
    return first if first == text else first.rsplit(maxsplit=1)[0]

"""The end of a tournament: the winner as a folder, what it says, the table, the family tree."""

import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from evomerge import tournament_results
from evomerge.building import builder
from evomerge.config import ModelReference
from evomerge.tournament_results import TournamentOutcome
from evomerge.tournament_view import final_table, front_table
from fleet.ancestry.ancestry_files import PAGE, keep
from fleet.config import UserError
from fleet.console import console
from fleet.history import opened
from merge.output import Busy, Taken

_PROMPTS = ("The ", "def ")
_SAMPLE = 40  # tokens


def concluded(folder: Path) -> Path:
    """Where the winner is; everything else is said and written on the way."""
    shown, history = console(), opened(folder)
    found = tournament_results.read(history)
    if not history.over:
        raise UserError(f"the tournament in {folder} is not over; the same command goes on with it")
    if not found.judged:
        raise UserError(f"no model could be made and scored: {folder}/workers has the logs")
    where = winner_in(folder, found)
    history.store.replace(tournament_results.HISTORY, tournament_results.as_json(found))
    keep(history)
    shown.print(final_table(found))
    if len(found.front) > 1 and len(found.judged[0].objectives) > 1:
        shown.print(front_table(found))
    for line in samples(found, where):
        shown.print(line, markup=False, highlight=False)
    shown.print(f"The family tree: {folder / PAGE}", soft_wrap=True, highlight=False)
    shown.print(f"The winner, {found.judged[0].name}: {where}", soft_wrap=True, highlight=False)
    return where


def winner_in(folder: Path, found: TournamentOutcome) -> Path:
    """Its formula follows from the run: the model is made when it is missing."""
    out = folder / tournament_results.WINNER
    while not (out / "config.json").is_file():
        try:
            with builder(found.config) as shop:
                shop.write(found.judged[0].formula, out)
        except Busy:  # another starter makes the same,
            time.sleep(0.1)
        except Taken:  # or has made it just now
            if not (out / "config.json").is_file():
                raise
    return out


def samples(found: TournamentOutcome, winner: Path) -> Sequence[str]:
    """How the winner and the models go on with the same words."""
    from evomerge.utils import EvoMergeException, generate_text, load_models

    lines = []
    for model in [ModelReference("winner", winner), *found.config.models]:
        ((name, loaded, tokenizer),) = load_models(
            [model], trust_remote_code=found.config.merge_settings.trust_remote_code
        )
        for prompt in _PROMPTS:
            try:
                count = len(tokenizer(prompt)["input_ids"])
                said = generate_text(loaded, tokenizer, prompt, count + _SAMPLE)
            except EvoMergeException as error:
                said = f"({error})"
            lines.append(f"{name} says: {textwrap.shorten(said, 140, placeholder=' ...')}")
    return lines

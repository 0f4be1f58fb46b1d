"""The end of a tournament: the winner as a folder, what it says, the table, the family tree."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from evomerge import results
from evomerge.config import ModelReference
from evomerge.making import Workshop
from evomerge.results import Found
from evomerge.view import final_table, front_table
from fleet.ancestry.files import keep
from fleet.config import Wrong

_PROMPTS = ("The ", "def ")
_SAMPLE = 40  # tokens


def concluded(folder: Path, console: Console | None = None) -> Path:
    """Where the winner is; everything else is said and written on the way."""
    console = console or Console()
    history = results.history_of(folder)
    found = results.read(history)
    if not history.over:
        raise Wrong(f"the tournament in {folder} is not over; the same command goes on with it")
    if not found.judged or found.best is None:
        raise Wrong(f"no model could be made and scored: {folder}/workers has the logs")
    where = written(found, folder / results.WINNER)
    _replace(folder / results.HISTORY, results.as_json(found))
    keep(history)
    console.print(final_table(found))
    if len(found.front) > 1 and len(found.judged[0].objectives) > 1:
        console.print(front_table(found))
    for line in samples(found, where):
        console.print(line, markup=False, highlight=False)
    console.print(f"The family tree: {folder / results.PICTURE}", soft_wrap=True, highlight=False)
    console.print(f"The winner: {where}", soft_wrap=True, highlight=False)
    return where


def written(found: Found, out: Path) -> Path:
    """The winner's formula follows from the run: its folder is made when it is missing."""
    best = found.best
    assert best
    c = found.config
    m = c.merge_settings
    models = {model.name: model.path for model in c.models}
    if not (out / "config.json").is_file():
        with Workshop(models, m.base_model.path if m.base_model else "", threads=c.threads, dtype=m.dtype) as workshop:
            workshop.write(best.formula, out)
    return out


def samples(found: Found, winner: Path) -> Sequence[str]:
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
            lines.append(f"{name} says: {' '.join(said.split())}")
    return lines


def _replace(file: Path, data: bytes) -> None:
    draft = file.parent / "tmp" / f"{file.name}.draft"
    draft.write_bytes(data)
    draft.rename(file)

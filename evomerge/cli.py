"""Merge models, let the merges compete, keep the winner.

For example:

    python -m evomerge.cli --run
    python -m evomerge.cli --run --model1 org/math-7b --model2 ./my-code-7b --model3 https://huggingface.co/org/chat-7b
    python -m evomerge.cli --generate runs/evomerge/winner --prompt "The import statement"

--run merges three models into eight, evaluates them, and breeds the better ones until nothing gets better. Without
models of your own it takes three small ones that need no network, and are trained here once. Ctrl-C ends it well;
the same command goes on.
"""

import logging
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cyclopts import Group, Parameter
from pydantic import ValidationError

from evomerge.config import (
    Configuration,
    EvaluationSettings,
    EvolutionSettings,
    MergeSettings,
    create_default_config,
    model_at,
    with_models,
)
from fleet import help_pages
from fleet.busy_notice import loading
from fleet.errors import refuse
from fleet.method import Method
from fleet.permissions import leaving
from fleet.places import beside
from fleet.plain import log_plainly, say
from fleet.run_config import UserError
from merge.search import search_command
from merge.search.search_command import flags, given

_WHAT, _HOW, _OUT = (Group(name, sort_key=n) for n, name in enumerate(("What to do", "The tournament", "Results"), 1))

app = help_pages.app("python -m evomerge.cli", __doc__)

if TYPE_CHECKING:
    Keys = Any
else:
    named = {"base_model": "--base", "merge_method": "--method", "num_generations": "--generations"}
    plain = (
        "text",
        "tasks",
        "task_path",
        "fitness_from",
        "fitness_questions",
        "seed",
        "workers",
        "machines",
        "ssh_config",
        "metrics",
        "log_level",
    )
    sections = (Configuration, MergeSettings, EvolutionSettings, EvaluationSettings)
    Keys = flags({_HOW: {**named, **dict.fromkeys(plain)}, _OUT: {"out": None}}, *sections)


@Parameter(name="*")
@dataclass(frozen=True)
class SettingsFlags:
    """How every command here is told its settings and its models."""

    config: Annotated[Path | None, Parameter(help="A JSON file with all settings; other options win over it.")] = None
    model1: Annotated[str, Parameter(help="A hub id, a link to a model's page there, a folder or a .gguf file.")] = ""
    model2: Annotated[str, Parameter(help="The second one.")] = ""
    model3: Annotated[str, Parameter(help="The third one; the default models fill the gaps.")] = ""

    def settings(self) -> Configuration:
        config = Configuration.load(self.config) if self.config else create_default_config()
        given = [self.model1, self.model2, self.model3]
        return with_models(config, given) if any(given) else config


@Parameter(name="*", group=_WHAT, negative="")
@dataclass(frozen=True)
class ActionFlags:
    run: bool = False
    "Run the tournament, or go on with it."
    evaluate: str = ""
    "Evaluate this model: a folder, a .gguf file, a hub id."
    generate: str = ""
    "Let this model go on with --prompt."
    prompt: str = ""
    "For --generate."
    max_length: int | None = None
    "For --generate: tokens of the prompt and the answer together; 100 by default."


@app.default
def main(
    *,
    what: ActionFlags = ActionFlags(),
    how: Annotated[SettingsFlags, Parameter(name="*", group=_HOW)] = SettingsFlags(),
    keys: Keys = Keys(),
    export_gguf: Annotated[str, Parameter(group=_OUT)] = "",
    pareto: Annotated[bool, Parameter(group=_OUT, negative="")] = False,
) -> int:
    """Run a tournament.

    Parameters
    ----------
    export_gguf:
        Write the winner as a .gguf file, too: F32, F16, BF16, Q8_0 or Q4_0. With --generate or --evaluate: that model.
    pareto:
        List the models of the tournament in --out that no other one beats in every objective.
    """
    if not (what.run or what.evaluate or what.generate or pareto or export_gguf):
        app.help_print([])
        return 0
    config, model = _completed(how.settings(), given(keys)), what.generate or what.evaluate
    log_plainly("%(levelname)s %(message)s")
    logging.getLogger("evomerge").setLevel(config.log_level)
    _check(what, export_gguf)
    if what.run:
        search_command.folder_named(config.out, "--out")  # before what takes a while to load
        with loading("what merges models", partial(say, file=sys.stderr)):
            from evomerge.tournament_running import winner_of

        winner = winner_of(config)
        model = model or winner
    if what.evaluate:
        _evaluate(what.evaluate, config)
    if what.generate:
        from evomerge.utils import generate_text, load_models

        ((_, loaded, tokenizer),) = load_models([model_at(what.generate)])
        prompt = os.fsencode(what.prompt).decode(errors="replace")  # UTF-8, whatever the locale is
        say(generate_text(loaded, tokenizer, prompt, what.max_length or 100))
    if pareto:
        from evomerge import tournament_results, tournament_view
        from fleet.console import console

        console().print(tournament_view.front_table(tournament_results.found_in(config.folder)))
    if export_gguf:
        _export(Path(model or beside(config.folder) / "winner"), export_gguf.upper())
    return 0


def _completed(config: Configuration, keys: dict[str, Any]) -> Configuration:
    """With what the options say of it, and of its sections."""
    records = (config, config.merge_settings, config.evolution_settings, config.evaluation_settings)
    for key, value in keys.items():
        record = next(each for each in records if key in type(each).model_fields)
        try:
            setattr(record, key, value)
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise UserError(f"{key} is {value!r}: {why}") from None
    return config


def _check(what: ActionFlags, export_gguf: str) -> None:
    from merge.gguf.writing import TYPES

    types = ", ".join(TYPES)
    refuse(
        [
            (
                export_gguf and export_gguf.upper() not in TYPES,
                f"--export-gguf {export_gguf}: one of {types} is expected",
            ),
            (
                (what.prompt or what.max_length) and not what.generate,
                "--prompt and --max-length are for --generate MODEL",
            ),
            (what.generate and not what.prompt, "--generate needs --prompt TEXT"),
        ]
    )


def _evaluate(model: str, config: Configuration) -> None:
    from evomerge.utils import evaluate_model

    say(f"Evaluating {model} ...")
    found = evaluate_model(model, config)
    say(f"{model}: score {found['score']:.4f}")
    if "perplexity" in found:
        say(f"  perplexity {found['perplexity']:.3f}")
    for name, value in found["objectives"].items():
        say(f"  {name} {value:.4f}")


@leaving()
def _export(model: Path, kind: str) -> None:
    from merge.gguf.writing import export_gguf

    out = model.resolve().with_name(f"{model.name}-{kind}.gguf")
    export_gguf(str(model), out, kind, overwrite=True)
    say(f"As GGUF: {out}")


def _method() -> Method[Any]:
    from evomerge.tournament_method import METHOD

    return METHOD


def run(arguments: list[str] | None = None) -> None:
    search_command.run(app, _method, arguments)


if __name__ == "__main__":
    run()

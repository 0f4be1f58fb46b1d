"""Merge models, let the merges compete, keep the winner.

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
from pathlib import Path
from typing import Annotated, Any

if not __package__:  # run as a file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from cyclopts import App, Group, Parameter

from evomerge.config import Configuration, TaskSettings, chosen
from evomerge.tournament_method import METHOD
from fleet.config import UserError
from fleet.errors import absolute
from fleet.plain import log_plainly, say
from fleet.start import main as fleet_main

_WORKER = ("--worker", "--make", "--sink")  # the same file is also a worker of a run
_WHAT, _HOW, _OUT = (
    Group("What to do", sort_key=1),
    Group("The tournament", sort_key=2),
    Group("ResultFlags", sort_key=3),
)
_FLAG: dict[str, Any] = {"negative": ""}

app = App(name="python -m evomerge.cli", help=__doc__, help_format="plaintext", version_flags=[])


@Parameter(name="*")
@dataclass(frozen=True)
class ActionFlags:
    run: Annotated[bool, Parameter(group=_WHAT, **_FLAG)] = False
    "Run the tournament, or go on with it."
    evaluate: Annotated[str, Parameter(group=_WHAT)] = ""
    "Evaluate this model: a folder, a .gguf file, a hub id."
    generate: Annotated[str, Parameter(group=_WHAT)] = ""
    "Let this model go on with --prompt."
    prompt: Annotated[str, Parameter(group=_WHAT)] = ""
    "For --generate."
    max_length: Annotated[int | None, Parameter(group=_WHAT)] = None
    "For --generate: tokens of the prompt and the answer together; 100 by default."


@Parameter(name="*")
@dataclass(frozen=True)
class TournamentFlags:
    config: Annotated[Path | None, Parameter(group=_HOW)] = None
    "A JSON file with all settings; the options here win over it."
    model1: Annotated[str, Parameter(group=_HOW)] = ""
    "A hub id, a link to a model's hub page, a folder or a .gguf file."
    model2: Annotated[str, Parameter(group=_HOW)] = ""
    "The second one."
    model3: Annotated[str, Parameter(group=_HOW)] = ""
    "The third one; those that are not given are the default models."
    base: Annotated[str, Parameter(group=_HOW)] = ""
    "What the models were fine-tuned from; by default their mean stands for it."
    method: Annotated[str, Parameter(group=_HOW)] = ""
    "ps, dfs or ps_dfs."
    text: Annotated[str, Parameter(group=_HOW)] = ""
    "A text file that the models have to foretell: .txt, .jsonl or .parquet."
    tasks: Annotated[str, Parameter(group=_HOW)] = ""
    "Tasks of lm-eval that count, too: name[:weight],name[:weight]."
    task_path: Annotated[tuple[Path, ...], Parameter(group=_HOW, negative="")] = ()
    "A folder with tasks of one's own; may be given several times."
    generations: Annotated[int | None, Parameter(group=_HOW)] = None
    "The most there will be."
    seed: Annotated[int | None, Parameter(group=_HOW)] = None
    "Where all randomness begins."
    workers: Annotated[int | None, Parameter(group=_HOW)] = None
    "Models at a time; by default one for each processor or GPU."
    machines: Annotated[Path | None, Parameter(group=_HOW)] = None
    "A machines.json: work on these machines, which share the disk of --out."
    ssh_config: Annotated[Path | None, Parameter(group=_HOW)] = None
    "For --machines: another SSH client configuration than ~/.ssh/config."
    metrics: Annotated[tuple[str, ...], Parameter(group=_HOW, negative="")] = ()
    "Where metrics go besides metrics.csv: tensorboard, wandb, trackio; may be given several times."
    log_level: Annotated[str, Parameter(group=_HOW)] = ""
    "DEBUG, INFO, WARNING or ERROR."


@Parameter(name="*")
@dataclass(frozen=True)
class ResultFlags:
    out: Annotated[Path | None, Parameter(group=_OUT)] = None
    "The folder of the tournament; runs/evomerge by default."
    export_gguf: Annotated[str, Parameter(group=_OUT)] = ""
    "Write the winner as a .gguf file, too: F32, F16, BF16, Q8_0 or Q4_0. With --generate or --evaluate: that model."
    pareto: Annotated[bool, Parameter(group=_OUT, **_FLAG)] = False
    "List the models of the tournament in --out that no other one beats in every objective."


@app.default
def main(
    *, what: ActionFlags = ActionFlags(), how: TournamentFlags = TournamentFlags(), kept: ResultFlags = ResultFlags()
) -> int:
    if not (what.run or what.evaluate or what.generate or kept.pareto or kept.export_gguf):
        app.help_print([])
        return 0
    return _done(what, how, kept)


def _done(what: ActionFlags, how: TournamentFlags, kept: ResultFlags) -> int:
    config = _config(how, kept)
    log_plainly("%(levelname)s %(message)s")
    logging.getLogger("evomerge").setLevel(config.log_level)
    if kept.export_gguf:
        _check_type(kept.export_gguf)
    if (what.prompt or what.max_length) and not what.generate:
        raise UserError("--prompt and --max-length are for --generate MODEL")
    if what.generate and not what.prompt:
        raise UserError("--generate needs --prompt TEXT")
    folder = absolute(Path(config.out))
    model = what.generate or what.evaluate
    if what.run:
        from evomerge.evolutionary_tournament import run_evolutionary_tournament

        winner = run_evolutionary_tournament(config)
        model = model or winner
    if what.evaluate:
        _evaluate(what.evaluate, config)
    if what.generate:
        _generate(what.generate, what.prompt, what.max_length or 100)
    if kept.pareto:
        _pareto(folder)
    if kept.export_gguf:
        _export(model or str(folder / "winner"), kept.export_gguf.upper())
    return 0


def _check_type(kind: str) -> None:
    from merge.gguf.writing import TYPES

    if kind.upper() not in TYPES:
        raise UserError(f"--export-gguf {kind}: one of {', '.join(TYPES)} is expected")


def _config(how: TournamentFlags, kept: ResultFlags) -> Configuration:
    config = chosen(how.config, [how.model1, how.model2, how.model3])
    m, e, v = config.merge_settings, config.evolution_settings, config.evaluation_settings
    places = (
        (m, "merge_method", how.method), (m, "base_model", {"path": how.base} if how.base else None),
        (e, "num_generations", how.generations), (e, "seed", how.seed), (v, "text", how.text),
        (v, "tasks", [_task(each) for each in how.tasks.split(",")] if how.tasks else None),
        (v, "task_path", [str(each) for each in how.task_path]), (config, "workers", how.workers),
        (config, "machines", how.machines and str(how.machines)), (config, "out", kept.out and str(kept.out)),
        (config, "ssh_config", how.ssh_config and str(how.ssh_config)), (config, "log_level", how.log_level),
        (config, "metrics", how.metrics or None),
    )  # fmt: skip
    for record, field, value in places:
        if value not in (None, "", []):
            _assign(record, field, value)
    return config


def _assign(record: Any, field: str, value: Any) -> None:
    from pydantic import ValidationError

    try:
        setattr(record, field, value)
    except ValidationError as error:
        raise UserError(f"{field} is {value!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _task(text: str) -> TaskSettings:
    name, _, weight = text.strip().partition(":")
    try:
        return TaskSettings(name=name, weight=float(weight or 1))
    except ValueError:
        raise UserError(f"--tasks {text!r}: name or name:weight is expected") from None


def _evaluate(model: str, config: Configuration) -> None:
    from evomerge.utils import evaluate_model

    say(f"Evaluating {model} ...")
    found = evaluate_model(model, config)
    say(f"{model}: score {found['score']:.4f}")
    if "perplexity" in found:
        say(f"  perplexity {found['perplexity']:.3f}")
    for name, value in found["objectives"].items():
        say(f"  {name} {value:.4f}")


def _generate(model: str, prompt: str, max_length: int) -> None:
    from evomerge.config import ModelReference
    from evomerge.utils import generate_text, load_models

    ((_, loaded, tokenizer),) = load_models([ModelReference("", model)])
    say(generate_text(loaded, tokenizer, prompt, max_length))


def _pareto(folder: Path) -> None:
    from evomerge.tournament_results import found_in
    from evomerge.tournament_view import front_table
    from fleet.console import console

    console().print(front_table(found_in(folder)))


def _export(model: str, kind: str) -> None:
    from evomerge.gguf_utils import export_gguf

    out = Path(model).resolve().with_name(f"{Path(model).name}-{kind}.gguf")
    export_gguf(model, out, kind, overwrite=True)
    say(f"As GGUF: {out}")


def run(arguments: list[str] | None = None) -> None:
    if any(word in _WORKER for word in sys.argv[1:]):
        fleet_main(METHOD)
    from evomerge.utils import EvoMergeException, expected

    os.umask(0o077)
    try:
        with expected():
            sys.exit(app(arguments, result_action="return_value"))
    except EvoMergeException as error:
        say(error, file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


if __name__ == "__main__":
    run()

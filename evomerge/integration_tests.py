"""Everything once, from models to a winner that speaks, as a self-test for one's own models and machine:

python -m evomerge.integration_tests
python -m evomerge.integration_tests --model1 ./a --model2 ./b --model3 ./c
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from evomerge.config import Configuration, ModelReference, chosen
from evomerge.utils import EvoMergeException, evaluate_model, generate_text, load_models, validate_merge_config
from fleet.config import UserError
from fleet.plain import say

Check = tuple[str, Callable[[], object]]


def checks(config: Configuration, place: Path) -> Iterator[Check]:
    """In this order: each builds on those before it. What does not hold raises."""
    from evomerge.evolutionary_tournament import EvolutionaryMerger, run_evolutionary_tournament
    from evomerge.gguf_utils import export_gguf, gguf_to_hf, verify_gguf

    steps = EvolutionaryMerger(config, place / "steps")
    made: dict[str, ModelReference] = {}
    yield "the models fit together", lambda: validate_merge_config(config)
    yield "each of them can be evaluated", lambda: [evaluate_model(model, config) for model in config.models]

    def merge() -> None:
        made["merged"] = steps.merger.merge()

    def mutate() -> None:
        made["mutant"] = steps.mutate_model(made["merged"])

    def select() -> None:
        both = [made["merged"], made["mutant"]]
        scores = [steps.evaluate(model) for model in both]
        assert steps.tournament_selection(both, scores) in both

    yield "they merge", merge
    yield "a merged model can be mutated", mutate
    yield "a tournament chooses", select
    config.out = str(place / "run")
    config.evolution_settings.num_generations = min(2, config.evolution_settings.num_generations)

    def run() -> None:
        made["winner"] = ModelReference("winner", run_evolutionary_tournament(config))

    def again() -> None:
        assert run_evolutionary_tournament(config) == made["winner"].path

    def speak() -> None:
        ((_, model, tokenizer),) = load_models([made["winner"]])
        assert len(generate_text(model, tokenizer, "The ", 20)) > len("The ")

    def export() -> None:
        file = place / "winner.gguf"
        export_gguf(made["winner"].path, file, "F16")
        assert not (problems := verify_gguf(file, made["winner"].path)), problems
        gguf_to_hf(file, place / "back")
        score, back = (evaluate_model(path, config)["score"] for path in (made["winner"].path, place / "back"))
        assert abs(score - back) < 0.02 * abs(score) + 1e-3, (score, back)

    yield "a whole tournament of two generations", run
    yield "it is over, and says the same again", again
    yield "the winner speaks", speak
    yield "the winner goes to GGUF and back", export


app = App(name="python -m evomerge.integration_tests", help=__doc__, help_format="plaintext", version_flags=[])


@app.default
def main(
    *,
    config: Annotated[Path | None, Parameter(help="A JSON file with all settings.")] = None,
    model1: Annotated[str, Parameter(help="A model; the default ones fill the gaps.")] = "",
    model2: Annotated[str, Parameter(help="The second one.")] = "",
    model3: Annotated[str, Parameter(help="The third one.")] = "",
) -> int:
    try:
        settings = chosen(config, [model1, model2, model3])
    except UserError as error:
        say(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="evomerge-") as place:
        for what, check in checks(settings, Path(place)):
            begin = time.monotonic()
            say(f"...     {what}")
            try:
                check()
            except EvoMergeException as error:
                say(f"FAILED  {what}: {error}", file=sys.stderr)
                return 1
            except Exception:
                say(traceback.format_exc(), file=sys.stderr)
                say(f"FAILED  {what}: this is a mistake in evomerge; please report it", file=sys.stderr)
                return 1
            say(f"good    {what} ({time.monotonic() - begin:.1f} s)")
    say("All is well.")
    return 0


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))

"""Everything once, from models to a winner that speaks, as a self-test for one's own models and machine.

For example:

    python -m evomerge.integration_tests
    python -m evomerge.integration_tests --model1 ./a --model2 ./b --model3 ./c
"""

import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evomerge.cli import SettingsFlags
from evomerge.config import Configuration, ModelReference
from evomerge.utils import evaluate_model, generate_text, load_models, validate_merge_config
from fleet import help_pages
from fleet.plain import say
from fleet.run_config import UserError
from merge.search import search_command


@contextmanager
def check(what: str) -> Iterator[None]:
    """What does not hold raises, and ends the test."""
    begin = time.monotonic()
    say(f"...     {what}")
    try:
        yield
    except Exception as error:
        mistake = "this is a mistake in evomerge; please report it"
        if not isinstance(error, UserError):
            say(traceback.format_exc(), file=sys.stderr)
        say(f"FAILED  {what}: {error if isinstance(error, UserError) else mistake}", file=sys.stderr)
        sys.exit(1)
    say(f"good    {what} ({time.monotonic() - begin:.1f} s)")


def checks(config: Configuration, place: Path) -> None:
    """In this order: each builds on those before it."""
    from evomerge.evolutionary_tournament import EvolutionaryMerger, run_evolutionary_tournament
    from evomerge.gguf_utils import export_gguf, gguf_to_hf, verify_gguf

    steps = EvolutionaryMerger(config, place / "steps")
    with check("the models fit together"):
        validate_merge_config(config)
    with check("each of them can be evaluated"):
        for model in config.models:
            evaluate_model(model, config)
    with check("they merge"):
        merged = steps.merger.merge()
    with check("a merged model can be mutated"):
        both = [merged, steps.mutate_model(merged)]
    with check("a tournament selects"):
        assert steps.tournament_selection(both, [steps.evaluate(model) for model in both]) in both
    config.out = str(place / "run")
    config.evolution_settings.num_generations = min(2, config.evolution_settings.num_generations)
    with check("a whole tournament of two generations"):
        winner = run_evolutionary_tournament(config)
    with check("it is over, and says the same again"):
        assert run_evolutionary_tournament(config) == winner
    with check("the winner speaks"):
        ((_, model, tokenizer),) = load_models([ModelReference("winner", winner)])
        assert len(generate_text(model, tokenizer, "The ", 20)) > len("The ")
    with check("the winner goes to GGUF and back"):
        file = place / "winner.gguf"
        export_gguf(winner, file, "F16")
        assert not (problems := verify_gguf(file, winner)), problems
        gguf_to_hf(file, place / "back")
        score, back = (evaluate_model(path, config)["score"] for path in (winner, place / "back"))
        assert abs(score - back) < 0.02 * abs(score) + 1e-3, (score, back)


app = help_pages.app("python -m evomerge.integration_tests", __doc__)


@app.default
def main(*, how: SettingsFlags = SettingsFlags()) -> int:
    config = how.settings()
    with tempfile.TemporaryDirectory(prefix="evomerge-") as place:
        checks(config, Path(place))
    say("All is well.")
    return 0


if __name__ == "__main__":
    search_command.run(app)

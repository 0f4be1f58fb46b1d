"""The tournament as a method of the fleet: what its workers make, and what they write for people."""

from collections.abc import Mapping
from typing import Any

from evomerge.config import TournamentConfig
from evomerge.tournament import FormulaArgs, Tournament, formula_of
from fleet.history import History
from fleet.method import Method
from fleet.run_config import UserError
from fleet.tasks import Task
from fleet.work import Maker, NotOnThisMachine, Work
from merge.search import search_worker

ALGORITHM = "evomerge"


def maker(config: TournamentConfig) -> Maker:
    from evomerge.fitness_evaluator import FormulaEvaluator

    def check_can_serve(evaluator: FormulaEvaluator, work: Work) -> None:
        if evaluator.digest != config.text_digest:
            raise NotOnThisMachine("the text here differs from that of who began: another Python, or a changed file")

    advice = "a smaller batch_tokens needs less, in a tournament of its own"
    return search_worker.maker(
        {"score": Task(_score, FormulaArgs)}, lambda: FormulaEvaluator(config), check_can_serve, advice
    )


def _score(evaluator: Any, work: Work, args: FormulaArgs) -> Mapping[str, Any]:
    try:
        return dict(evaluator.scored(formula_of(work.recipe), search_worker.interview(evaluator, work, args)))
    except UserError as error:  # names the model that it is about
        if args.name in str(error):
            raise  # as it is: what it came of says whose fault it is
        raise type(error)(f"{args.name}: {error}") from error


def report(history: History) -> None:
    """history.json, in the run's folder."""
    from evomerge import tournament_results

    tournament_results.write_history_json(history)


METHOD = Method(
    ALGORITHM, "", TournamentConfig, Tournament, maker, report=report, libraries=("evomerge.fitness_evaluator",)
)

"""The tournament as a method of the fleet: what its workers make, and what they write for people."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from evomerge.config import TournamentConfig
from evomerge.tournament import ScoreFormula, Tournament, formula_of
from fleet import faults
from fleet.config import UserError
from fleet.history import History
from fleet.method import Method
from fleet.recipe import NotYet
from fleet.tasks import Args, Task, making
from fleet.work import Maker, NotOnThisMachine, Work

ALGORITHM = "evomerge"


def maker(config: TournamentConfig) -> Maker:
    from evomerge.formula_evaluator import FormulaEvaluator
    from train.verdicts import judging

    made = making(TASKS)

    def make(evaluator: FormulaEvaluator, work: Work) -> Mapping[str, Any]:
        if evaluator.digest != config.text_digest:
            raise NotOnThisMachine("the text here differs from that of who began: another Python, or a changed file")
        return made(evaluator, work)

    return judging(
        lambda: FormulaEvaluator(config), make, "a smaller batch_tokens needs less, in a tournament of its own"
    )


def _check(evaluator: Any, work: Work, args: Args) -> Mapping[str, Any]:
    return dict(evaluator.check())


def _score(evaluator: Any, work: Work, args: ScoreFormula) -> Mapping[str, Any]:
    with _about(args.name):
        return dict(evaluator.scored(formula_of(work.recipe), args.on))


TASKS: Mapping[str, Task[Any]] = {"check": Task(_check), "score": Task(_score, ScoreFormula)}


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """An error names the model that it is about."""
    try:
        yield
    except UserError as error:
        if name and name not in str(error):
            raise type(error)(f"{name}: {error}") from error
        raise


def report(history: History) -> None:
    """history.json, in the run's folder."""
    from evomerge import tournament_results

    with contextlib.suppress(faults.Fault, NotYet, KeyError):
        tournament_results.keep(history)


METHOD = Method(ALGORITHM, "", TournamentConfig, Tournament, maker, report=report)

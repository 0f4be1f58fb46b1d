"""The search as a method of the fleet: what its workers make, and what is written for people."""

import contextlib
from collections.abc import Mapping
from typing import Any

from fleet import faults
from fleet.history import History
from fleet.method import Method
from fleet.recipe import NotYet, place
from fleet.tasks import Args, Task, making
from fleet.work import CannotServe, Failed, Maker, NotOnThisMachine, Work
from merge.evolve import records
from merge.evolve.merge_search import CHECK, MergeSearch
from merge.evolve.reporting import points
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_tasks import MergeArgs, ScoreArgs, TwinArgs

ALGORITHM = "merge-search"
MERGER = "merger"  # how the names of workers begin that merge for others, of a buffered search
SCORER = "scorer"


def maker(config: SearchConfig) -> Maker:
    from merge.evolve.candidate_evaluator import CandidateEvaluator
    from train.verdicts import judging

    compared: list[CandidateEvaluator] = []
    made = making(TASKS)

    def make(evaluator: CandidateEvaluator, work: Work) -> Mapping[str, Any]:
        name = work.draft.store.name
        if (work.recipe.task == "merge") != name.startswith(MERGER) and name.startswith((MERGER, SCORER)):
            raise NotOnThisMachine("this worker has another part")
        if evaluator not in compared:
            compared[:] = [evaluator]
            if what := _changed(evaluator, work):
                raise CannotServe(what)  # no candidate is to blame
        return made(evaluator, work)

    return judging(
        lambda: CandidateEvaluator(config), make, "a smaller --batch-size needs less, in a search of its own"
    )


def _check(evaluator: Any, work: Work, args: Args) -> Mapping[str, Any]:
    return dict(evaluator.check())


def _merge(evaluator: Any, work: Work, args: MergeArgs) -> Mapping[str, Any]:
    _know_copies(evaluator, work)
    with work.folder() as out:
        took = evaluator.merged(args.recipe, out)
    return {"bytes": took}


def _twin(evaluator: Any, work: Work, args: TwinArgs) -> Mapping[str, Any]:
    twin = work.history[args.twin]
    if not twin:
        raise Failed(f"it is the same as {args.twin}, which failed")
    return twin.metrics


def _score(evaluator: Any, work: Work, args: ScoreArgs) -> Mapping[str, Any]:
    if any(place(id)[0] for id in work.absent):
        raise Failed("it could not be merged")
    _know_copies(evaluator, work)
    merged = [input.folder for id, input in work.inputs.items() if place(id)[0] and input.files.files]
    rival = work.history[args.rival].metrics if args.rival else None
    return dict(evaluator.scored(args.recipe, rival, args.on == "held-out", *merged))


TASKS: Mapping[str, Task[Any]] = {
    "check": Task(_check),
    "merge": Task(_merge, MergeArgs),
    "twin": Task(_twin, TwinArgs),
    "score": Task(_score, ScoreArgs),
}


def _know_copies(evaluator: Any, work: Work) -> None:
    """The models that round 0 has copied, for whoever needs them."""
    copies = ((name, work.inputs.get(f"0/model-{n}")) for n, name in enumerate(evaluator.config.models))
    evaluator.donors.know({name: copy.folder for name, copy in copies if copy})


def _changed(evaluator: Any, work: Work) -> str:
    """A search that goes on must ask what it has asked so far."""
    begun = work.recipe.task in ("score", "twin")
    if not begun or evaluator.digest() == work.history[CHECK].metrics["digest"]:
        return ""
    return "the questions or the models have changed since this search began: put them back, or begin another search"


def report(history: History) -> None:
    """history.jsonl and the others, in the run's folder."""
    with contextlib.suppress(faults.Fault, NotYet, KeyError):
        config = SearchConfig.joined(history.store.read("run.json")["config"], {})
        found = records.read(config, history)
        if len(found.rows) > _written(history):
            for name, data in records.files(found).items():
                history.store.replace(name, data)


def _written(history: History) -> int:
    """How many candidates are in the table already: somebody may know more than this worker does."""
    with contextlib.suppress(faults.Fault):
        return history.store.disk.read(records.TABLE, 1 << 28).count(b"\n")
    return 0


METHOD = Method(ALGORITHM, "", SearchConfig, MergeSearch, maker, report=report, points=points, kept=(records.BEST,))

"""The search as a method of the fleet: what its workers make, and what is written for people."""

from collections.abc import Mapping
from typing import Any

from fleet.history import History
from fleet.method import Method
from fleet.metrics.sink import Point
from fleet.recipe import round_and_slot
from fleet.tasks import Task
from fleet.work import CannotServe, Failed, Maker, NotOnThisMachine, Work
from merge.evolve import records
from merge.evolve.merge_search import MergeArgs, MergeSearch, ScoreArgs, TwinArgs
from merge.evolve.search_config import ALGORITHM, SearchConfig
from merge.search import search_worker
from merge.search.search_strategy import CHECK

MERGER = "merger"  # how the names of workers begin that merge for others, of a buffered search
SCORER = "scorer"
_LIBRARIES = (
    *("merge.evolve.recipe_evaluator", "train.packed_hflm", "cma"),  # not lm_eval.tasks: it begins a thread
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
)


def maker(config: SearchConfig) -> Maker:
    from merge.evolve.recipe_evaluator import RecipeEvaluator

    advice = "a smaller --batch-size needs less, in a search of its own"
    return search_worker.maker(TASKS, lambda: RecipeEvaluator(config), _check_can_serve, advice)


def _check_can_serve(evaluator: Any, work: Work) -> None:
    name, task = work.writer.store.name, work.recipe.task
    if (task == "merge") != name.startswith(MERGER) and name.startswith((MERGER, SCORER)):
        raise NotOnThisMachine("this worker has another part")
    if task in ("score", "twin", "calibrate") and evaluator.digest != work.history[CHECK].metrics["digest"]:
        raise CannotServe(  # no candidate is to blame
            "the questions or the models have changed since this search began: put them back, or begin another search"
        )


def _merge(evaluator: Any, work: Work, args: MergeArgs) -> Mapping[str, Any]:
    _know_copies(evaluator, work)
    with work.folder() as out:
        written = evaluator.merged(args.recipe, out)
    return {"bytes": written}


def _twin(evaluator: Any, work: Work, args: TwinArgs) -> Mapping[str, Any]:
    twin = work.history[args.twin]
    if not twin:
        raise Failed(f"it is the same as {args.twin}, which failed")
    return twin.metrics


def _score(evaluator: Any, work: Work, args: ScoreArgs) -> Mapping[str, Any]:
    if any(round_and_slot(id)[0] for id in work.absent):
        raise Failed("it could not be merged")
    _know_copies(evaluator, work)
    merged = [input.folder for id, input in work.inputs.items() if round_and_slot(id)[0] and input.files]
    return dict(evaluator.scored(args.recipe, search_worker.interview(evaluator, work, args), *merged))


TASKS: Mapping[str, Task[Any]] = {
    "merge": Task(_merge, MergeArgs),
    "twin": Task(_twin, TwinArgs),
    "score": Task(_score, ScoreArgs),
}


def _know_copies(evaluator: Any, work: Work) -> None:
    """The models that round 0 has copied, for whoever needs them."""
    copies = ((name, work.inputs.get(f"0/model-{n}")) for n, name in enumerate(evaluator.config.models))
    evaluator.donors.know({name: copy.folder for name, copy in copies if copy})


def points(history: History, begin: int) -> list[Point]:
    """What is logged: the candidates of all finished generations from a given one on, each with the best score up to
    it."""
    found, best = list[Point](), None
    rows = [row for row in records.read(history).rows if row.generation < history.first_open]
    for step, row in enumerate(rows):
        if row.score is not None and not row.given_up:
            best = row.score if best is None else max(best, row.score)
        values = {"score": row.score, "best": best, **row.scores, "seconds": row.seconds, "generation": row.generation}
        if row.generation >= begin:
            found.append(Point(step, {key: float(value) for key, value in values.items() if value is not None}))
    return found


report = search_worker.writing_when_longer(
    records.TABLE, records.read, lambda found: len(found.rows), lambda table: table.count(b"\n"), records.files
)
METHOD = Method(
    ALGORITHM, "", SearchConfig, MergeSearch, maker, report=report, points=points, artifacts=(records.BEST,),
    libraries=_LIBRARIES,
)  # fmt: skip

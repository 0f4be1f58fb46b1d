"""The search as a method of the fleet: what its workers make, and what is written for people."""

import contextlib
from collections.abc import Mapping
from typing import Any

from fleet import faults
from fleet.history import History
from fleet.method import Method
from fleet.recipe import NotYet, place
from fleet.work import CannotServe, Failed, Maker, NotOnThisMachine, Work
from merge.evolve import records
from merge.evolve.merge_search import CHECK, MergeSearch
from merge.evolve.reporting import points
from merge.evolve.search_config import SearchConfig

ALGORITHM = "merge-search"
MERGER = "merger"  # how the names of workers begin that merge for others, of a buffered search
SCORER = "scorer"


def maker(config: SearchConfig) -> Maker:
    from merge.evolve.candidate_evaluator import CandidateEvaluator
    from train.verdicts import judging

    compared: list[CandidateEvaluator] = []

    def make(evaluator: CandidateEvaluator, work: Work) -> Mapping[str, Any]:
        name = work.draft.store.name
        if (work.recipe.merge["kind"] == "merge") != name.startswith(MERGER) and name.startswith((MERGER, SCORER)):
            raise NotOnThisMachine("this worker has another part")
        if evaluator not in compared:
            compared[:] = [evaluator]
            if what := _changed(evaluator, work):
                raise CannotServe(what)  # no candidate is to blame
        return _made(evaluator, work)

    return judging(
        lambda: CandidateEvaluator(config), make, "a smaller --batch-size needs less, in a search of its own"
    )


def _made(evaluator: Any, work: Work) -> Mapping[str, Any]:
    what, how = work.recipe.merge, work.recipe.evaluate
    if what["kind"] == "check":
        return dict(evaluator.check())
    if any(place(id)[1].startswith("m") for id in work.absent):
        raise Failed("it could not be merged")
    evaluator.donors.know({name: work.parents[f"0/model-{n}"].folder for n, name in _copies(evaluator.config, work)})
    if what["kind"] == "merge":
        with work.folder() as out:
            took = evaluator.merged(what["recipe"], out)
        return {"bytes": took}
    if what["kind"] == "twin":
        twin = work.history[what["of"]]
        if not twin:
            raise Failed(f"it is the same as {what['of']}, which failed")
        return twin.metrics
    merged = [parent.folder for id, parent in work.parents.items() if place(id)[0] and parent.files.files]
    rival = work.history[how["rival"]].metrics if "rival" in how else None
    return dict(evaluator.scored(what["recipe"], rival, how["on"] == "held-out", *merged))


def _copies(config: SearchConfig, work: Work) -> list[tuple[int, str]]:
    """The models that round 0 has copied, for whoever needs them."""
    return [(n, name) for n, name in enumerate(config.models) if f"0/model-{n}" in work.parents]


def _changed(evaluator: Any, work: Work) -> str:
    """A search that goes on must ask what it has asked so far."""
    begun = work.recipe.merge["kind"] in ("score", "twin")
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

"""What is logged of a search: a step for each candidate."""

from fleet.history import History
from fleet.metrics.sink import Point
from merge.evolve import records
from merge.evolve.search_config import SearchConfig


def points(history: History, begin: int) -> list[Point]:
    """The candidates of all finished generations from a given one on, each with the best score up to it."""
    config = SearchConfig.joined(history.store.read("run.json")["config"], {})
    found, best = list[Point](), None
    rows = [row for row in records.read(config, history).rows if row.generation < history.first]
    for step, row in enumerate(rows):
        if row.score is not None and not row.given_up:
            best = row.score if best is None else max(best, row.score)
        values = {"score": row.score, "best": best, **row.scores, "seconds": row.seconds, "generation": row.generation}
        if row.generation >= begin:
            found.append(Point(step, {key: float(value) for key, value in values.items() if value is not None}))
    return found

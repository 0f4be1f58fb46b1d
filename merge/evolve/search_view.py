"""How a search gets on, for whoever started it; and what it came to."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from fleet.progress import duration
from fleet.recipe import NotYet
from merge.evolve import records, scoring
from merge.evolve.records import SearchOutcome
from merge.search.search_progress import SearchProgress, number, table


class SearchView(SearchProgress[SearchOutcome]):
    def found(self) -> SearchOutcome:
        return records.read(self.history)

    def checked(self, metrics: Mapping[str, Any]) -> str:
        notes = "".join(f"\nNote: {note}." for note in json.loads(metrics["notes"]))
        what = f"{metrics['coordinates']} coordinates, {metrics['tensors']} tensors of {metrics['dtype']}"
        return f"checked: {what}{notes}"

    def generation(self, found: SearchOutcome, number: int) -> str:
        rows = [row for row in found.rows if row.generation == number]
        if not rows:
            return "held-out test: done"
        scores, words = [row.score for row in rows if row.score is not None], [f"{len(rows)} candidates"]
        if failed := [row.error for row in rows if row.score is None]:
            words.append(f"{len(failed)} failed ({_first_words(failed[0])})")
        if given_up := sum(row.given_up for row in rows):
            words.append(f"{given_up} given up early")
        if scores:
            words.append(f"best {max(scores):.4f}, mean {sum(scores) / len(scores):.4f}")
        if best := found.best:
            words.append(f"best so far {best.score:.4f}")
        return f"generation {number}: {', '.join(words)}"

    def speed(self) -> str:
        """Candidates a minute."""
        try:
            found = self.found()
        except (NotYet, KeyError):
            return "checking tasks and models"
        total, seconds = found.config.max_fevals, self.seconds()
        done = sum(row.generation >= self._began_at for row in found.rows)
        words = [f"{len(found.rows)} of {total} candidates", f"{60 * done / seconds:.1f} a minute"]
        return ", ".join(words)

    def left(self) -> str:
        try:
            found = self.found()
        except (NotYet, KeyError):
            return ""
        done = sum(row.generation >= self._began_at for row in found.rows)
        more = found.config.max_fevals - len(found.rows)
        more = 0 if self.history.ended else more  # the first generation may have failed
        return f"about {duration(more * self.seconds() / done)} left of the whole search" if done and more > 0 else ""

    def leaders(self, found: SearchOutcome) -> Table:
        return table_of(found)


def _first_words(text: str) -> str:
    return " ".join(text.split())[:160]


def table_of(found: SearchOutcome) -> Table:
    """The best so far beside the donors; with their scores in the held-out test, once there was one."""
    best, tested = found.best, bool(found.tested)
    shown = f"best merge (generation {best.generation}, candidate {best.index})" if best else "best merge"
    known = [("winner", shown, best.score if best else None)]
    known += [(name, name, found.donors.get(name)) for name in found.config.models]
    rows = [[called, number(score), *([_tested(found, name)] if tested else [])] for name, called, score in known]
    return table("Merge search", ["", "score", *(["held out"] if tested else [])], rows)


def _tested(found: SearchOutcome, name: str) -> str:
    if "score" not in (metrics := found.tested.get(name, {})):
        return "-"
    mean, error = scoring.mean_and_error(found.config, json.loads(metrics["single"]))
    return f"{mean:.4f} ± {1.96 * error:.4f}"


def summary(found: SearchOutcome) -> Sequence[str]:
    """In words, at the end."""
    donors, best = [score for score in found.donors.values() if score is not None], found.best
    failed = [name for name, score in found.donors.items() if score is None]
    if best is None or best.score is None:
        reasons = [_first_words(row.error) for row in found.rows if row.error]
        if not reasons:
            return ["No candidate yet."]
        why = f"No candidate has a score. The last one failed: {reasons[-1]}"
        return [why, *(f"{name} by itself failed, too." for name in failed)]
    of = "" if len(donors) == len(found.config.models) else f" of the {len(donors)} that have a score"
    ahead = f", {best.score - max(donors):+.4f} beside the best model{of}" if donors else ""
    alone = (f"{name} has no score by itself: it failed." for name in failed)
    return [f"The best merge scores {best.score:.4f}{ahead}.", *alone]

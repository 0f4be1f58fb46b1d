"""How a search gets on, for whoever started it; and what it came to."""

import json
from collections.abc import Sequence

from rich.table import Table

from fleet.history import History
from fleet.progress import Progress, duration
from fleet.recipe import NotYet
from merge.evolve import records, scoring
from merge.evolve.merge_search import CHECK
from merge.evolve.records import CandidateRow, SearchOutcome
from merge.evolve.search_config import SearchConfig


class SearchView(Progress):
    names_members = False

    def __init__(self, history: History, rounds: int) -> None:
        super().__init__(history, rounds)
        self.config = SearchConfig.joined(history.store.read("run.json")["config"], {})

    def line(self, round: int) -> str:
        if round == 0:
            metrics = self.history[CHECK].metrics
            notes = "".join(f"\nNote: {note}." for note in json.loads(metrics["notes"]))
            what = f"{metrics['coordinates']} coordinates, {metrics['tensors']} tensors of {metrics['dtype']}"
            return f"checked: {what}{notes}"
        return generation_text(self._found(), round)

    def speed(self) -> str:
        """Candidates a minute."""
        try:
            found, total = self._found(), self.config.max_fevals
        except (NotYet, KeyError):
            return "looking at tasks and models"
        seconds, done = max(1e-3, self._now() - self._began), len(found.rows) - self._already(found)
        words = [f"{len(found.rows)} of {total} candidates", f"{60 * done / seconds:.1f} a minute"]
        return ", ".join(words)

    def left(self) -> str:
        try:
            found = self._found()
        except (NotYet, KeyError):
            return ""
        seconds, done = self._now() - self._began, len(found.rows) - self._already(found)
        more = self.config.max_fevals - len(found.rows)
        return f"about {duration(more * seconds / done)} left of the whole search" if done and more > 0 else ""

    def table(self) -> Table:
        return table_of(self._found())

    def _found(self) -> SearchOutcome:
        return records.read(self.config, self.history)

    def _already(self, found: SearchOutcome) -> int:
        """Candidates of before this start."""
        return sum(row.generation < self._began_at for row in found.rows)


def generation_text(found: SearchOutcome, generation: int) -> str:
    rows = [row for row in found.rows if row.generation == generation]
    if not rows:
        return "held-out questions: looked at"
    scores = [row.score for row in rows if row.score is not None]
    failed, given_up = len(rows) - len(scores), sum(row.given_up for row in rows)
    words = [f"generation {generation}: {len(rows)} candidates"]
    words += (
        [f"{failed} failed ({_first_words(next(row.error for row in rows if row.score is None))})"] if failed else []
    )
    words += [f"{given_up} given up early"] if given_up else []
    if scores:
        words.append(f"best {max(scores):.4f}, mean {sum(scores) / len(scores):.4f}")
    if best := found.best:
        words.append(f"best so far {best.score:.4f}")
    return ", ".join(words)


def _first_words(text: str) -> str:
    return " ".join(text.split())[:160]


def table_of(found: SearchOutcome) -> Table:
    """The best so far beside the donors; on held-out questions, too, once these were looked at."""
    table = Table(title="Merge search", title_justify="left")
    held = bool(found.held)
    for name in ("", "score", *(["held out"] if held else [])):
        table.add_column(name, justify="left" if not name else "right")
    best = found.best
    table.add_row(_where(best), _number(best.score if best else None), *([_held(found, "winner")] if held else []))
    for name in found.config.models:
        table.add_row(name, _number(found.donors.get(name)), *([_held(found, name)] if held else []))
    return table


def _where(best: CandidateRow | None) -> str:
    return f"best merge (generation {best.generation}, candidate {best.index})" if best else "best merge"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _held(found: SearchOutcome, name: str) -> str:
    if "score" not in (metrics := found.held.get(name, {})):
        return "-"
    mean, error = scoring.mean_and_error(found.config, json.loads(metrics["single"]))
    half = 1.96 * error
    return f"{mean:.4f} ± {half:.4f}"


def summary(found: SearchOutcome) -> Sequence[str]:
    """In words, at the end."""
    if (best := found.best) is None:
        reasons = [row.error for row in found.rows if row.error]
        failed = [f"{name} by itself failed, too." for name, score in found.donors.items() if score is None]
        why = f"No candidate has a score. The last one failed: {_first_words(reasons[-1])}" if reasons else ""
        return [why, *failed] if why else ["No candidate yet."]
    donors, all_of_them = [score for score in found.donors.values() if score is not None], len(found.config.models)
    of = "" if len(donors) == all_of_them else f" of the {len(donors)} that have a score"
    ahead = f", {best.score - max(donors):+.4f} beside the best model{of}" if donors and best.score is not None else ""
    failed = [f"{name} has no score by itself: it failed." for name, score in found.donors.items() if score is None]
    return [f"The best merge scores {best.score:.4f}{ahead}.", *failed]

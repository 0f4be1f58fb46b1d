"""How a search gets on, for whoever started it; and what it came to."""

import json
from collections.abc import Sequence

from rich.table import Table

from fleet.progress import Progress, duration
from fleet.recipe import NotYet
from merge.evolve import records, scoring
from merge.evolve.records import SearchOutcome
from merge.search.search_strategy import CHECK


class SearchView(Progress):
    names_members = False

    def line(self, round: int) -> str:
        if round == 0:
            metrics = self.history[CHECK].metrics
            notes = "".join(f"\nNote: {note}." for note in json.loads(metrics["notes"]))
            what = f"{metrics['coordinates']} coordinates, {metrics['tensors']} tensors of {metrics['dtype']}"
            return f"checked: {what}{notes}"
        return generation_text(records.read(self.history), round)

    def speed(self) -> str:
        """Candidates a minute, and the time left."""
        try:
            found = records.read(self.history)
        except (NotYet, KeyError):
            return "checking tasks and models"
        total = found.config.max_fevals
        before = sum(row.generation < self._began_at for row in found.rows)
        seconds, done = max(1e-3, self._now() - self._began), len(found.rows) - before
        words = [f"{len(found.rows)} of {total} candidates", f"{60 * done / seconds:.1f} a minute"]
        if done and total > len(found.rows):
            words.append(f"about {duration((total - len(found.rows)) * seconds / done)} left")
        return ", ".join(words)

    def table(self) -> Table:
        return table_of(records.read(self.history))


def generation_text(found: SearchOutcome, generation: int) -> str:
    rows = [row for row in found.rows if row.generation == generation]
    if not rows:
        return "held-out test: done"
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
    """The best so far beside the donors; with their scores in the held-out test, once there was one."""
    table, best = Table(title="Merge search", title_justify="left"), found.best
    for name in ("", "score", *(["held out"] if found.tested else [])):
        table.add_column(name, justify="left" if not name else "right")
    shown = f"best merge (generation {best.generation}, candidate {best.index})" if best else "best merge"
    for name, called, score in [
        ("winner", shown, best.score if best else None),
        *((name, name, found.donors.get(name)) for name in found.config.models),
    ]:
        cells = ["-" if score is None else f"{score:.4f}", *([_tested(found, name)] if found.tested else [])]
        table.add_row(called, *cells)
    return table


def _tested(found: SearchOutcome, name: str) -> str:
    if "score" not in (metrics := found.tested.get(name, {})):
        return "-"
    mean, error = scoring.mean_and_error(found.config, json.loads(metrics["single"]))
    return f"{mean:.4f} ± {1.96 * error:.4f}"


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

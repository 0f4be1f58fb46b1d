"""How a search gets on, for whoever started it; and what it came to."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace

from rich.table import Table

from fleet.plain import several
from fleet.progress import duration
from fleet.recipe import NotYet
from merge.evolve.records import SearchOutcome, read
from merge.search.search_progress import SearchProgress, number, table
from merge.search.search_strategy import CHECK
from train import question_marks


class SearchView(SearchProgress):
    def found(self) -> SearchOutcome:
        return read(self.history)

    def line(self, round: int) -> str:
        return self.generation(self.found(), round) if round else self.checked()

    def checked(self) -> str:
        metrics = self.history[CHECK].metrics
        notes = "".join(f"\nNote: {note}." for note in json.loads(metrics["notes"]))
        coordinates, tensors = (several(metrics[f"{each}s"], each) for each in ("coordinate", "tensor"))
        what = f"{coordinates}, {tensors} of {metrics['dtype']}"
        return f"checked: {what}{notes}"

    def generation(self, found: SearchOutcome, number: int) -> str:
        rows = [row for row in found.rows if row.generation == number]
        if not rows:
            return "held-out test: done"
        kind = "finalist" if rows[0] in found.finalists else "candidate"
        scores, words = [row.score for row in rows if row.score is not None], [several(len(rows), kind)]
        if failed := [row.error for row in rows if row.score is None]:
            words.append(f"{len(failed)} failed ({_first_words(failed[0])})")
        if asked := sum(row.standard_error is not None for row in rows):
            words.append(f"{asked} estimated from few questions")
        if given_up := sum(row.given_up for row in rows):
            words.append(f"{given_up} given up early")
        if scores:
            words.append(f"best {max(scores):.4f}, mean {sum(scores) / len(scores):.4f}")
        there = [row for row in found.rows if row.generation <= number]  # later ones may be there by now
        if best := replace(found, rows=there).best:
            guess = "" if best.standard_error is None else " (estimated)"
            words.append(f"best so far {best.score:.4f}{guess}")
        return f"generation {number}: {', '.join(words)}"

    def scored(self) -> tuple[int, int, int] | None:
        """Candidates of this start, of all starts, at most; nothing before the check of tasks and models."""
        try:
            found = self.found()
        except (NotYet, KeyError):
            return None
        done = sum(row.generation >= self._began_at for row in found.rows)
        return done, len(found.rows), found.config.max_fevals + len(found.finalists)

    def speed(self) -> str:
        """Candidates, and as soon as there is one, how many a minute."""
        if not (scored := self.scored()):
            return "checking tasks and models"
        done, count, most = scored
        rate = f", {60 * done / self.seconds():.1f} a minute" if done else ""
        return f"{count} of {most} candidates{rate}"

    def left(self) -> str:
        done, count, most = self.scored() or (0, 0, 0)
        more = 0 if self.history.ended else most - count  # the first generation may have failed
        return f"about {duration(more * self.seconds() / done)} left of the whole search" if done and more > 0 else ""

    def table(self) -> Table:
        return table_of(self.found())


def _first_words(text: str) -> str:
    return " ".join(text.split())[:160]


def table_of(found: SearchOutcome) -> Table:
    """The best so far beside the donors; with their scores in the held-out test, once there was one."""
    best, tested = found.best, bool(found.tested)
    shown = f"best merge (generation {best.generation}, candidate {best.index})" if best else "best merge"
    known = [("winner", shown, best.score if best else None)]
    known += [(name, name, found.donors.get(name)) for name in found.config.models]
    rows = [[called, number(score), *([_tested(found, name)] if tested else [])] for name, called, score in known]
    return table("Merge search", ["", "score", *(["held out, 95%"] if tested else [])], rows)


def _tested(found: SearchOutcome, name: str) -> str:
    if "score" not in (metrics := found.tested.get(name, {})):
        return "-"
    mean, error = question_marks.mean_and_error(found.config.tasks, json.loads(metrics["single"]))
    if not math.isfinite(error):
        return number(float(metrics["score"]))  # one question has no interval
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

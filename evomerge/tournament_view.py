"""How a tournament gets on, for whoever started it; and what it came to."""

from collections.abc import Iterator

from rich.table import Table

from evomerge.config import BITS, EvaluationSettings
from evomerge.tournament_results import TournamentEntry, TournamentOutcome, ahead, best_first, interval, read
from fleet.plain import several
from fleet.progress import duration
from merge.search.search_progress import SearchProgress, number, table
from merge.search.search_strategy import CHECK


class TournamentView(SearchProgress):
    def found(self) -> TournamentOutcome:
        return read(self.history)

    def line(self, number: int) -> str:
        found = self.found()
        e, count = found.config.evolution_settings, len(found.generations)
        if number == 0:
            score, layers = score_in_words(found.config.evaluation_settings), self.history[CHECK].metrics["layers"]
            return f"models fit together: {several(layers, 'layer')}; score: {score}"
        if number == count + 1 and (finalists := best_first(found.finalists)):
            who = several(len(finalists), "finalist")
            return f"all questions have been answered by {who}, best {finalists[0].score:.4f}"
        if number > count:
            why = "" if count == e.num_generations else f" (nothing got better for {several(e.patience, 'generation')})"
            return f"the end after {several(count, 'generation')}{why}; now the held-out test"
        entries = found.generations[number - 1]
        good = best_first(entries)
        words = [f"generation {number}: {several(len(entries), 'model')}"]
        words += [f"{len(entries) - len(good)} failed"] if len(good) < len(entries) else []
        words += [f"best {good[0].score:.4f} ({good[0].name})"] if good else []
        if number == 1 and (given := best_first(found.models)):
            words.append(f"the best of the given ones has {given[0].score:.4f}")
        return ", ".join(words)

    def speed(self) -> str:
        found = self.found()
        e = found.config.evolution_settings
        if found.tested:
            return f"{duration(self.seconds())} in all"
        if len(found.generations) == e.num_generations:
            return "held-out test"
        return f"generation {len(found.generations) + 1} of at most {e.num_generations}"

    def table(self) -> Table:
        found = self.found()
        best = best_first([*found.models, *found.all])[:8]
        rows = [[entry.name, number(entry.score), entry.technique or "given"] for entry in best]
        return table("The best so far", ["model", "score", "made by"], rows, left=["score", "made by"])


def final_table(found: TournamentOutcome) -> Table:
    """The winner beside the models that it came from."""
    winner, e = found.tested[0], found.config.evaluation_settings
    others = [name for name in winner.objectives if name != BITS]
    of_text = ["perplexity (95%)", "the winner gains"] if e.text_weight else []
    rows = []
    for tested in found.tested:
        cells = ["winner" if tested is winner else tested.name, number(tested.metrics["test_score"])]
        cells += _text_cells(winner, tested) if of_text else []
        rows.append([*cells, *(number(tested.objectives[name]) for name in others)])
    gains = " The winner gains bits per byte on the same passages (±: 95%)." if of_text else ""
    return table("Held-out test", ["", "score", *of_text, *others], rows, caption=f"Score: {score_in_words(e)}.{gains}")


def better_ones(found: TournamentOutcome) -> Iterator[str]:
    """Which given model is better than the winner, on what judged it or on what is held out."""
    asked = (
        ("on what judged the tournament", "score", found.best, found.models),
        ("in the held-out test", "test_score", found.tested[0], found.tested[1:]),
    )
    for where, measure, winner, given in asked:
        scored = [each for each in given if measure in each.metrics]
        best = max(scored, key=lambda each: each.metrics[measure], default=None)
        if winner and best and best.metrics[measure] > (own := winner.metrics[measure]):
            values = f"{number(own)}, not {number(best.metrics[measure])}"
            yield f"The winner is worse than {best.name}, which was given, {where}: {values}."


def score_in_words(e: EvaluationSettings) -> str:
    """What it is the sum of."""
    parts = [f"- {e.text_weight:g} x bits per byte"] if e.text_weight else []
    parts += [f"{'+' if task.weight >= 0 else '-'} {abs(task.weight):g} x {task.key}" for task in e.tasks]
    return " ".join(parts).removeprefix("+ ")


def _text_cells(winner: TournamentEntry, tested: TournamentEntry) -> tuple[str, str]:
    low, high = interval(tested)
    gain, half = ahead(winner, tested)
    shown = f"{tested.metrics['perplexity']:.1f} ({low:.1f} to {high:.1f})"
    return shown, "" if tested is winner else f"{gain:+.3f} ± {half:.3f}"


def front_table(found: TournamentOutcome) -> Table:
    """Models that no other one beats in every objective."""
    names = list(found.front[0].objectives) if found.front else []
    columns, rows = ["model", "score", *names, "made by"], []
    for entry in found.front:
        values = [number(entry.score), *(number(entry.objectives[name]) for name in names)]
        rows.append([entry.name, *values, entry.technique or "given"])
    return table("Nobody beats these in everything", columns, rows, left=columns)

"""How a tournament gets on, for whoever started it; and what it came to."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from evomerge import tournament_results
from evomerge.config import EvaluationSettings
from evomerge.fitness_evaluator import BITS, key
from evomerge.tournament_results import Tested, TournamentOutcome
from fleet.progress import duration
from merge.search.search_progress import SearchProgress, number, table


class TournamentView(SearchProgress[TournamentOutcome]):
    def found(self) -> TournamentOutcome:
        return tournament_results.read(self.history)

    def checked(self, metrics: Mapping[str, Any]) -> str:
        score = score_in_words(self.found().config.evaluation_settings)
        return f"models fit together: {metrics['layers']} layers; score: {score}"

    def generation(self, found: TournamentOutcome, number: int) -> str:
        e, count = found.config.evolution_settings, len(found.generations)
        if number > count:
            why = "" if count == e.num_generations else f" (nothing got better for {e.patience} generations)"
            return f"the end after {count} generations{why}; now the held-out test"
        entries = found.generations[number - 1]
        good = tournament_results.best_first(entries)
        words = [f"generation {number}: {len(entries)} models"]
        words += [f"{len(entries) - len(good)} failed"] if len(good) < len(entries) else []
        words += [f"best {good[0].score:.4f} ({good[0].name})"] if good else []
        if number == 1 and (given := tournament_results.best_first(found.models)):
            words.append(f"the best of the given ones has {given[0].score:.4f}")
        return ", ".join(words)

    def speed(self) -> str:
        found, done = self.found(), self.history.first - max(1, self._began_at)
        e = found.config.evolution_settings
        if found.tested:
            return f"{duration(self.seconds())} in all"
        if len(found.generations) == e.num_generations:
            return "held-out test"
        each = f", about {duration(self.seconds() / done)} each" if done > 0 else ""
        return f"generation {len(found.generations) + 1} of at most {e.num_generations}{each}"

    def leaders(self, found: TournamentOutcome) -> Table:
        best = tournament_results.best_first([*found.models, *found.all])[:8]
        rows = [[entry.name, number(entry.score), entry.technique or "given"] for entry in best]
        return table("The best so far", ["model", "score", "made by"], rows, left=["score", "made by"])


def final_table(found: TournamentOutcome) -> Table:
    """The winner beside the models that it came from."""
    winner, e = found.tested[0], found.config.evaluation_settings
    others = [name for name in winner.listed("objectives") if name != BITS]
    of_text = ["perplexity (95%)", "the winner gains"] if e.text_weight else []
    rows = []
    for tested in found.tested:
        cells = ["winner" if tested is winner else tested.name, number(tested.metrics["test_score"])]
        cells += _text_cells(winner, tested) if of_text else []
        rows.append([*cells, *(number(tested.listed("objectives")[name]) for name in others)])
    gains = " The winner gains bits per byte on the same passages (±: 95%)." if of_text else ""
    return table("Held-out test", ["", "score", *of_text, *others], rows, caption=f"Score: {score_in_words(e)}.{gains}")


def score_in_words(e: EvaluationSettings) -> str:
    """What it is the sum of."""
    parts = [f"- {e.text_weight:g} x bits per byte"] if e.text_weight else []
    parts += [f"{'+' if task.weight >= 0 else '-'} {abs(task.weight):g} x {key(task)}" for task in e.tasks]
    return " ".join(parts).removeprefix("+ ")


def _text_cells(winner: Tested, tested: Tested) -> tuple[str, str]:
    low, high = tournament_results.interval(tested)
    gain, half = tournament_results.ahead(winner, tested)
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

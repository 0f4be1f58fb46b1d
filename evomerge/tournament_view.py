"""How a tournament gets on, for whoever started it; and what it came to."""

from collections.abc import Sequence

from rich.table import Table

from evomerge import tournament_results
from evomerge.fitness_evaluator import BITS, key
from evomerge.tournament_results import Tested, TournamentEntry, TournamentOutcome
from fleet.progress import Progress, duration


class TournamentView(Progress):
    names_members = False

    def line(self, round: int) -> str:
        if round == 0:
            score = score_in_words(tournament_results.read(self.history))
            return f"models fit together: {self.history['0/check'].metrics['layers']} layers; score: {score}"
        return generation_text(tournament_results.read(self.history), round)

    def speed(self) -> str:
        found = tournament_results.read(self.history)
        seconds, done = max(1e-3, self._now() - self._began), self.history.first - max(1, self._began_at)
        e = found.config.evolution_settings
        if found.tested:
            return f"{duration(seconds)} in all"
        words = [f"generation {len(found.generations) + 1} of at most {e.num_generations}"]
        if len(found.generations) == e.num_generations:
            words = ["held-out test"]
        elif done > 0:
            words.append(f"about {duration(seconds / done)} each")
        return ", ".join(words)

    def table(self) -> Table:
        table = Table(title="The best so far", title_justify="left")
        for name in ("model", "score", "made by"):
            table.add_column(name)
        for entry in best_few(tournament_results.read(self.history), 8):
            table.add_row(entry.name, _number(entry.score), entry.technique or "given")
        return table


def best_few(found: TournamentOutcome, most: int) -> list[TournamentEntry]:
    good = [entry for entry in [*found.models, *found.all] if entry.score is not None]
    return sorted(good, key=lambda entry: -(entry.score or 0.0))[:most]


def generation_text(found: TournamentOutcome, generation: int) -> str:
    if generation > len(found.generations):
        e, count = found.config.evolution_settings, len(found.generations)
        why = "" if count == e.num_generations else f" (nothing got better for {e.patience} generations)"
        return f"the end after {count} generations{why}; now the held-out test"
    entries = found.generations[generation - 1]
    good = [entry for entry in entries if entry.score is not None]
    words = [f"generation {generation}: {len(entries)} models"]
    words += [f"{len(entries) - len(good)} failed"] if len(good) < len(entries) else []
    if good:
        best = max(good, key=lambda entry: entry.score or 0.0)
        words.append(f"best {best.score:.4f} ({best.name})")
    if generation == 1 and (scores := [entry.score for entry in found.models if entry.score is not None]):
        words.append(f"the best of the given ones has {max(scores):.4f}")
    return ", ".join(words)


def final_table(found: TournamentOutcome) -> Table:
    """The winner beside the models that it came from."""
    winner, names = found.tested[0], list(found.tested[0].listed("objectives"))
    text, others = BITS in names, [name for name in names if name != BITS]
    table = Table(title="Held-out test", title_justify="left", caption_justify="left")
    for column in ("", "score", *(["perplexity (95%)", "the winner gains"] if text else []), *others):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for tested in found.tested:
        cells = ["winner" if tested is winner else tested.name, _number(tested.metrics["test_score"])]
        cells += _text_cells(winner, tested) if text else []
        table.add_row(*cells, *(_number(tested.listed("objectives")[name]) for name in others))
    gains = " The winner gains bits per byte on the same passages (±: 95%)." if text else ""
    table.caption = f"Score: {score_in_words(found)}.{gains}"
    return table


def score_in_words(found: TournamentOutcome) -> str:
    """What it is the sum of."""
    e = found.config.evaluation_settings
    parts = [f"- {e.text_weight:g} x bits per byte"] if e.text_weight else []
    parts += [f"{'+' if task.weight >= 0 else '-'} {abs(task.weight):g} x {key(task)}" for task in e.tasks]
    return " ".join(parts).removeprefix("+ ")


def _text_cells(winner: Tested, tested: Tested) -> Sequence[str]:
    low, high = tournament_results.interval(tested)
    gain, half = tournament_results.ahead(winner, tested)
    shown = f"{tested.metrics['perplexity']:.1f} ({low:.1f} to {high:.1f})"
    return shown, "" if tested is winner else f"{gain:+.3f} ± {half:.3f}"


def front_table(found: TournamentOutcome) -> Table:
    """Models that no other one beats in every objective."""
    front = found.front
    table = Table(title="Nobody beats these in everything", title_justify="left")
    names = list(front[0].objectives) if front else []
    for column in ("model", "score", *names, "made by"):
        table.add_column(column)
    for entry in front:
        table.add_row(
            entry.name,
            _number(entry.score),
            *(_number(entry.objectives[name]) for name in names),
            entry.technique or "given",
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

"""What a tournament leaves for people: history.json, the front of the best, how sure one may be. It decides nothing."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from evomerge import fitness_evaluator
from evomerge.config import TournamentConfig
from evomerge.formula import Formula, makeup
from evomerge.tournament import formula_of, members_of
from fleet.history import History, opened
from fleet.recipe import Member
from merge.search.search_worker import writing_when_longer
from train.parent_selection import dominance
from train.passages import Losses, mean_and_error

HISTORY, WINNER = "history.json", "winner"


@dataclass(frozen=True)
class TournamentEntry:
    """A model that was evaluated; at the end, in the held-out test."""

    id: str
    name: str
    technique: str
    parents: tuple[str, ...]
    formula: Formula
    metrics: Mapping[str, Any]

    @property
    def score(self) -> float | None:
        return self.metrics.get("score")

    @property
    def objectives(self) -> dict[str, float]:
        return dict(self.listed("objectives"))

    def listed(self, what: str) -> Any:
        """Of "objectives"; of "each" passage, nats; of "sizes", bytes."""
        return json.loads(self.metrics.get(what, "{}"))


@dataclass(frozen=True)
class TournamentOutcome:
    config: TournamentConfig
    generations: Sequence[Sequence[TournamentEntry]]  # finished ones; the elite stands in each that it has lived in
    models: Sequence[TournamentEntry]
    tested: Sequence[TournamentEntry]  # the winner first; empty before the end
    finalists: Sequence[TournamentEntry] = ()  # who have answered all questions, where scores are estimates

    @property
    def all(self) -> list[TournamentEntry]:
        once = {entry.id: entry for generation in self.generations for entry in generation}
        return [*once.values()]

    @property
    def best(self) -> TournamentEntry | None:
        sure = [each for each in self.all if "standard_error" not in each.metrics]
        return next(iter(best_first([*self.finalists, *sure] if self.finalists else self.all)), None)

    @property
    def front(self) -> list[TournamentEntry]:
        """Models that no other one beats in every objective."""
        return pareto(self.config, [entry for entry in [*self.models, *self.all] if entry.score is not None])


def best_first(entries: Sequence[TournamentEntry]) -> list[TournamentEntry]:
    """Those that have a score; of equal ones the first."""
    return sorted((each for each in entries if each.score is not None), key=lambda entry: -(entry.score or 0.0))


def pareto(config: TournamentConfig, entries: Sequence[TournamentEntry]) -> list[TournamentEntry]:
    gains = [fitness_evaluator.gains(config.evaluation_settings, entry.objectives) for entry in entries]
    beaten = dominance(gains).sum(0)
    return best_first([entry for n, entry in enumerate(entries) if not beaten[n] and gains[n] not in gains[:n]])


# -- reading ----------------------------------------------------------------------------------------------------------


def found_in(folder: Path) -> TournamentOutcome:
    return read(opened(folder))


def read(history: History) -> TournamentOutcome:
    """From a run's registers: all generations that are finished."""
    config = TournamentConfig.joined(history.store.read("run.json")["config"], {})
    generations, models, tested, finalists = [], *(list[TournamentEntry]() for _ in range(3))
    for round in range(1, history.first_open):
        if entries := history.once("entries", round, partial(_entries, history, round)):
            generations.append(entries)
        finalists += _entries(history, round, "look")
        if round == 1:
            models = _entries(history, round, "given")
        elif round == history.first_open - 1 and (given := _entries(history, round, "given")):
            tested = [entry(history[f"{round}/winner"]), *given]
    return TournamentOutcome(config, generations, models, tested, finalists)


def _entries(history: History, round: int, role: str = "member") -> list[TournamentEntry]:
    return [entry(member) for member in members_of(history, round, role)]


def entry(member: Member) -> TournamentEntry:
    args, formula = member.recipe.args, formula_of(member.recipe)
    what = (args["name"], args.get("technique", ""), member.recipe.parents, formula)
    return TournamentEntry(member.origin, *what, member.metrics)


# -- writing ----------------------------------------------------------------------------------------------------------


def as_json(found: TournamentOutcome) -> bytes:
    best = [[entry.score for entry in generation if entry.score is not None] for generation in found.generations]
    value = {
        "generations": [[entry.id for entry in generation] for generation in found.generations],
        "best": [max(scores, default=None) for scores in best],
        "pareto_front": [entry.id for entry in found.front],
        "models": {entry.id: _listed(entry) for entry in [*found.models, *found.all, *found.finalists]},
    }
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


write_history_json = writing_when_longer(
    HISTORY,
    read,
    lambda found: len(found.generations),
    lambda table: len(json.loads(table)["generations"]),
    lambda found: {HISTORY: as_json(found)},
)


def _listed(entry: TournamentEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "technique": entry.technique,
        "parents": list(entry.parents),
        "score": entry.score,
        **({"standard_error": each} if (each := entry.metrics.get("standard_error")) else {}),
        "objectives": entry.objectives,
        "shares": {name: round(share, 4) for name, share in makeup(entry.formula).items()},
        "formula": entry.formula.model_dump(mode="json"),
    }


# -- how sure one may be ----------------------------------------------------------------------------------------------


def interval(tested: TournamentEntry) -> tuple[float, float]:
    """Of the perplexity, with 95% confidence."""
    mean, half = tested.metrics["nats"], tested.metrics["error"] * certain(len(tested.listed("sizes")))
    return math.exp(min(700.0, mean - half)), math.exp(min(700.0, mean + half))


def ahead(winner: TournamentEntry, other: TournamentEntry) -> tuple[float, float]:
    """By how many bits per byte the winner is better on the same passages, and how far that is certain (95%)."""
    sizes, pairs = winner.listed("sizes"), zip(winner.listed("each"), other.listed("each"), strict=True)
    mean, error = mean_and_error(Losses(tuple((b - a) / math.log(2) for a, b in pairs), sizes, sizes))
    return mean, certain(len(sizes)) * error


def certain(count: int) -> float:
    """So many standard errors of so many passages hold 95%: Student's t, by its series."""
    z, free = 1.959964, count - 1
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    more: float = sum(term / free ** (n + 1) for n, term in enumerate(terms))
    return z + more

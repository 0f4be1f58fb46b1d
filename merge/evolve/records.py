"""What a search writes for people: every candidate, the best recipe after each improvement, a picture. Pure but for the
history that it reads."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet.history import History
from merge.evolve.merge_search import MergeSearch
from merge.evolve.search_config import SearchConfig
from merge.evolve.search_space import Space
from merge.merge_recipe import text_of

TABLE, PLAIN, BEST, PICTURE = "history.jsonl", "history.csv", "best_config.yaml", "progress.png"


@dataclass(frozen=True)
class CandidateRow:
    """A candidate."""

    generation: int
    index: int
    genotype: Sequence[float]
    score: float | None
    scores: Mapping[str, float]
    seconds: float
    error: str
    given_up: bool = False
    asked: int = 0  # questions
    standard_error: float | None = None  # of a score that is estimated from few questions


@dataclass(frozen=True)
class SearchOutcome:
    """All that a search has come to so far."""

    config: SearchConfig
    space: Space
    rows: Sequence[CandidateRow]
    donors: Mapping[str, float | None]  # scores on the search's questions
    tested: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # winner and donors on held-out ones

    @property
    def best(self) -> CandidateRow | None:
        good = [row for row in self.rows if row.score is not None and not row.given_up]
        if any(row.score is not None for row in self.finalists):
            good = [row for row in good if row.standard_error is None]
        return max(good, key=lambda row: (row.score, -row.generation, -row.index), default=None)

    @property
    def finalists(self) -> Sequence[CandidateRow]:
        """Who has answered all questions, after all candidates had answered a few."""
        return self.rows[self.config.max_fevals :]

    def recipe(self, row: CandidateRow) -> dict[str, Any]:
        return self.space.recipe(row.genotype)


Found = tuple[list[CandidateRow], dict[str, float | None], dict[str, Mapping[str, Any]]]  # rows, donors, tested


def read(history: History) -> SearchOutcome:
    """From a run's registers: of the generations that are being made, what is finished."""
    config = SearchConfig.joined(history.store.read("run.json")["config"], {})
    rounds = [
        history.once("rows", round, partial(_of_round, config, history, round)) for round in range(1, history.last + 1)
    ]
    rows = [row for each, _, _ in rounds for row in each]
    donors = {name: score for _, each, _ in rounds for name, score in each.items()}
    tested = {name: metrics for _, _, each in rounds for name, metrics in each.items()}
    return SearchOutcome(config, MergeSearch(config).space(history), rows, donors, tested)


def _of_round(config: SearchConfig, history: History, generation: int) -> Found:
    rows, donors, tested = [], dict[str, float | None](), dict[str, Mapping[str, Any]]()
    names = dict(zip((f"donor-{n}" for n in range(99)), config.models, strict=False))
    history.look_back(generation)
    for recipe in history.plan(generation):
        id = f"{generation}/{recipe.slot}"
        if not history.finished(id) or recipe.task in ("merge", "check", "calibrate"):
            continue
        outcome = history.outcome(id)
        metrics = outcome.member.metrics
        if "point" in recipe.genome:
            scores, seconds = json.loads(metrics.get("scores", "{}")), round(outcome.seconds, 3)
            told = (recipe.genome["point"], metrics.get("score"), scores, seconds, outcome.why)
            more = (bool(metrics.get("given_up")), int(metrics.get("asked", 0)), metrics.get("standard_error"))
            rows.append(CandidateRow(generation, int(recipe.slot[1:]), *told, *more))
        elif recipe.evaluated_on == "test":
            tested[names.get(recipe.slot, recipe.slot)] = metrics
        else:
            donors[names[recipe.slot]] = metrics.get("score")
    return rows, donors, tested


def files(found: SearchOutcome) -> dict[str, bytes]:
    """By their names."""
    lines = "".join(json.dumps(vars(row)) + "\n" for row in found.rows)
    best = {BEST: text_of(found.recipe(found.best)).encode()} if found.best else {}
    return {
        **best,
        PLAIN: _table(found).encode(),
        TABLE: lines.encode(),
    }  # the table last: by it one sees what is there


def _table(found: SearchOutcome) -> str:
    text = io.StringIO()
    tasks = sorted({key for row in found.rows for key in row.scores})
    columns = ["generation", "index", "score", *tasks, "seconds", "asked", "given_up", "standard_error", "error"]
    writer = csv.DictWriter(text, [*columns, "genotype"], restval="", lineterminator="\n")
    writer.writeheader()
    for row in found.rows:
        line = {key: value for key, value in vars(row).items() if key != "scores"}
        writer.writerow({**line, **row.scores, "genotype": json.dumps(list(row.genotype))})
    return text.getvalue()


def picture(found: SearchOutcome) -> bytes:
    """The best so far, each generation's mean, and the donors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    generations = sorted({row.generation for row in found.rows})
    scores = {
        n: [row.score for row in found.rows if row.generation == n and row.score is not None] for n in generations
    }
    there = [n for n in generations if scores[n]]
    axes.plot([n for n in there for _ in scores[n]], [x for n in there for x in scores[n]], ".", color="0.7")
    axes.plot(there, [max(x for m in there if m <= n for x in scores[m]) for n in there], "-", label="best so far")
    axes.plot(there, [sum(scores[n]) / len(scores[n]) for n in there], "--", label="mean of the generation")
    for n, (name, score) in enumerate(found.donors.items()):
        if score is not None:
            axes.axhline(score, color=f"C{n + 2}", linewidth=0.8, label=name.rstrip("/").rpartition("/")[2][:40])
    axes.set(xlabel="generation", ylabel="score")
    axes.legend(fontsize="small")
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()

"""Scores and the best recipe for Weights & Biases; its key is its own business (wandb login, WANDB_API_KEY)."""

from pathlib import Path
from typing import Any

from merge.evolve import records
from merge.evolve.records import Found


class Reporter:
    """One run there for one search here, however often it is started: a step is a candidate, and logged once."""

    def __init__(self, found: Found, id: str, folder: Path) -> None:
        import wandb

        c = found.config
        settings = {key: value for key, value in c.bound().items() if key != "tasks"}
        self._run: Any = wandb.init(
            project=c.wandb_project, entity=c.wandb_entity or None, id=id, name=c.project_name, resume="allow",
            dir=str(folder), config=settings, settings=wandb.Settings(silent=True, console="off"),
        )  # fmt: skip
        self._next, self._folder = int(self._run.step), folder

    def tell(self, found: Found, generation: int) -> None:
        """All candidates up to a generation that is whole."""
        rows = [row for row in found.rows if row.generation <= generation]
        best: float | None = None
        for step, row in enumerate(rows):
            if row.score is not None and not row.given_up:
                best = row.score if best is None else max(best, row.score)
            if step >= self._next:
                values = {"score": row.score, "best": best, **row.scores, "seconds": row.seconds}
                given = {key: value for key, value in values.items() if value is not None}
                self._run.log({**given, "generation": row.generation}, step=step)
        self._next = max(self._next, len(rows))

    def end(self) -> None:
        import wandb

        if (self._folder / records.BEST).is_file():
            artifact = wandb.Artifact(f"best-{self._run.id}", "recipe")
            artifact.add_file(str(self._folder / records.BEST))
            self._run.log_artifact(artifact)
        self._run.finish()

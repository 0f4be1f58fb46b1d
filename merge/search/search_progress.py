"""How a search gets on, for whoever started it, and tables of what it came to."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from rich.table import Table

from fleet.progress import Progress
from merge.search.search_strategy import CHECK

F = TypeVar("F")


class SearchProgress(Progress, ABC, Generic[F]):
    """Of what a search has come to so far, which its registers say."""

    names_members = False

    @abstractmethod
    def found(self) -> F: ...

    @abstractmethod
    def checked(self, metrics: Mapping[str, Any]) -> str:
        """What is told once round 0 is finished,"""

    @abstractmethod
    def generation(self, found: F, number: int) -> str:
        """and each round after it."""

    @abstractmethod
    def leaders(self, found: F) -> Table: ...

    def line(self, round: int) -> str:
        return self.generation(self.found(), round) if round else self.checked(self.history[CHECK].metrics)

    def table(self) -> Table:
        return self.leaders(self.found())

    def seconds(self) -> float:
        """Since this start of the run."""
        return max(1e-3, self._now() - self._began)


def table(
    title: str, columns: Iterable[str], rows: Iterable[Sequence[str]], left: Sequence[str] = (), caption: str = ""
) -> Table:
    """The first column and some others begin on the left, the others are numbers."""
    made = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
    for n, name in enumerate(columns):
        made.add_column(name, justify="right" if n and name not in left else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"

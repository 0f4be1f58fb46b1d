"""How a search gets on, for whoever started it, and tables of what it came to."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from fleet.progress import Progress


class SearchProgress(Progress):
    """Of what a search has come to so far, which its registers say."""

    names_members = False
    stops_at = "the next model"

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

"""How figures are shown: beside the limit, the ratio and the goal."""

from statistics import median, stdev

from cyclopts import Parameter
from rich.table import Table

NONE = "[dim]-[/dim]"
SEVERAL = Parameter(consume_multiple=True, negative=())  # values behind one option, as in --machines 4 8


def table(title: str, *columns: str, note: str = "") -> Table:
    """The first column names the row, the others hold numbers."""
    made = Table(title=title, caption=note or None, title_justify="left", caption_justify="left")
    for n, column in enumerate(columns):
        made.add_column(column, justify="right" if n else "left")
    return made


def goal(met: bool, words: str) -> str:
    return f"[green]{words}[/green]" if met else f"[red]{words}[/red]"


def spread(values: list[float], digits: int = 2) -> str:
    """The median, and from where to where."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def half_interval(values: list[float]) -> float:
    """How far the mean of a few is certain, with 95% confidence: by Student's t."""
    t = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
    return t.get(len(values), 2.0) * stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")

"""Help pages: prose is as wide as the terminal, and a command that stands on a line of its own stays whole."""

import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from cyclopts import App
from cyclopts.help import InlineText
from rich.console import Console
from rich.text import Text

from fleet import version
from fleet.our_packages import console_command


class _HelpConsole(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        match objects:
            case [InlineText(primary_renderable=Text(plain=str(text)), force_empty_end=above)]:  # the options, or below
                end = "\n\n" if above else "\n"
                super().print(laid_out(text, self.width), end=end, soft_wrap=True, markup=False, highlight=False)
            case _:
                super().print(*objects, **how)


def app(name: str, about: str | None, examples: str = "", width: int | None = None, **more: Any) -> App:
    """A command that is explained above its options, and further below them. An indented line is left as it is."""
    page = {"help_format": "plaintext", "console": _HelpConsole(width=width), "version_flags": ["--version"]}
    how = {**page, "version": version.version_line, **more}
    made = App(name=console_command() or name, help=about, help_epilogue=examples or None, **how)
    made["--help"].group = made["--version"].group = "Parameters"  # no table for these alone
    return made


def laid_out(text: str, width: int) -> str:
    return "\n".join(_lines(text, width))


def _lines(text: str, width: int) -> Iterator[str]:
    for whole, lines in groupby(text.strip("\n").split("\n"), lambda line: line[:1] in ("", " ")):
        if whole:
            yield from lines
        else:
            yield textwrap.fill(" ".join(lines), width, break_long_words=False, break_on_hyphens=False)

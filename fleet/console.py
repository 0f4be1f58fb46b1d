"""Where tables for people go."""

import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from fleet.plain import lines, utter


class _PlainConsole(Console):
    """Obeys no text: what is not of rich's own making holds no control characters, no markup and no links."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            unlinked = style.update_link(None) if style and style.link else style
            yield Segment(text if control else lines(text), unlinked, control)


class _Voice:
    """A stream that never fails whoever speaks."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        utter(text, self._file)
        return len(text)

    def flush(self) -> None:
        """It was, as far as possible."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def in_full(shown: Console, lines: Iterable[Text]) -> None:
    """Lines that may hold commands to be copied: however narrow the terminal is, none is broken here."""
    for line in lines:
        shown.print(line, soft_wrap=True, highlight=False)


def console(file: IO[str] | None = None, width: int | None = None, color: bool | None = None) -> Console:
    """As wide as the terminal; into a file or a pipe, so wide that no name is cut."""
    wide = width or (None if sys.stdout.isatty() else 200)
    voice: Any = _Voice(file or sys.stdout)
    return _PlainConsole(file=voice, width=wide, force_terminal=color, markup=False, emoji=False)

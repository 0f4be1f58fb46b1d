"""Where tables for people go."""

import sys
from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from fleet.plain import lines


class _Plain(Console):
    """Obeys no text: what is not of rich's own making holds no control characters, no markup and no links."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            unlinked = style.update_link(None) if style and style.link else style
            yield Segment(text if control else lines(text), unlinked, control)


def console(file: IO[str] | None = None, width: int | None = None, color: bool | None = None) -> Console:
    """As wide as the terminal; into a file or a pipe, so wide that no name is cut."""
    wide = width or (None if sys.stdout.isatty() else 200)
    return _Plain(file=file, width=wide, force_terminal=color, markup=False, emoji=False)

"""What a sink of metrics is given, and what it does.

What a sink holds already it knows by itself, so that nothing beside it has to be kept in step with it. Any error is
for its caller, who opens it again and goes on after `upto`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Point:
    """What is known of one step; a table may have other rows of it than that one."""

    step: int
    values: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class LoggedRun:
    """Whose metrics these are."""

    folder: Path
    project: str
    name: str
    id: str  # nobody else's
    entity: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    after: int = -1  # what was written up to this step stays and later ones come again; -1: all come again


class MetricSink(Protocol):
    upto: int  # the last step that it holds; -1: none

    def write(self, points: Sequence[Point]) -> None: ...
    def close(self, files: Sequence[Path] = ()) -> None:
        """Nothing more comes; some can keep files, too."""

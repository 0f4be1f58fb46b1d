"""What workers noted, from the first line to the last."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fleet.report.facts import Span
from fleet.worker_notes import SO_FAR, WorkerNotes, number

_EARLIEST = 1e9  # seconds: a moment of 2001
_TROUBLE = {"waits": "waited for the disk", "failed": "failed", "stopped": "stopped", "suspects": "suspects",
            "voided": "found damaged", "leaves to others": "left to others", "benched": "benched"}  # fmt: skip


@dataclass
class WorkerStory(WorkerNotes):
    """One process, with all that it did."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)  # 0: not ended
    makes: list[tuple[float, float, str, float]] = field(default_factory=list)  # when, seconds, whom, bytes moved
    waits: list[tuple[float, float]] = field(default_factory=list)
    late: set[str] = field(default_factory=set)
    troubles: list[tuple[float, str, str, str]] = field(default_factory=list)  # when, what, whom, why
    dull: ClassVar[bytes] = b'"what":"published"'  # every other line says this, and nothing that is not known

    def take(self, event: dict[str, Any]) -> None:
        """Sums of others are told by their own notes. A clock that was never set says nothing."""
        what, at, id = str(event.get("what", "")), number(event, "at"), str(event.get("id", ""))
        if what == SO_FAR or at < _EARLIEST:
            return
        before = self.last
        super().take(event)
        self.last = max(before, at)
        seconds = max(0.0, number(event, "seconds"))
        if what == "started" or not self.begins:
            self.begins.append(at)
            self.ends.append(0.0)
        if what == "ended":
            self.ends[-1] = at
        elif what == "made":
            self.makes.append((at, seconds, id, number(event, "written") + number(event, "read")))
        elif what == "waited":
            self.waits.append((at, seconds))
        elif what == "late":
            self.late.add(id)
        elif what in _TROUBLE:
            self.troubles.append((at, _TROUBLE[what], id, str(event.get("why", ""))))

    def sessions(self, alive: bool, seen: float) -> list[Span]:
        """Several if a name was used again; only the last can be at work."""
        found = []
        for n, (begin, end) in enumerate(zip(self.begins, self.ends, strict=True)):
            if end:
                found.append(Span(begin, end, "ended"))
            elif n + 1 < len(self.begins):
                found.append(Span(begin, max(begin, min(self.last, self.begins[n + 1])), "lost"))
            else:
                found.append(Span(begin, max(begin, self.last, seen), "works" if alive else "lost"))
        return found

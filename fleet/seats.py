"""A worker's place: who sits there, and when another one takes it. No libraries: a crew runs on bare Python."""

import signal
from dataclasses import dataclass

QUICK = 60.0  # seconds; a worker that lived for so long did not crash at once
FINAL = (0, 2, 3, 130)  # the run is over, something is wrong here, the run stopped, interrupted: no second try helps


@dataclass
class Seat:
    """One worker's place; a new process takes it when the old one died."""

    number: int
    started: float = 0.0
    crashes: int = 0  # in a row, each soon after the start
    again_at: float | None = None  # when the next one takes it
    code: int | None = None  # how it ended for good

    def ended(self, code: int, now: float, restarts: int, leaving: bool) -> bool:
        """Note how its process ended; says whether another one shall take the place."""
        self.crashes = self.crashes + 1 if now - self.started < QUICK else 1
        if code in FINAL or leaving or self.crashes > restarts:
            self.code, self.crashes = code, 0 if code in FINAL else self.crashes
            return False
        self.again_at = now + (min(10.0, 0.1 * 2**self.crashes) if self.crashes > 1 else 0.0)
        return True


def ending(code: int) -> str:
    """In words."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"

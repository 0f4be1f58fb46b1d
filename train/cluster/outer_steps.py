"""What a peer tells of one outer step: a line for people, numbers for the sinks of metrics."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OuterStep:
    number: int
    met: tuple[str, ...]  # the other peers
    drift: float  # of the weights learned here from the average, beside its size
    seconds: float  # from the last local step to the next one
    waited: float  # of these, until the others were there
    at: float = field(default_factory=time.time)

    def in_words(self) -> str:
        """Peers are in different places: their clocks, in the same one."""
        whom = f"met {', '.join(self.met)}" if self.met else "met nobody"
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        took = f"took {self.seconds:.1f} s, {self.waited:.1f} s of them waiting for others"
        return f"outer step {self.number}, {when}: {whom}; {took}; drift {100 * self.drift:.3g} %"

    def metrics(self) -> dict[str, float]:
        numbers = {"peers": 1.0 + len(self.met), "outer_round": float(self.number), "drift": self.drift}
        seconds = {"exchange_seconds": self.seconds, "waited_seconds": self.waited}
        return {**numbers, **seconds, **{f"met/{name}": 1.0 for name in self.met}}

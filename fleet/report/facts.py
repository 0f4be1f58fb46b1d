"""What the page tells of a run, as plain records. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fleet.ancestry.tree import Node, Tree

MEASURES = ("score", "loss", "bits_per_byte", "train_loss")  # of members' metrics; the first there is, is the fitness


@dataclass(frozen=True, slots=True)
class Spread:
    """One measure over the members of a round."""

    low: float
    mean: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(min(values), sum(values) / len(values), max(values), len(values))

    def best(self, measure: str) -> float:
        return self.high if measure == "score" else self.low


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    slots: int
    finished: int
    tokens: float
    members: Mapping[tuple[str, str], Spread]  # by the questions that they were asked, and the measure
    averaged: Mapping[str, float]  # the averaged model, by measure
    leader: Mapping[tuple[str, str], str]  # the best member
    at: float = 0.0  # when the last of its members was made; 0 if nobody noted it
    averaged_at: float = 0.0  # when the averaged model was evaluated,
    averaged_on: str = ""  # and on which text

    @property
    def complete(self) -> bool:
        return self.finished == self.slots


@dataclass(frozen=True, slots=True)
class Span:
    """What a worker did from one moment to another."""

    begin: float
    end: float
    kind: str  # a key of KINDS; of a session how it ended, "ended", "lost" or "works"
    id: str = ""


KINDS = {
    "train": "training",
    "evaluate": "evaluating",
    "merge": "merging, preparing",
    "late": "came too late",
    "lost": "work that was lost",
    "now": "being made now",
    "wait": "waiting",
}


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker's place, whoever sat there."""

    machine: str
    name: str
    sessions: Sequence[Span]  # of each process, from its start to its end or its last sign of life
    spans: Sequence[Span]
    made: int

    @property
    def seconds(self) -> float:
        return sum(each.end - each.begin for each in self.sessions)

    def spent(self, *kinds: str) -> float:
        return sum(span.end - span.begin for span in self.spans if span.kind in kinds)

    @property
    def useful(self) -> float:
        """The share of its time in which it made what counts."""
        return min(1.0, self.spent("train", "evaluate", "merge") / self.seconds) if self.seconds else 0.0

    @property
    def ending(self) -> str:
        return self.sessions[-1].kind if self.sessions else ""


@dataclass(frozen=True, slots=True)
class Failure:
    at: float  # 0: nobody noted it
    id: str
    worker: str
    machine: str
    why: str
    tail: Sequence[str] = ()  # of its log


@dataclass(frozen=True, slots=True)
class DonorScore:
    """A given model by itself, to compare with."""

    name: str
    questions: str
    measure: str
    value: float


@dataclass(frozen=True)
class Facts:
    folder: str
    name: str
    config: Mapping[str, Any]
    operational: Mapping[str, Any]
    command: str
    state: str
    over: bool
    began: float  # 0: nobody has noted anything yet
    now: float
    rounds: Sequence[Round] = ()
    rows: Sequence[WorkerRow] = ()
    failures: Sequence[Failure] = ()
    donors: Sequence[DonorScore] = ()
    moved: Sequence[tuple[float, float]] = ()  # moments, and the bytes that had been read and written by then
    tree: Tree = field(default_factory=lambda: Tree({}))
    tree_from: int = 0  # the first round that the tree shows
    genomes: Sequence[Node] = ()
    rewards: Mapping[int, Mapping[str, Sequence[float]]] = field(default_factory=dict)  # by round, of each reward
    answers: Sequence[Sequence[str]] = ()  # of the last round that is complete
    last: Sequence[tuple[str, str]] = ()  # the members of the last round, with their metrics as text
    shares: tuple[float, float, float] | None = None  # of the workers' time: at work, for the disk, for others
    written: float = 0.0
    read: float = 0.0

    @cached_property
    def measure(self) -> str:
        """What fitness is: the first of the measures that somebody has."""
        return next((measure for measure in MEASURES if self.has(measure)), "")

    def has(self, measure: str) -> bool:
        return any(measure in each.averaged or any(measure == key[1] for key in each.members) for each in self.rounds)

    def asked(self, measure: str) -> str:
        """What members were asked in most rounds; others are held apart, since their scores cannot be compared."""
        asked = [key[0] for each in self.rounds for key in each.members if key[1] == measure]
        return max(sorted({*asked}), key=asked.count, default="")

    @cached_property
    def questions(self) -> str:
        return self.asked(self.measure)

    @cached_property
    def best(self) -> tuple[float, str] | None:
        """The best member's value, and its name."""
        key = (self.questions, self.measure)
        there = [(each.members[key].best(key[1]), each.leader[key]) for each in self.rounds if key in each.members]
        return (max if self.measure == "score" else min)(there, default=None)

    @cached_property
    def averaged(self) -> float | None:
        """What the averaged model came to last."""
        return next(
            (each.averaged[self.measure] for each in reversed(self.rounds) if self.measure in each.averaged), None
        )

    @cached_property
    def averaged_on(self) -> str:
        return next((each.averaged_on for each in reversed(self.rounds) if each.averaged), "")

    @cached_property
    def finished(self) -> int:
        return sum(each.complete for each in self.rounds)

    @cached_property
    def tokens(self) -> float:
        return sum(each.tokens for each in self.rounds)

    @cached_property
    def worker_seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    @cached_property
    def goodput(self) -> float | None:
        """Of all seconds that workers were there, those that made what counts."""
        useful = sum(row.spent("train", "evaluate", "merge") for row in self.rows)
        return min(1.0, useful / self.worker_seconds) if self.worker_seconds else None

    @cached_property
    def machine_seconds(self) -> float:
        """A machine counts once, however many workers it has."""
        machines = dict[str, list[tuple[float, float]]]()
        for row in self.rows:
            machines.setdefault(row.machine, []).extend((each.begin, each.end) for each in row.sessions)
        return sum(covered(times) for times in machines.values())

    @cached_property
    def ended(self) -> float:
        """The last sign of life."""
        return max((each.end for row in self.rows for each in row.sessions), default=self.began)


def covered(times: Sequence[tuple[float, float]]) -> float:
    """The length of what these spans of time cover together."""
    total, upto = 0.0, 0.0
    for begin, end in sorted(times):
        total += max(0.0, end - max(begin, upto))
        upto = max(upto, end)
    return total

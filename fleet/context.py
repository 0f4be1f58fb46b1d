"""What the parts of one worker share."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fleet import launches
from fleet.blame import Blame
from fleet.claims import Claims
from fleet.events import Events
from fleet.foresight import FilesRead
from fleet.history import History
from fleet.host import Host
from fleet.lane import Pendings
from fleet.pace import Pace
from fleet.recipe import Recipe
from fleet.store import Store


@dataclass(frozen=True)
class WorkerOptions:
    """How the loop behaves; nothing here changes what is made, but `quorum` and `grace_seconds`, which are bound."""

    launch: int = 0
    seats: int = 0  # so many the launch was begun with, at least
    dead_seconds: float = 60.0  # a pulse that stands still for so long is a dead worker's
    poll_seconds: float = 0.13  # the longest pause between two looks at the bell
    tick_seconds: float = 5.0  # bell or not, look at everything so often
    visible_seconds: float = 90.0  # how long a published file may stay invisible here
    snapshot_seconds: float = 600.0
    keep_every: int = 0  # the files of rounds with such numbers stay; 0: of no old ones
    quorum: float = 1.0
    grace_seconds: float = 0.0
    backup: float = 0.0  # 0 is off
    time_limit: float = math.inf
    off_device: frozenset[str] = frozenset()  # tasks that the second lane makes, where there is one


class Stopped(Exception):
    """The run cannot go on, or was asked not to; says why."""


class Spent(Stopped):
    """This process can make nothing more, but a new one in its place may; says why."""


@dataclass(frozen=True)
class WorkerContext:
    store: Store
    host: Host
    history: History
    claims: Claims
    blame: Blame
    pace: Pace
    events: Events
    options: WorkerOptions
    own: dict[str, bool]  # members made in this lane: their files are likely in this machine's memory
    files_read: FilesRead  # by both lanes
    takes: Callable[[Recipe], bool] = lambda recipe: True  # which recipes are for this lane of the worker
    pending: Pendings = field(default_factory=Pendings)  # made here, and on their way to the disk
    first: "WorkerContext | None" = None  # of the first lane, in the second

    def has(self, id: str) -> bool:
        """It was made here, in whichever lane."""
        return id in self.own or id in self.pending or bool(self.first and self.first.has(id))

    def stopped(self, why: str, again: bool = True) -> Stopped:
        """The end of this launch, and of those before it: for all of its workers, and for this one to raise."""
        launches.stop(self.store, self.options.launch, why, again)
        return Stopped(why)

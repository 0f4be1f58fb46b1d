"""What the parts of one worker share."""

import math
from dataclasses import dataclass

from fleet.blame import Blame
from fleet.claims import Claims
from fleet.events import Events
from fleet.history import History
from fleet.host import Host
from fleet.pace import Pace
from fleet.store import Store


@dataclass(frozen=True)
class WorkerOptions:
    """How the loop behaves; nothing here changes what is made, but `quorum` and `grace_seconds`, which are bound."""

    launch: int = 0
    makers: int = 0  # so many the launch was begun with, at least
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
    own: dict[str, bool]  # members made here: their files are likely in this machine's memory

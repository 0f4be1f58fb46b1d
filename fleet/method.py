"""What a method's script hands to the fleet."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from fleet.fork import Forking
from fleet.gpus import Accelerators
from fleet.history import History
from fleet.metrics import logger
from fleet.metrics.points import points
from fleet.progress import Progress
from fleet.recipe import Strategy
from fleet.run_config import FleetConfig
from fleet.work import Maker

C = TypeVar("C", bound=FleetConfig)


@dataclass(frozen=True)
class Method(Generic[C]):
    algorithm: str  # empty: the configuration says which
    about: str
    config: type[C]
    strategy: Callable[[C], Strategy]
    maker: Callable[[C], Maker]
    prepare: Callable[[C, Path], C] = lambda config, where: config  # checks, before the run is made
    resolve_auto: Callable[[C, Path, Sequence[Accelerators]], C] = lambda config, *_: config  # by a run's machines
    show_result: Callable[[C, Path], None] = lambda config, folder: None  # what is shown when the run is over
    preview: Callable[[C, Path], Iterable[str]] = lambda config, where: ()  # what `check` says of the configuration
    report: Callable[[History], None] = lambda history: None  # files for people, that follow from the registers
    view: type[Progress] = Progress  # how it gets on
    points: logger.Points = points  # what is logged of it
    slots: Callable[[C], int] = lambda config: 0  # members of a round that are trained side by side; 0: it differs
    forked: Forking | None = None  # what a run takes along that goes on from another; none: its runs have no forks
    off_device: frozenset[str] = frozenset()  # tasks that need no device: a worker's second lane makes them
    libraries: tuple[str, ...] = ()  # modules that take a while to import: workers of one machine load them once
    artifacts: tuple[str, ...] = ()  # files of the run's folder that sinks may keep at its end

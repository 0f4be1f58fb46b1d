"""Workers of toy runs, with one lane or two, in this process."""

from pathlib import Path

from fleet import launches
from fleet.disk_store import DiskStore
from fleet.history import History
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.worker import Worker
from tests.toy.config import BESIDE, ToyConfig
from tests.toy.maker import maker
from tests.toy.strategies import strategy

TOY = {"algorithm": "diloco", "population_size": 3, "shards": 2, "max_generations": 4, "inner_steps": 3, "size": 24}


def toy(place: Path, name: str = "w", make=None, kind=DiskStore, **keys) -> Worker:
    config = ToyConfig(**{"project_name": "run", **TOY, **keys})
    create_run(place, "run", config.bound(), Host())
    store, _ = open_run(place / "run", Host(), name)
    launch = launches.latest(store) or launches.begin(store, config.operational())
    second = open_run(place / "run", store.host, name)[0]
    second.__class__ = kind
    lanes = (second, make or maker(config)) if config.disk_lane else None
    return Worker(
        store, strategy(config), make or maker(config), options(config, launch, off_device=BESIDE), None, lanes
    )  # fmt: skip


def seen(place: Path) -> History:
    history = History(open_run(place / "run", Host(), "test")[0])
    history.look()
    return history

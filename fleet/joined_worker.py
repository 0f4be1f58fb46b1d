"""A process that is a worker of a run by its own doing: no starter has begun it, and it does other things besides."""

import sys
from pathlib import Path
from typing import Any

from fleet import launches
from fleet.errors import UserError
from fleet.events import log
from fleet.history import History
from fleet.host import Host
from fleet.method import Method
from fleet.plain import plain
from fleet.processes import let_group_read, worker_of
from fleet.run import create_run, open_run
from fleet.run_config import FleetConfig
from fleet.work import Maker


class JoinedWorker:
    def __init__(self, method: Method[Any], config: FleetConfig, base: Path, script: list[str], command: str) -> None:
        """Make the run's folder, or join it, in a launch of one. `script` logs metrics, as a method's script does."""
        self.host, self.method, self.config, self.script = Host(), method, config, script
        let_group_read(config)
        log.setLevel(config.log_level)
        starter, self.new = create_run(base, config.project_name, config.bound(), self.host, type(config))
        if why := launches.ordered(starter, sys.maxsize):
            raise UserError(f"{base / config.project_name}: {plain(why, 1000)}")
        self.folder = base / config.project_name
        self.launch = launches.begin(starter, config.operational(), command=command, seats=1)
        self.name = f"joined-{self.host.token()[:8]}"
        self.store, _ = open_run(self.folder, self.host, self.name)
        self.history = History(self.store)

    def run(self, make: Maker, beside: Maker) -> str:
        """Work until the run is over, or this process is asked to end; says which. A second lane, if there is one,
        makes what needs no device with a maker of its own."""
        worker, keeper = worker_of(
            self.folder, self.store, self.method, self.config, self.launch, 1, self.script, lambda: make, lambda: beside
        )
        self.host.keep_time()
        keeper.start()
        try:
            return worker.run()
        finally:
            self.history = worker.history
            keeper.end(worker.history.first_open, worker.history.over)

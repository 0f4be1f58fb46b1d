"""A run that is under way somewhere, joined by workers of this machine: its address and the same code are enough."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet import gpus, launches, results_version, version
from fleet.host import Host
from fleet.local import Starter
from fleet.method import Method
from fleet.places import address, here
from fleet.processes import devices_of_each, let_group_read
from fleet.run import open_run
from fleet.run_config import UserError
from fleet.store import Store


def join(methods: Mapping[str, Method[Any]], run: Path, workers: int | None) -> int:
    """Work on it until it is over, or Ctrl-C; the exit code is a start's."""
    folder = here(run)
    store, found = open_run(folder, Host(), "joining")
    algorithm = str(found["config"].get("algorithm"))
    if "" not in methods and algorithm not in methods:
        raise UserError(f"{address(folder)}: a run of {algorithm}, which this command does not know: use its own")
    results_version.check(folder, found)
    if not (launch := launches.latest(store)):
        raise UserError(f"{address(folder)}: nobody has started it yet: whoever has its configuration does")
    check_code(store, launch, address(folder), str(found.get("code")))
    method = methods.get(algorithm, next(iter(methods.values())))
    settings = launches.settings(store, launch)
    config = method.config.joined(found["config"], {**settings, "base_dir": str(folder.parent)})
    let_group_read(config)
    return Joiner(config, folder, workers, method).run()


def check_code(store: Store, launch: int, run: str, commit: str) -> None:
    """Other code may give other bytes, or misread what stands there."""
    started, mine = store.confirmed(launches.path(launch, "start")), results_version.code_hash()
    its = str(started.get("hash") or "unknown")
    if its != mine:
        raise UserError(
            f"{run}: works with code {its[:16]} (begun by {commit or 'an unknown commit'}), and here is "
            f"{mine[:16]} ({version.code() or 'an unknown commit'}): take the same code"
        )


class Joiner(Starter):
    """Starts workers of a launch that is there, and writes nothing of its own but what they say."""

    def __init__(self, config: Any, folder: Path, workers: int | None, method: Method[Any]) -> None:
        each = devices_of_each(config)
        super().__init__(config, Path(), workers or max(1, len(gpus.visible()) // each), method.view)
        self.folder, self._title = folder, f"joined-{self.host.token()[:6]}"

    def entered(self) -> tuple[Store, str]:
        return open_run(self.folder, self.host, self._title)[0], "Joining the run"

    def launched(self, store: Store) -> int:
        return launches.latest(store)

    def title(self, number: int) -> str:
        return self._title

    def log_name(self) -> str:
        return self._title

"""A run's own processes: workers, and the loggers beside them. How they are started, and what they are then."""

import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fleet import gpus, launches, results_version
from fleet.context import Spent, Stopped, WorkerOptions
from fleet.history import History
from fleet.host import Host
from fleet.method import Method
from fleet.metrics import logger
from fleet.metrics.keeper import SinkKeeper
from fleet.metrics.sink import LoggedRun
from fleet.our_packages import console_command
from fleet.plain import log_plainly, plain, say
from fleet.run import open_run
from fleet.run_config import FleetConfig, UserError
from fleet.seats import SPENT
from fleet.store import Store
from fleet.work import Maker
from fleet.worker import Worker


def this_script() -> list[str]:
    """The command that runs the script that is running."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    if not (path := getattr(main, "__file__", None)):
        raise UserError("a run can only be started from a script")
    return [sys.executable, str(Path(path).absolute())]


def this_command() -> str:
    """The command that was given, for whoever wants to give it again."""
    return shlex.join([*called(), *sys.argv[1:]])


def called() -> list[str]:
    """How the script that is running was called, without its options."""
    if command := console_command():
        return [command]
    module = this_script()[1] == "-m"
    return ["python", *(this_script()[1:] if module else sys.argv[:1])]


def work(methods: Mapping[str, Method[Any]], name: str, folder: Path, leash: bool, launch: int = 0) -> int:
    """Be one worker of a run, in the launch that is named, or the newest."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise UserError(f"{name!r} cannot be a worker's name: letters, digits, '-' and '_'")
    host = Host()
    host.keep_time()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.stop())
    if leash:
        threading.Thread(target=hold_leash, args=(host,), daemon=True).start()
    store, method, config, launch = run_in(folder, host, name, methods, launch)
    seats, make = launches.seats(store, launch), partial(method.maker, config)
    worker, keeper = worker_of(folder, store, method, config, launch, seats, this_script(), make, make)
    spent = False
    keeper.start()
    try:
        return {"over": 0, "interrupted": 130}[worker.run()]
    except Stopped as why:
        say(f"{name}: {plain(why, 1000)}", file=sys.stderr)
        spent = isinstance(why, Spent)
        return SPENT if spent else 3
    finally:
        keeper.end(worker.history.first_open, worker.history.over)
        if spent:  # what Python does at its end asks the device, too, which may hang, or abort with another code
            os._exit(SPENT)


def worker_of(
    folder: Path,
    store: Store,
    method: Method[Any],
    config: FleetConfig,
    launch: int,
    seats: int,
    script: list[str],
    make: Callable[[], Maker],
    beside: Callable[[], Maker],
) -> tuple[Worker, SinkKeeper]:
    """A worker of a run, as this process's view of it is named, and a keeper of the run's sinks. With DISK_LANE it has
    a second lane, with a view of its own and the maker that `beside` gives."""
    how, host, name = options(config, launch, seats, method.off_device), store.host, store.name
    second = (open_run(folder, host, name)[0], beside()) if config.disk_lane and method.off_device else None
    worker = Worker(store, method.strategy(config), make(), how, method.report, second)
    return worker, keeper_of(folder, host, name, script, config, worker.noted, launch)


def log_to(methods: Mapping[str, Method[Any]], kind: str, claim: int, folder: Path) -> int:
    """Log a run's metrics to one sink, for the worker that has claimed it."""
    host = Host()
    store, method, config, _ = run_in(folder, host, f"{kind}-{host.token()}", methods)
    known = {key.upper(): value for key, value in config.bound().items()}
    project = config.wandb_project or os.environ.get("WANDB_PROJECT") if kind == "wandb" else ""
    names = (project or config.algorithm, config.project_name, store.run_id)
    logged = LoggedRun(store.home(), *names, entity=config.wandb_entity, config=known)
    return logger.run(kind, History(store), claim, logged, method.points, method.artifacts)


def show_result(methods: Mapping[str, Method[Any]], folder: Path) -> int:
    """Of a run that is over."""
    _, method, config, _ = found_in(folder, Host(), "show", methods)
    method.show_result(config, folder)
    return 0


def keeper_of(
    folder: Path,
    host: Host,
    name: str,
    script: list[str],
    config: FleetConfig,
    note: Callable[[str], None],
    launch: int = 0,
) -> SinkKeeper:
    """Of the sinks of a run, for a process of it that has such a name."""

    def command(kind: str, claim: int) -> list[str]:
        return [*script, "--sink", kind, str(claim), str(folder)]

    store, _ = open_run(folder, host, name)  # a view of its own, since it works in a thread of its own
    return SinkKeeper(store, sorted({"csv", *config.metrics}), command, note, launch, config.dead_seconds)


def run_in(
    folder: Path, host: Host, name: str, methods: Mapping[str, Method[Any]], launch: int = 0
) -> tuple[Store, Method[Any], Any, int]:
    """A run as it is known to its own processes, with a device and a log of their own."""
    found = _, _, config, _ = found_in(folder, host, name, methods, launch)
    gpus.choose(name, devices_of_each(config))
    log_plainly("%(asctime)s %(levelname)s %(message)s", config.log_level)
    return found


def found_in(
    folder: Path, host: Host, name: str, methods: Mapping[str, Method[Any]], launch: int = 0
) -> tuple[Store, Method[Any], Any, int]:
    """A run, its method, and its configuration in one launch of it."""
    store, run = open_run(folder, host, name)
    results_version.check(folder, run)
    launch = launch or launches.latest(store)
    method = methods.get(str(run["config"].get("algorithm")), next(iter(methods.values())))
    config = method.config.joined(run["config"], launches.settings(store, launch))
    let_group_read(config)
    return store, method, config, launch


def devices_of_each(config: FleetConfig) -> int:
    """Of each worker: more than one where a method's workers are groups of processes."""
    return int(getattr(config, "devices_per_worker", 1))


def let_group_read(config: FleetConfig) -> None:
    if config.group_readable:
        os.umask(0o027)


def options(
    config: FleetConfig, launch: int, seats: int = 0, off_device: frozenset[str] = frozenset()
) -> WorkerOptions:
    return WorkerOptions(
        launch=launch,
        seats=seats,
        dead_seconds=config.dead_seconds,
        poll_seconds=config.poll_seconds,
        tick_seconds=min(5.0, config.dead_seconds / 5),
        snapshot_seconds=config.snapshot_minutes * 60,
        keep_every=config.keep_every,
        quorum=config.quorum,
        grace_seconds=config.grace_seconds,
        backup=config.backup_factor,
        time_limit=config.time_limit_hours * 3600 or float("inf"),
        off_device=off_device,
    )


def thread_counts(threads: int) -> dict[str, str]:
    """Every library's own way to be told how many threads it may use. numpy's begins its own when it is imported, and
    of a process with threads no workers can be forked; what is large is torch's."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
    return {**dict.fromkeys(names, str(threads)), "OPENBLAS_NUM_THREADS": "1"}


def hold_leash(host: Host) -> None:
    """Ends with whoever holds the other end of the standard input."""
    while os.read(0, 1):
        pass
    host.stop()

"""From a method to processes: one script is the starter, and the same script is each of its workers.

`python SCRIPT` starts local workers; `python SCRIPT --worker NAME RUN_DIR` is one. Nothing on the disk names code.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from cyclopts import App, Parameter
from cyclopts.validators import Number

from fleet import faults, gpus, launches
from fleet.config import FleetConfig, Wrong, load, lowered, read_json
from fleet.desk import Options, Stopped
from fleet.diary import plain
from fleet.history import History
from fleet.host import Host
from fleet.recipe import Strategy
from fleet.run import create_run, open_run
from fleet.work import Maker
from fleet.worker import Worker

C = TypeVar("C", bound=FleetConfig)

_EXAMPLES = """Start a run, or go on with it (the same command does both):

    {name} --config evolution.json --workers 4

Watch it from another terminal:

    python -m fleet.status RUN_DIR --watch

Ctrl-C stops it well: each worker ends at its next step, and what it has done so far is kept. Exit codes: 0 the run
is over, 1 it stopped and says why, 2 something about the command or the disk is wrong, 130 it was interrupted."""


@dataclass(frozen=True)
class Method(Generic[C]):
    """What a method's script hands to the fleet."""

    algorithm: str  # empty: the configuration says which
    about: str
    config: type[C]
    strategy: Callable[[C], Strategy]
    maker: Callable[[C], Maker]
    prepared: Callable[[C, Path], C] = lambda config, where: config  # checks, before the run is made
    finished: Callable[[C, Path], None] = lambda config, folder: None  # what is shown when the run is over
    report: Callable[[History], None] = lambda history: None  # files for people, that follow from the registers


def main(method: Method[Any], arguments: list[str] | None = None, others: Sequence[Method[Any]] = ()) -> None:
    """The whole command line of a method's script; of several methods, ALGORITHM says which."""
    os.umask(0o077)
    methods = {each.algorithm: each for each in (method, *others)}
    name = " ".join(["python", *this_script()[1:]])
    app = App(name=name, help=method.about, help_epilogue=_EXAMPLES.format(name=name), version_flags=[])

    @app.default
    def start(
        *,
        config: Annotated[Path, Parameter(help="The configuration file.")] = Path("evolution.json"),
        workers: Annotated[
            int | None, Parameter(help="Local workers; NUM_MACHINES by default.", validator=Number(gte=1, lte=1024))
        ] = None,
        algorithm: Annotated[
            str, Parameter(help="Which method, instead of ALGORITHM.", show=not method.algorithm)
        ] = "",
        worker: Annotated[tuple[str, Path] | None, Parameter(show=False)] = None,
        leash: Annotated[bool, Parameter(show=False)] = False,
        launch: Annotated[int, Parameter(show=False)] = 0,
        make: Annotated[bool, Parameter(show=False)] = False,
    ) -> int:
        if worker:
            return work(methods, *worker, leash, launch)
        from fleet.local import Starter

        where = config.absolute().parent
        mine = methods.get(algorithm or named(config), method)
        chosen = mine.prepared(settled(mine, load(config, mine.config), algorithm), where)
        _let_group_read(chosen)
        if make:
            return made(chosen, where)
        starter = Starter(chosen, where, workers)
        if (code := starter.run()) == 0 and starter.over:
            mine.finished(chosen, starter.folder)
        return code

    try:
        sys.exit(app(arguments, result_action="return_value"))
    except (faults.Damaged, faults.Refused) as error:
        print(f"{error}\nThis file of the run is damaged: restore it from a backup.", file=sys.stderr)
    except (Wrong, faults.Fault) as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


def made(config: FleetConfig, where: Path) -> int:
    """Make the run's folder, or join it, and start nothing; what the launcher wants to know is one line of JSON."""
    base = (where / config.base_dir).resolve()
    store, new = create_run(base, config.project_name, config.bound(), Host())
    known = {"folder": str(base / config.project_name), "run_id": store.run_id, "new": new}
    more = {"operational": config.operational(), "threads": config.threads, "restarts": config.restarts}
    more["workers"] = config.num_machines
    print(json.dumps(known | more))
    return 0


def this_script() -> list[str]:
    """The command that runs the script that is running."""
    main = sys.modules["__main__"]
    if spec := getattr(main, "__spec__", None):
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    if not (path := getattr(main, "__file__", None)):
        raise Wrong("a run can only be started from a script")
    return [sys.executable, str(Path(path).absolute())]


def settled(method: Method[C], config: C, flag: str) -> C:
    """The configuration with its algorithm and its project named: a script's own algorithm wins, or a flag."""
    if method.algorithm and flag not in ("", method.algorithm):
        raise Wrong(f"--algorithm {flag}: this script runs {method.algorithm}")
    algorithm = flag or method.algorithm or config.algorithm
    if not algorithm:
        raise Wrong("ALGORITHM is missing: it says which method the run uses")
    bound = config.bound() | {"algorithm": algorithm, "project_name": config.project_name or algorithm}
    return method.config.joined(bound, config.operational())


def named(config: Path) -> str:
    """The ALGORITHM of a configuration file, before anybody knows which keys it may have."""
    value = read_json(config)
    found = lowered(value, str(config)).get("algorithm") if isinstance(value, dict) else ""
    return found if isinstance(found, str) else ""


def work(methods: Mapping[str, Method[Any]], name: str, folder: Path, leash: bool, launch: int = 0) -> int:
    """Be one worker of a run, in the launch that is named, or the newest."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        raise Wrong(f"{name!r} cannot be a worker's name: letters, digits, '-' and '_'")
    gpus.choose(name)
    host = Host()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: host.stop())
    if leash:
        threading.Thread(target=_hold_leash, args=(host,), daemon=True).start()
    store, run = open_run(folder, host, name)
    launch = launch or launches.latest(store)
    method = methods.get(str(run["config"].get("algorithm")), next(iter(methods.values())))
    config = method.config.joined(run["config"], launches.settings(store, launch))
    _let_group_read(config)
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
    worker = Worker(store, method.strategy(config), method.maker(config), options(config, launch), method.report)
    try:
        return {"over": 0, "interrupted": 130}[worker.run()]
    except Stopped as why:
        print(f"{name}: {plain(why, 1000)}", file=sys.stderr)
        return 3


def _let_group_read(config: FleetConfig) -> None:
    if config.group_readable:
        os.umask(0o027)


def options(config: FleetConfig, launch: int) -> Options:
    return Options(
        launch=launch,
        dead_seconds=config.dead_seconds,
        poll_seconds=config.poll_seconds,
        tick_seconds=min(5.0, config.dead_seconds / 5),
        snapshot_seconds=config.snapshot_minutes * 60,
        quorum=config.quorum,
        grace_seconds=config.grace_seconds,
        backup=config.backup_factor,
        time_limit=config.time_limit_hours * 3600 or float("inf"),
    )


def thread_counts(threads: int) -> dict[str, str]:
    """Every library's own way to be told how many threads it may use."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "RAYON_NUM_THREADS")
    return dict.fromkeys(names, str(threads))


def process(method_command: list[str], name: str, folder: Path, threads: int, log: Any) -> subprocess.Popen[bytes]:
    """One local worker on a leash: when the starter is gone, it stops at its next step boundary."""
    return subprocess.Popen(
        [*method_command, "--leash", "--worker", name, str(folder)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **thread_counts(threads)},
        start_new_session=True,
    )


def _hold_leash(host: Host) -> None:
    while os.read(0, 1):
        pass
    host.stop()

"""From a method to processes: one script is the starter, and the same script is each of its workers.

`python SCRIPT` starts local workers; `python SCRIPT --worker NAME RUN_DIR` is one. Nothing on the disk names code.
"""

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import App, Parameter
from cyclopts.validators import Number

from fleet import faults, gpus, help_pages, presets
from fleet.fork import ForkOrder
from fleet.fork import fork as fork_run
from fleet.forkserver import serve
from fleet.gpus import Accelerators
from fleet.host import Host
from fleet.idle_workers import crowded, idle
from fleet.method import Method
from fleet.metrics import sinks
from fleet.permissions import keep_private
from fleet.places import here
from fleet.plain import say
from fleet.processes import called, devices_of_each, let_group_read, log_to, show_result, this_script, work
from fleet.run import create_run
from fleet.run_config import FleetConfig, UserError, load, lowered, read_json
from fleet.seats import SPENT

C = TypeVar("C", bound=FleetConfig)

_ABOUT = """{about}

Start a run, or go on with it (the same command does both):

    {name} --config evolution.json --workers 4

Watch it from another terminal:

    python -m fleet.status RUN_DIR --watch

Ctrl-C stops it well: each worker ends at its next step, and what it has done so far is kept."""
_USUAL = Path("evolution.json")
_CODES = """Exit codes: 0 the run is over, 1 it stopped and says why, 2 something about the command or the disk is
wrong, 130 it was interrupted."""


def main(method: Method[Any], arguments: list[str] | None = None, others: Sequence[Method[Any]] = ()) -> None:
    """The whole command line of a method's script; of several methods, ALGORITHM says which."""
    keep_private()
    methods = {each.algorithm: each for each in (method, *others)}
    app = _page(method, others)

    @app.default
    def start(
        *,
        config: Annotated[Path, Parameter(help="The configuration file.")] = _USUAL,
        preset: Annotated[
            str, Parameter(help=f"Instead, one that comes along: {', '.join(presets.known())}; it runs in runs/ here.")
        ] = "",
        workers: Annotated[
            int | None, Parameter(help="Local workers; NUM_MACHINES by default.", validator=Number(gte=1, lte=1024))
        ] = None,
        algorithm: Annotated[
            str, Parameter(help="Which method, instead of ALGORITHM.", show=not method.algorithm)
        ] = "",
        join: Annotated[
            Path | None,
            Parameter(help="Work on a run that is under way, by its folder or address; no configuration is needed."),
        ] = None,
        worker: Annotated[tuple[str, Path] | None, Parameter(show=False)] = None,
        leash: Annotated[bool, Parameter(show=False)] = False,
        launch: Annotated[int, Parameter(show=False)] = 0,
        make: Annotated[bool, Parameter(show=False)] = False,
        look: Annotated[bool, Parameter(show=False)] = False,
        also: Annotated[str, Parameter(show=False)] = "{}",
        forkserver: Annotated[tuple[str, Path, str] | None, Parameter(show=False)] = None,
        accelerators: Annotated[str, Parameter(show=False)] = "[]",
        sink: Annotated[tuple[str, int, Path] | None, Parameter(show=False)] = None,
        show: Annotated[Path | None, Parameter(show=False)] = None,
        fork: Annotated[str, Parameter(show=False)] = "",
        follow: Annotated[Path | None, Parameter(show=False)] = None,
        finish: Annotated[bool, Parameter(show=False)] = False,
        begun: Annotated[bool, Parameter(show=False)] = False,
    ) -> int:
        if forkserver:
            libraries = methods.get(forkserver[0], method).libraries
            words = serve(this_script(), lambda: [*map(importlib.import_module, libraries)])
            return int(app(words, result_action="return_value"))
        if worker:
            return work(methods, *worker, leash, launch)
        if sink:
            return log_to(methods, *sink)
        if show:
            return show_result(methods, show)
        if fork:
            order = ForkOrder.model_validate_json(fork)
            return fork_run(methods.get(order.settings.get("algorithm", ""), method), order)
        from fleet import following
        from fleet.joining import join as join_run
        from fleet.local import Starter

        if join:
            return join_run(methods, join, workers)
        if follow:
            return following.follow(methods, follow, finish, begun)
        config, where = _chosen(config, preset)
        mine = methods.get(algorithm or named(config), method)
        found = read(config, mine, methods, algorithm)
        found = found.model_copy(update={"base_dir": presets.BASE_DIR}) if preset else found
        here(Path(found.base_dir), where)  # before anybody looks for a run there
        named_so = completed(mine, found, algorithm, json.loads(also))
        if look:
            for line in mine.preview(named_so, where):
                say(line)
            return 0
        machines = [Accelerators(**each) for each in json.loads(accelerators)]
        chosen = mine.prepare(mine.resolve_auto(named_so, where, machines) if machines else named_so, where)
        let_group_read(chosen)
        sinks.check(chosen.metrics)
        if make:
            return made(chosen, where, mine.slots(chosen))
        starter = Starter(chosen, where, workers, mine.view)
        if few := idle(starter.count, mine.slots(chosen)):
            say(f"Note: {few}.")
        there = len(gpus.visible())
        if shared := gpus.sharing(starter.count, there, devices_of_each(chosen)):
            say(f"Note: {shared}.")
        if not there and (many := crowded(starter.count, chosen.threads, len(os.sched_getaffinity(0)))):
            say(f"Note: {many}.")
        return starter.run(lambda: mine.show_result(chosen, starter.folder))

    try:
        _check_worker(sys.argv[1:] if arguments is None else arguments)
        sys.exit(app(arguments, result_action="return_value"))
    except (faults.Damaged, faults.Refused) as error:
        say(f"{error}\nThis file of the run is damaged: restore it from a backup.", file=sys.stderr)
    except faults.Denied as error:
        say(error, file=sys.stderr)
    except faults.Passing as error:
        say(f"{error}: the disk does not answer properly; the same command tries again", file=sys.stderr)
        sys.exit(SPENT)  # a supervisor does so by itself
    except (UserError, faults.Fault) as error:
        say(error, file=sys.stderr)
    except KeyboardInterrupt:
        say("Interrupted before a worker was started; the same command begins again.", file=sys.stderr)
        sys.exit(130)
    sys.exit(2)


def _page(method: Method[Any], others: Sequence[Method[Any]]) -> App:
    """First what it does, how it is called and the options; how it works below them."""
    name = " ".join(called())
    first, _, how = method.about.partition("\n\n")
    also = (f"ALGORITHM {each.algorithm} in the configuration:\n\n{each.about}" for each in others)
    more = filter(None, [_CODES, how, *also])
    return help_pages.app(name, _ABOUT.format(about=first, name=name), "\n\n".join(each.strip("\n") for each in more))


def _chosen(config: Path, preset: str) -> tuple[Path, Path]:
    """The configuration's file, and the folder that it is seen from."""
    if preset and config != _USUAL:
        raise UserError(f"--preset {preset} and --config {config}: one of them")
    if preset:
        return presets.file_of(preset), Path.cwd()
    if config == _USUAL and not os.path.exists(config):
        there = ", ".join(presets.known())
        raise UserError(f"{config}: is not in this folder; --config names another file, --preset one of {there}")
    return config, config.absolute().parent


def _check_worker(words: Sequence[str]) -> None:
    """`--worker 4` means another option: this one is for processes that are workers themselves."""
    given = [word for word in words if word.partition("=")[0] == "--worker"]
    after = words[words.index(given[0]) + 1 :][:2] if given else []
    if given and ("=" in given[0] or len(after) < 2 or after[1].startswith("-")):
        raise UserError("--worker is what a worker is started with; how many local workers there are, --workers says")


def made(config: FleetConfig, where: Path, slots: int) -> int:
    """Make the run's folder, or join it, and start nothing; what the launcher wants to know is one line of JSON."""
    base = here(Path(config.base_dir), where)
    store, new = create_run(base, config.project_name, config.bound(), Host(), type(config))
    known = {"folder": str(base / config.project_name), "run_id": store.run_id, "new": new}
    more = {"operational": config.operational(), "threads": config.threads, "restarts": config.restarts}
    more |= {"workers": config.num_machines, "devices_per_worker": devices_of_each(config), "slots": slots}
    say(json.dumps(known | more))
    return 0


def completed(method: Method[C], config: C, flag: str, also: Mapping[str, Any] | None = None) -> C:
    """The configuration with its algorithm and its project named; a script has its own, and a flag wins. What
    machines.json says `also` belongs to it."""
    if method.algorithm and flag not in ("", method.algorithm):
        raise UserError(f"--algorithm {flag}: this script runs {method.algorithm}")
    if method.algorithm and not flag and config.algorithm not in ("", method.algorithm):
        script = f"{config.algorithm.replace('-', '_')}.py"
        other = f"start {script} instead, or " if Path(__file__).parent.parent.joinpath(script).is_file() else ""
        raise UserError(
            f"ALGORITHM is {config.algorithm!r}, and this script runs {method.algorithm}: {other}leave ALGORITHM out"
        )
    algorithm = flag or method.algorithm or config.algorithm
    if not algorithm:
        raise UserError("ALGORITHM is missing: it says which method the run uses")
    if foreign := [key for key in also or {} if key not in method.config.model_fields]:
        raise UserError(f"machines.json: {foreign[0]} says nothing to {algorithm}, only to methods that pre-train")
    bound = config.bound() | {"algorithm": algorithm, "project_name": config.project_name or algorithm, **(also or {})}
    return method.config.joined(bound, config.operational())


def read(config: Path, mine: Method[C], methods: Mapping[str, Method[Any]], algorithm: str) -> C:
    """The configuration; where it cannot be one of this method, and none was named, the others are."""
    try:
        return load(config, mine.config)
    except UserError as error:
        others = ", ".join(name for name in methods if name != mine.algorithm)
        if not others or algorithm or named(config):
            raise
        said = f"(no ALGORITHM is given, so it was read as {mine.algorithm}'s; or {others}?)"
        raise UserError(f"{error} {said}") from None


def named(config: Path) -> str:
    """The ALGORITHM of a configuration file, before anybody knows which keys it may have."""
    value = read_json(config)
    found = lowered(value, str(config)).get("algorithm") if isinstance(value, dict) else ""
    return found if isinstance(found, str) else ""

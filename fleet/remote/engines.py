"""Where people have an engine that starts processes already, it starts the same supervisors: Ray, or Slurm."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter

from fleet.plain import say
from fleet.processes import thread_counts
from fleet.remote.agent_link import AGENT
from fleet.remote.launcher import Launcher
from fleet.remote.on_ray import Ray
from fleet.remote.on_slurm import Slurm
from fleet.remote.starting import begun, may_start
from fleet.run_config import UserError


@Parameter(name="*")
@dataclass(frozen=True)
class Via:
    """Who starts the processes, if not SSH."""

    via: Annotated[list[str], Parameter(consume_multiple=True, negative="")] = field(default_factory=list)
    "`ray [ADDRESS]` or `slurm`: an engine that is there already starts the workers. machines.json is not read."
    python: str = ""
    "Slurm: the Python on its nodes; this one by default."
    slurm: Annotated[list[str], Parameter(negative="")] = field(default_factory=list)
    "Slurm: further options of sbatch, such as --slurm=--partition=gpu."

    @property
    def engine(self) -> str:
        name, *more = self.via or [""]
        if name not in ("", "ray", "slurm") or len(more) > (name == "ray"):
            raise UserError(f"--via {' '.join(self.via)}: `ray`, `ray ADDRESS` or `slurm` is expected")
        if (self.python or self.slurm) and name != "slurm":
            raise UserError("--python and --slurm are for --via slurm")
        return name

    @property
    def address(self) -> str:
        return (*self.via, "", "")[1]


def handed_over(launcher: Launcher, via: Via, dry_run: bool) -> bool:
    """Let an engine start the workers; says whether there is something to be watched."""
    if launcher.place.in_bucket:
        raise UserError(
            f"BASE_DIR {launcher.place.base}: an engine's jobs join a run in a bucket by --join, not by --via"
        )
    if not launcher.sees_disk():
        raise UserError(f"BASE_DIR {launcher.place.base}: --via {via.engine} needs it on this machine")
    if dry_run:
        made = launcher.foreseen()
        say(engine_of(launcher, via, made, 1).plan(made["workers"], _threads(made), "RUN-ID", launcher.place.folder))
        return False
    made, proxy = launcher.create(None), launcher.proxy(None)
    if not may_start(state := proxy.ask("state"), made):
        return bool(state["over"])
    engine = engine_of(launcher, via, made, begun(launcher, proxy, made, joining=False, seats=1))
    say(engine.start(made["workers"], _threads(made), made["run_id"], launcher.place.folder))
    return True


def taken_back(launcher: Launcher, via: Via, now: bool) -> int:
    """Stop, and wait until the engine has nothing of this run any more."""
    proxy, run_id = launcher.open(None)
    proxy.ask("stop", why="stopped by its user")
    engine = engine_of(launcher, via)
    if now:
        say(engine.kill(run_id))
    say("Waiting for the workers to end. Ctrl-C stops waiting.")
    while engine.working(run_id):
        time.sleep(1.0)
    say("No worker is left.")
    return 0


def engine_of(launcher: Launcher, via: Via, made: Mapping[str, Any] | None = None, launch: int = 0) -> Ray | Slurm:
    words = json.dumps(_words(launcher, made, launch)) if made else ""
    if via.engine == "ray":
        return Ray(via.address, _program(), words, made["devices_per_worker"] if made else 1)
    return Slurm(via.python or sys.executable, via.slurm, _program(), words)


def _words(launcher: Launcher, made: Mapping[str, Any], launch: int) -> dict[str, Any]:
    """What `agent.hold` is called with: the same order that a machine's supervisor gets over SSH, for one worker."""
    run = launcher.place.folder
    order = launcher.order(run, "", made, launch, [{}])
    code = {"tar": f"{run}/{launcher.code.name}", "digest": launcher.code.digest}
    return {**code, "order": order, "env": thread_counts(made["threads"])}


def _threads(made: Mapping[str, Any]) -> int:
    """Of a worker with all of its processes."""
    return int(made["threads"]) * int(made["devices_per_worker"])


def _program() -> str:
    """agent.py with a last line: it comes with the order, and not from the disk."""
    return f"{AGENT.read_text(encoding='utf-8')}\n\nhold(sys.argv[2], **json.loads(sys.argv[1]))\n"

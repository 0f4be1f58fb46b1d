"""The command line of launch_to_machines.py."""

import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.live import Live
from rich.text import Text

from fleet import faults
from fleet import machines as machines_file
from fleet.config import Wrong
from fleet.machines import Machine
from fleet.remote import engines, preflight, shown
from fleet.remote.all_machines import Bad, Links
from fleet.remote.door import Door, FarDoor
from fleet.remote.launcher import Launcher, Scripts, file_name, place
from fleet.remote.link import Trouble
from fleet.remote.ssh import Unreachable
from fleet.status import plain

_EXAMPLES = """Start the run that evolution.json describes, on all machines of machines.json, and watch it:

    {name}

Look whether everything would work, and what would be done:

    {name} check
    {name} launch --dry-run

Come back later, from anywhere that has these two files:

    {name} status
    {name} logs -f
    {name} stop

Exit codes: 0 all is well, 1 at least one machine is not, or the run stopped; 2 something about the command, the
configuration or the disk is wrong."""


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """What every command understands."""

    config: Path = Path("evolution.json")
    "The configuration of the run."
    machines: Path = Path("machines.json")
    "The machines."
    algorithm: str = ""
    "Which method, instead of ALGORITHM."
    through: str = ""
    "Go to the disk through this machine, as if it were not mounted here."
    timeout: Annotated[float, Parameter(validator=Number(gte=1, lte=600))] = 15.0
    "Seconds until a machine that does not answer is given up."
    ssh_config: Path | None = None
    "Another SSH client configuration than ~/.ssh/config."
    strict: bool = False
    "Refuse machines whose torch or Python differ."


@Parameter(name="*")
@dataclass(frozen=True)
class Via:
    """Who starts the processes, if not SSH."""

    via: Annotated[list[str], Parameter(consume_multiple=True)] = field(default_factory=list)
    "`ray [ADDRESS]` or `slurm`: an engine that is there already starts the workers. machines.json is not read."
    python: str = sys.executable
    "Slurm: the Python on its nodes."
    slurm: Annotated[list[str], Parameter(negative="")] = field(default_factory=list)
    "Slurm: further options of sbatch, such as --slurm=--partition=gpu."

    @property
    def engine(self) -> str:
        if self.via and self.via[0] not in ("ray", "slurm") or len(self.via) > 1 + (self.via[:1] == ["ray"]):
            raise Wrong(f"--via {' '.join(self.via)}: `ray`, `ray ADDRESS` or `slurm` is expected")
        return self.via[0] if self.via else ""

    @property
    def address(self) -> str:
        return self.via[1] if len(self.via) > 1 else ""


def main(scripts: Scripts, root: Path, about: str, arguments: list[str] | None = None) -> None:
    os.umask(0o077)
    name = f"python {Path(sys.argv[0]).name}"
    app = App(name=name, help=about, help_epilogue=_EXAMPLES.format(name=name), version_flags=[])
    commands = Commands(scripts, root)
    app.default(commands.launch)
    for command in ("launch", "check", "status", "logs", "stop", "restart", "clean"):
        app.command(getattr(commands, command))
    try:
        sys.exit(app(arguments, result_action="return_value"))
    except (Wrong, Unreachable, Trouble, faults.Fault) as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("\nInterrupted. What was started goes on; `status` shows it, `stop` ends it.", file=sys.stderr)
        sys.exit(130)
    sys.exit(2)


class Commands:
    def __init__(self, scripts: Scripts, root: Path) -> None:
        self._scripts, self._root = scripts, root

    def _launcher(self, common: Common, machines: bool = True) -> Launcher:
        return Launcher(
            place(common.config, common.algorithm, self._scripts),
            machines_file.load(common.machines) if machines else (),
            self._scripts, self._root, common.timeout, common.through, common.ssh_config, common.strict,
        )  # fmt: skip

    # -- starting ------------------------------------------------------------------------------------------------------

    def launch(
        self,
        *,
        common: Common = Common(),
        detach: Annotated[bool, Parameter(negative="", help="Come back at once instead of watching.")] = False,
        dry_run: Annotated[bool, Parameter(negative="", help="Only print what would be done on each machine.")] = False,
        min_machines: Annotated[
            int, Parameter(help="With fewer machines nothing is started.", validator=Number(gte=1))
        ] = 1,
        via: Via = Via(),
    ) -> int:
        """Check all machines, give them the code, start their workers, and watch until Ctrl-C; they go on."""
        launcher = self._launcher(common, machines=not via.engine)
        if via.engine:
            working = _handed_over(launcher, via, dry_run)
            return _watched(launcher) if working and not detach and not dry_run else 0
        if dry_run:
            shown.plan(launcher)
            return 0
        with ThreadPoolExecutor(1) as aside:
            here = launcher.sees_disk()
            made = aside.submit(launcher.create, None) if here else None
            with launcher.links() as links:
                known = made.result() if made else launcher.create(links)
                started = _started(launcher, links, known, min_machines)
        if detach or not started.working:
            return started.code
        return max(started.code, _watched(launcher))

    def check(self, *, common: Common = Common()) -> int:
        """Look at all machines: can each be reached, has it what is needed, is the disk the same? Starts nothing."""
        launcher = self._launcher(common)
        with launcher.links() as links:
            door = launcher.door(links)
            door.ask("base", base=launcher.base_at_door())
            run_id = door.ask("peek", folder=f"{launcher.base_at_door()}/{launcher.place.project}")
            reports = launcher.look(links, run_id)
        launcher.console.print(preflight.table(reports), *filter(None, [launcher.stranger]))
        return int(any(report.why for report in reports) or bool(launcher.stranger))

    # -- watching ------------------------------------------------------------------------------------------------------

    def status(
        self, *, common: Common = Common(),
        watch: Annotated[bool, Parameter(negative="", help="Keep looking until Ctrl-C.")] = False,
    ) -> int:  # fmt: skip
        """Show what the run does, and what its machines wrote down."""
        launcher = self._launcher(common)
        door, _ = launcher.open(None)
        if watch:
            return _watched(launcher)
        color = launcher.console.is_terminal
        picture = door.ask("picture", width=launcher.console.width, color=color)
        launcher.console.print(Text.from_ansi(picture["text"]))
        launcher.console.print(shown.crews(door.ask("crews")))
        return 0

    def logs(
        self, machine: str = "", /, *, common: Common = Common(),
        follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="", help="Go on until Ctrl-C.")] = False,
    ) -> int:  # fmt: skip
        """Show the ends of the workers' logs, of one machine or of all."""
        launcher = self._launcher(common)
        door, _ = launcher.open(None)
        wanted = file_name(launcher.named(machine).name) if machine else ""
        seen: dict[str, int] = {}
        while True:
            for name, end, text in door.ask("logs", wanted=wanted, seen=seen):
                seen[f"{name}.log"] = end
                for line in text.splitlines():
                    print(f"{name}  {plain(line, 2000)}", flush=True)
            if not follow:
                return 0
            time.sleep(0.5)

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(
        self, *, common: Common = Common(),
        now: Annotated[bool, Parameter(negative="", help="Kill all their processes at once.")] = False,
        via: Via = Via(),
    ) -> int:  # fmt: skip
        """Ask all workers to end at their next step and keep what they have; the run can go on later."""
        launcher = self._launcher(common, machines=not via.engine)
        if via.engine:
            return _taken_back(launcher, via, now)
        with launcher.links() as links:
            door, run_id = launcher.open(links)
            door.ask("stop", why="stopped by its user")
            left = _ended(launcher, links, launcher.machines, run_id, now)
        return shown.ended(launcher, left, links.bad)

    def restart(
        self, machine: str, /, *, common: Common = Common(),
        now: Annotated[bool, Parameter(negative="", help="Kill its processes instead of asking them.")] = False,
    ) -> int:  # fmt: skip
        """End the workers of one machine and start them again, in the launch that is at work."""
        launcher = self._launcher(common)
        chosen = launcher.named(machine)
        with launcher.links() as links:
            made = launcher.create(links)
            if machine in links.bad:
                raise Wrong(f"{machine}: {links.bad[machine]}")
            left = _ended(launcher, links, [chosen], made["run_id"], now, quietly=not now)
            if isinstance(got := left.get(machine), Bad) or got and got["left"]:
                raise Wrong(f"{machine}: its processes do not end; try --now")
            return _started(launcher, links, made, 1, only=[chosen]).code

    def clean(self, *, common: Common = Common()) -> int:
        """Remove old code and dead drafts from the disk and the machines. Refused while anybody works."""
        launcher = self._launcher(common)
        with launcher.links() as links:
            door, run_id = launcher.open(links)
            found = links.ask("running", "looking for workers", lambda m: {"run_id": run_id})
            busy = [name for name, got in found.items() if isinstance(got, Bad) or got["processes"]]
            if busy or links.bad:
                raise Wrong(f"not while workers run, or may run, on {', '.join([*busy, *links.bad])}: stop them first")
            gone = door.ask("clean")
            keep = [launcher.code.digest, door.ask("state")["code"]]
            tidied = links.ask("tidy", "tidying up", lambda m: {"keep": keep})
        copies = sum(got["removed"] for got in tidied.values() if not isinstance(got, Bad))
        print(f"Removed {gone['code']} old codes and {gone['drafts']} drafts on the disk, {copies} copies on machines.")
        return 0


@dataclass(frozen=True)
class Started:
    code: int  # 1: not on all machines
    working: bool  # somewhere


def _may_start(state: dict[str, Any], made: dict[str, Any]) -> bool:
    print(f"{'New run' if made['new'] else 'The run'} {made['folder']}", flush=True)
    if state["over"]:
        print("The run is over. To start another one, choose another PROJECT_NAME. Its last round:")
        print(*(f"  {plain(line)}" for line in state["last"]), sep="\n")
    elif state["ended"]:
        print(f"The run was ended: {plain(state['why'])}")
    return not (state["over"] or state["ended"])


def _started(
    launcher: Launcher, links: Links, made: dict[str, Any], least: int, only: Sequence[Machine] | None = None
) -> Started:
    """Start the workers wherever none are."""
    door, console = launcher.door(links), launcher.console
    state = door.ask("state")
    if not _may_start(state, made):
        return Started(0 if state["over"] else 1, False)
    reports = launcher.look(links, made["run_id"])
    console.print(preflight.table(reports))
    if launcher.stranger:
        raise Wrong(launcher.stranger)
    running = [report for report in reports if report.running]
    wanted = [r.machine for r in reports if not r.why and not r.running and (only is None or r.machine in only)]
    if state["why"] and running:
        names = ", ".join(report.machine.name for report in running)
        print(f"Workers on {names} were asked to stop and still finish: try again soon, or `stop --now` first.")
        return Started(1, False)
    if len(wanted) + len(running) < least or not wanted and not running:
        print(f"{len(wanted) + len(running)} of {len(reports)} machines are ready; nothing was started.")
        return Started(1, False)
    joined = {r.machine.name: {"already": r.running} for r in running}
    answers: dict[str, Any] = dict(joined)
    if wanted:
        door.ask("keep_code", digest=launcher.code.digest, data=launcher.code.text)
        operational = made["operational"]
        begun = door.ask("begin", operational=operational, digest=launcher.code.digest, joining=bool(running))
        print(f"{'Launch' if begun['new'] else 'Joining launch'} {begun['launch']}", flush=True)
        answers |= launcher.start(links, wanted, made, begun["launch"])
    listed = list(launcher.machines if only is None else only)
    console.print(shown.started(listed, answers, {report.machine.name: report.why for report in reports}))
    bad = [m for m in listed if isinstance(answers.get(m.name, Bad()), Bad)]
    return Started(int(bool(bad)), len(bad) < len(listed))


def _handed_over(launcher: Launcher, via: Via, dry_run: bool) -> bool:
    """Let an engine start the workers; says whether any work now."""
    if not launcher.sees_disk():
        raise Wrong(f"BASE_DIR {launcher.place.base}: --via {via.engine} needs it on this machine")
    if dry_run:
        made = launcher.foreseen()
        if via.engine == "slurm":
            print(engines.slurm_script(launcher, made, 1, made["workers"], via.python, via.slurm))
        else:
            print(f"On each accelerator of the Ray cluster {via.address}, or each node without one, an actor runs:")
            print(json.dumps(engines.words(launcher, made, 1, "SEAT", leash=True), indent=1))
        return False
    made, door = launcher.create(None), launcher.door(None)
    state = door.ask("state")
    if not _may_start(state, made):
        return False
    door.ask("keep_code", digest=launcher.code.digest, data=launcher.code.text)
    launch = door.ask("begin", operational=made["operational"], digest=launcher.code.digest, joining=False)["launch"]
    print(f"Launch {launch}", flush=True)
    if via.engine == "slurm":
        script = engines.slurm_script(launcher, made, launch, made["workers"], via.python, via.slurm)
        print(f"Slurm job {engines.submit(script)}", flush=True)
    else:
        print(*engines.start_on_ray(launcher, made, launch, via.address), sep="\n", flush=True)
    return True


def _taken_back(launcher: Launcher, via: Via, now: bool) -> int:
    door, run_id = launcher.open(None)
    launch = door.ask("stop", why="stopped by its user")
    if now and via.engine == "ray":
        print(f"{engines.end_on_ray(run_id, via.address)} actors killed")
    elif now:
        engines.cancel(launcher.place.project)
    print("Waiting for the workers to end. Ctrl-C stops waiting.", flush=True)
    while True:
        crews = [crew for crew in door.ask("crews") if crew.get("launch") == launch]
        if all(seat.get("code") is not None for crew in crews for seat in crew.get("seats", [])):
            print("No worker is left.")
            return 0
        time.sleep(0.5)


def _ended(
    launcher: Launcher, links: Links, machines: Sequence[Machine], run_id: str, now: bool, quietly: bool = False
) -> dict[str, Any]:
    """Wait until no process is left there, and say what is."""
    if now:
        return links.ask("kill", "killing", lambda m: {"run_id": run_id, "seconds": 10.0}, machines, wait=11)
    if quietly:  # without an order in the run: only this machine's crew is told
        links.ask("ask_to_end", "asking its workers to end", lambda m: {"run_id": run_id}, machines)
    else:
        print("Asked the workers to end at their next step. Ctrl-C stops waiting; `stop --now` kills them.", flush=True)
    left = list(machines)
    found: dict[str, Any] = {}
    while left:
        found |= links.ask("running", "waiting for its workers to end", lambda m: {"run_id": run_id}, left)
        still = [m for m in left if not isinstance(got := found.get(m.name, Bad()), Bad) and got["processes"]]
        for machine in left:
            if machine not in still and machine.name in found and not isinstance(found[machine.name], Bad):
                print(f"{plain(machine.name)}: no worker is left", flush=True)
        left = still
        time.sleep(0.5 if left else 0)
    return {name: got if isinstance(got, Bad) else {"left": got["processes"]} for name, got in found.items()}


def _watched(launcher: Launcher) -> int:
    """The live status until the run is over or the user has seen enough."""
    door, _ = launcher.open(None)
    try:
        _look(launcher, door)
    except KeyboardInterrupt:
        script = f"python {Path(sys.argv[0]).name}"
        print(f"\nThe workers go on. `{script} status` looks again, `{script} stop` ends them.")
        return 0
    state = door.ask("state")
    if state["over"]:
        print("The run is over. Its last round:", *(f"  {plain(line)}" for line in state["last"]), sep="\n")
        return 0
    print(f"The run stopped: {plain(state['why'], 1000)}")
    return 1


def _look(launcher: Launcher, door: Door | FarDoor) -> None:
    console = launcher.console
    told: list[str] = []
    with Live(console=console, auto_refresh=False) as live:
        while True:
            picture = door.ask("picture", width=console.width, color=console.is_terminal)
            if console.is_terminal:
                live.update(Text.from_ansi(picture["text"]), refresh=True)
            elif picture["state"] not in told[-1:]:
                told.append(picture["state"])
                print(plain(picture["state"], 1000), flush=True)
            if picture["over"] or door.ask("state")["why"]:
                return
            time.sleep(2.0)

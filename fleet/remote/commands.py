"""The command line of launch_to_machines.py."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.text import Text

from fleet import faults, help_pages
from fleet import machines as machines_file
from fleet.console import in_full
from fleet.machines import Machine, file_name
from fleet.our_packages import console_command
from fleet.permissions import keep_private
from fleet.plain import plain, say
from fleet.remote import engines, launch_tables, preflight
from fleet.remote.agent_link import Trouble
from fleet.remote.engines import Via
from fleet.remote.launcher import Launcher, MethodScripts, again, place
from fleet.remote.ssh import Unreachable
from fleet.remote.starting import start
from fleet.remote.watching import killed, waited, watched
from fleet.run_config import UserError

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

    @property
    def words(self) -> list[str]:
        """Those that were given, for the next command."""
        given = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return [word for name in given for word in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]


Strict = Annotated[bool, Parameter(negative="", help="Refuse machines whose torch or Python differ.")]


def main(scripts: MethodScripts, root: Path, about: str, arguments: list[str] | None = None) -> None:
    keep_private()
    name = console_command() or f"python {Path(sys.argv[0]).name}"
    app = help_pages.app(name, about, _EXAMPLES.format(name=name), suppress_keyboard_interrupt=False)
    commands = Commands(scripts, root)
    app.default(commands.launch)
    for command in ("launch", "check", "status", "logs", "stop", "restart", "clean"):
        app.command(getattr(commands, command))
    try:
        sys.exit(app(arguments, result_action="return_value"))
    except (UserError, Unreachable, Trouble, faults.Fault) as error:
        say(error, file=sys.stderr)
    except KeyboardInterrupt:
        say("\nInterrupted. What was started goes on; to look at it, or to end it:", file=sys.stderr)
        say(*(f"  {again(verb, *commands.options)}" for verb in ("status", "stop")), sep="\n", file=sys.stderr)
        sys.exit(130)
    sys.exit(2)


class Commands:
    def __init__(self, scripts: MethodScripts, root: Path) -> None:
        self._scripts, self._root, self.options = scripts, root, list[str]()

    def _launcher(self, common: Common, machines: Sequence[Machine] | None = None, strict: bool = False) -> Launcher:
        self.options = common.words
        return Launcher(
            place(common.config, common.algorithm, self._scripts),
            machines_file.load(common.machines) if machines is None else machines,
            self._scripts, self._root, common.timeout, common.through, common.ssh_config, strict, [common.machines],
            self.options,
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
        strict: Strict = False,
        via: Via = Via(),
    ) -> int:
        """Check all machines, give them the code, start their workers, and watch until Ctrl-C; they go on."""
        if via.engine:
            launcher = self._launcher(common, [])
            return watched(launcher) if engines.handed_over(launcher, via, dry_run) and not detach else 0
        launcher = self._launcher(common, strict=strict)
        if dry_run:
            launch_tables.plan(launcher)
            return 0
        with launcher.links() as links:
            code, working = start(launcher, links, launcher.create(links), min_machines)
        return max(code, watched(launcher)) if working and not detach else code

    def check(self, *, common: Common = Common(), strict: Strict = False) -> int:
        """Look at all machines: can each be reached, has it what is needed, is the disk the same? And at the
        configuration: has its text as many tokens as the run needs? Starts nothing."""
        launcher = self._launcher(common, strict=strict)
        with launcher.links() as links:
            proxy = launcher.proxy(links)
            proxy.ask("base", base=launcher.base_at_proxy())
            run_id = proxy.ask("peek", folder=f"{launcher.base_at_proxy()}/{launcher.place.project}")
            reports = launcher.look(links, run_id)
            preflight.show(launcher.console, reports)
            if launcher.stranger:
                say(launcher.stranger)
            wrong = any(report.why for report in reports) or bool(launcher.stranger)
            try:
                if said := launcher.preview(links):
                    say(said)
            except (UserError, Trouble) as error:
                say(f"The configuration: NO: {error}")
                wrong = True
        return int(wrong)

    # -- watching ------------------------------------------------------------------------------------------------------

    def status(
        self, *, common: Common = Common(),
        watch: Annotated[bool, Parameter(negative="", help="Go on until Ctrl-C.")] = False,
    ) -> int:  # fmt: skip
        """Show what the run does, and what its machines wrote down."""
        launcher = self._launcher(common, None if os.path.exists(common.machines) else [])
        proxy, _ = launcher.open(None)
        if watch:
            return watched(launcher, finish=False)
        picture = proxy.ask("picture", width=launcher.console.width, color=launcher.console.is_terminal)
        in_full(launcher.console, [Text.from_ansi(picture["text"])])
        launcher.console.print(launch_tables.supervisors(proxy.ask("supervisors")))
        return 0

    def logs(
        self, machine: str = "", /, *, common: Common = Common(),
        follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="", help="Go on until Ctrl-C.")] = False,
    ) -> int:  # fmt: skip
        """Show the ends of the workers' logs, of one machine or of all."""
        launcher = self._launcher(common, None if os.path.exists(common.machines) else [])
        proxy, _ = launcher.open(None)
        seen: dict[str, int] = {}
        while True:
            if not (found := proxy.ask("logs", wanted=file_name(machine), seen=seen)) and not seen and not follow:
                raise UserError(f"no log {f'of {machine} ' if machine else ''}in {launcher.place.folder}/workers")
            for name, end, text in found:
                seen[f"{name}.log"] = end
                for line in text.splitlines():
                    say(f"{name}  {plain(line, 2000)}")
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
        if via.engine:
            return engines.taken_back(self._launcher(common, []), via, now)
        launcher = self._launcher(common)
        with launcher.links() as links:
            proxy, run_id = launcher.open(links)
            state = proxy.ask("state")
            proxy.ask("stop", why="stopped by its user")
            if state["over"] or state["ended"]:
                say("The run is over.")
            elif not now:
                say("Asked the workers to end at their next step. Ctrl-C stops waiting; to kill them:")
                say(f"  {launcher.command('stop', '--now')}")
            left = (killed if now else waited)(links, launcher.machines, run_id)
        launch_tables.ended(launcher.console, launcher.machines, left, links.bad)
        return int(any(m.name not in left or left[m.name]["left"] for m in launcher.machines))

    def restart(
        self, machine: str, /, *, common: Common = Common(),
        now: Annotated[bool, Parameter(negative="", help="Kill its processes instead of asking them.")] = False,
    ) -> int:  # fmt: skip
        """End the workers of one machine and start them again, in the launch that is at work."""
        chosen = self._launcher(common).named(machine)
        launcher = self._launcher(common, [chosen])
        with launcher.links() as links:
            if machine in links.bad:
                raise UserError(f"{machine}: {links.bad[machine]}")
            state = launcher.open(links)[0].ask("state")
            if state["why"] or state["over"] or not state["launch"]:
                raise UserError(
                    f"no launch is at work{': ' if state['why'] else ''}{plain(state['why'])}; to begin one:\n"
                    f"  {launcher.command('launch')}"
                )
            made = launcher.create(links)
            if (code := state["code"]) not in ("", launcher.code.digest):
                raise UserError(
                    f"the launch that is at work has other code ({code[:12]}) than what lies here: stop it first"
                )
            if not now:
                links.ask("ask_to_end", "asking its workers to end", lambda m: {"run_id": made["run_id"]})
            left = (killed if now else waited)(links, [chosen], made["run_id"])
            if machine not in left or left[machine]["left"]:
                raise UserError(f"{machine}: its processes do not end; try --now")
            return start(launcher, links, made, joining=True)[0]

    def clean(self, *, common: Common = Common()) -> int:
        """Remove old code and dead drafts from the disk and the machines. Refused while anybody works."""
        launcher = self._launcher(common)
        with launcher.links() as links:
            proxy, run_id = launcher.open(links)
            found = links.ask("running", "looking for workers", lambda m: {"run_id": run_id})
            busy = [name for name, got in found.items() if got["processes"]]
            if busy or links.bad:
                raise UserError(
                    f"not while workers run, or may run, on {', '.join([*busy, *links.bad])}: stop them first"
                )
            gone = proxy.ask("clean")
            keep = [launcher.code.digest, proxy.ask("state")["code"]]
            tidied = links.ask("tidy", "tidying up", lambda m: {"keep": keep})
        copies = sum(got["removed"] for got in tidied.values())
        say(f"Removed {gone['code']} old codes and {gone['drafts']} drafts on the disk, {copies} copies on machines.")
        return 0

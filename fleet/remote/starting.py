"""Starting the workers wherever none are."""

from typing import Any

from fleet.plain import plain, say
from fleet.processes import this_command
from fleet.remote import launch_tables, preflight
from fleet.remote.all_machines import Links
from fleet.remote.launcher import Launcher
from fleet.remote.preflight import Report
from fleet.remote.run_proxy import RemoteRunProxy, RunProxy
from fleet.run_config import UserError


def may_start(state: dict[str, Any], made: dict[str, Any]) -> bool:
    """Say which run it is; there may be nothing left to do."""
    say(f"{'New run' if made['new'] else 'The run'} {made['folder']}", *made["notes"], sep="\n")
    if state["over"]:
        say("The run is over. To start another one, choose another PROJECT_NAME.")
    elif state["ended"]:
        say(f"The run was ended: {plain(state['why'])}")
    return not (state["over"] or state["ended"])


def begun(launcher: Launcher, proxy: RunProxy | RemoteRunProxy, made: dict[str, Any], joining: bool, seats: int) -> int:
    """The number of the launch that the workers belong to; their code lies in the run then."""
    code = launcher.code
    found = proxy.ask(
        "begin", operational=made["operational"], digest=code.digest, data=code.text, command=this_command(),
        seats=seats, joining=joining,
    )  # fmt: skip
    say(f"{'Launch' if found['new'] else 'Joining launch'} {found['launch']}")
    return int(found["launch"])


def start(
    launcher: Launcher, links: Links, made: dict[str, Any], least: int = 1, joining: bool = False
) -> tuple[int, bool]:
    """Where workers are already, their launch is joined. The exit code, 1 if they do not work on all machines, and
    whether there is something to be watched: work, or what the run came to."""
    proxy = launcher.proxy(links)
    state = proxy.ask("state")
    if not may_start(state, made):
        return int(not state["over"]), bool(state["over"])
    reports = launcher.look(links, made["run_id"])
    preflight.show(launcher.console, reports)
    if launcher.stranger:
        raise UserError(launcher.stranger)
    busy = [report for report in reports if report.busy]
    wanted = [report.machine for report in reports if not report.why and not report.busy]
    if why := _why_not(launcher, state, reports, busy, len(wanted) + len(busy), least):
        say(why)
        return 1, False
    answers: dict[str, Any] = {report.machine.name: {"already": report.running} for report in busy}
    if wanted:
        launch = begun(launcher, proxy, made, joining or bool(busy), len(wanted) + len(busy))
        answers |= launcher.start(links, wanted, made, launch)
    unsaid = {each.machine.name: links.bad.get(each.machine.name, "not asked") for each in reports if not each.why}
    launch_tables.started(launcher.console, launcher.machines, answers, unsaid)
    return int(len(answers) < len(launcher.machines)), bool(answers)


def _why_not(
    launcher: Launcher, state: dict[str, Any], reports: list[Report], busy: list[Report], ready: int, least: int
) -> str:
    if state["why"] and busy:
        names = ", ".join(report.machine.name for report in busy)
        kill = launcher.command("stop", "--now")
        return f"Workers on {names} were asked to stop and still finish: try again soon, or first:\n  {kill}"
    codes = {r.machine.name: {each["code"] for each in r.running if each["what"] == "supervisor"} for r in busy}
    if others := [name for name, found in codes.items() if found - {launcher.code.digest}]:
        return f"Workers on {', '.join(others)} are at work with other code than what lies here: stop them first."
    if ready < max(1, least):
        return f"{ready} of {len(reports)} machines are ready; nothing was started."
    return ""

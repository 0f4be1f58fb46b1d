"""Watching a run until it is over, and its workers until none is left."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.live import Live
from rich.text import Text

from fleet.machines import Machine
from fleet.plain import plain, say
from fleet.remote import shown
from fleet.remote.all_machines import Links, NoAnswer
from fleet.remote.launcher import Launcher
from fleet.remote.run_proxy import RemoteRunProxy, RunProxy


def killed(links: Links, machines: Sequence[Machine], run_id: str) -> dict[str, Any]:
    """What is left on each machine after all was killed."""
    return links.ask("kill", "killing", lambda m: {"run_id": run_id, "seconds": 10.0}, machines, wait=11)


def waited(links: Links, machines: Sequence[Machine], run_id: str) -> dict[str, Any]:
    """Wait until no process of the run is left on any of them that answers."""
    left, ended = list(machines), dict[str, Any]()
    while left:
        found = links.ask("running", "waiting for its workers to end", lambda m: {"run_id": run_id}, left)
        for name, got in found.items():
            if isinstance(got, NoAnswer):
                ended[name] = got
            elif all(each["what"] == "child" for each in got["processes"]):
                ended[name] = {"left": []}
                say(f"{plain(name)}: no worker is left")
        left = [machine for machine in left if machine.name in found and machine.name not in ended]
        time.sleep(0.5 if left else 0)
    return ended


def watched(launcher: Launcher) -> int:
    """The live status until the run is over or the user has seen enough."""
    proxy, _ = launcher.open(None)
    try:
        why = _look(launcher, proxy)
    except KeyboardInterrupt:
        say("\nThe workers go on. To look again, or to end them:")
        say(*(f"  {launcher.command(verb)}" for verb in ("status", "stop")), sep="\n")
        return 0
    if why:
        say(f"The run stopped: {why}")
        return 1
    say("The run is over. Its last round:", *(f"  {plain(line)}" for line in proxy.ask("state")["last"]), sep="\n")
    return 0


def _nobody_left(supervisors: Sequence[Mapping[str, Any]], launch: int) -> bool:
    """As far as supervisors have written: what they wrote only ends the watching."""
    mine = [seat for supervisor in supervisors if supervisor["launch"] == launch for seat in supervisor["seats"]]
    return bool(mine) and all(seat.get("code") is not None for seat in mine)


def _look(launcher: Launcher, proxy: RunProxy | RemoteRunProxy) -> str:
    """Why it stopped; nothing when it is over."""
    console, told = launcher.console, ""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            lines = console.height - 1 if console.is_terminal else 0
            picture = proxy.ask("picture", width=console.width, color=console.is_terminal, lines=lines)
            if picture["text"] and console.is_terminal:
                live.update(Text.from_ansi(picture["text"]), refresh=True)
            elif picture["state"] not in ("", told):
                told = picture["state"]
                say(plain(told, 1000))
            if picture["over"] or picture["why"]:
                return "" if picture["over"] else plain(picture["why"], 1000)
            if picture["launch"] and _nobody_left(supervisors := proxy.ask("supervisors"), picture["launch"]):
                console.print(shown.supervisors(supervisors))
                return f"all its workers have ended; their logs may say why:\n  {launcher.command('logs')}"
            time.sleep(2.0)
